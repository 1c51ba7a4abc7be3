"""Encodes text by GPT-2's byte-level BPE (Radford et al. 2019, section 2.2), using tokenizers.

encoder = get_encoder("vocab")            # a folder, or a name on the hub such as "gpt2"
ids = encoder.encode(" a small text")
text = encoder.decode(ids)
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from encoded import END_OF_TEXT_ID
from hub import hub_files

END_OF_TEXT = "<|endoftext|>"

FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"), ("tokenizer.json",))
"""The files of a vocabulary in each of its formats: OpenAI's, and the hub's two."""
VOCAB_HELP = "folder with encoder.json and vocab.bpe, or a name on the hub such as gpt2"
"""The help of --vocab, whose value `get_encoder` takes."""


class Encoder:
    """Converts text to token ids and back; ids are those of upstream's ``GPT2Tokenizer``.

    ``<|endoftext|>`` within a text becomes its id, 50256. The ids may have gaps.

    Args:
        vocab: the id of each token, with bytes spelled in GPT-2's printable alphabet.
        merges: the pairs that are joined, in order of priority.

    Raises:
        ValueError: a byte or the result of a merge has no id, or that of ``<|endoftext|>`` is not
            50256.
    """

    def __init__(self, vocab: dict[str, int], merges: list[tuple[str, str]]):
        # BPE would silently drop text that it has no token for.
        missing = set(pre_tokenizers.ByteLevel.alphabet()) - vocab.keys()
        if missing:
            raise ValueError(f"the vocabulary lacks {len(missing)} of the 256 bytes")
        if vocab.get(END_OF_TEXT) != END_OF_TEXT_ID:
            raise ValueError(
                f"the vocabulary gives {END_OF_TEXT} the id {vocab.get(END_OF_TEXT)}, "
                f"not {END_OF_TEXT_ID}"
            )
        try:
            self._tokenizer = Tokenizer(BPE(vocab, merges))
        except Exception as error:  # the package raises no narrower class
            raise ValueError(str(error)) from error
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
        self._ids = frozenset(vocab.values())

    def encode(self, text: str) -> list[int]:
        """Returns the text's token ids; no special token is added."""
        return self._tokenizer.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, computed in parallel."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: the vocabulary has no token with one of the ids.
        """
        for token in ids:
            if token not in self._ids:
                raise ValueError(f"the vocabulary has no token of id {token}")
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def get_encoder(vocab: str | os.PathLike) -> Encoder:
    """Returns the encoder of a vocabulary.

    Args:
        vocab: a folder with ``encoder.json`` and ``vocab.bpe``, or ``vocab.json`` and
            ``merges.txt``, or ``tokenizer.json``; or a repository on the hub with one of these.

    Raises:
        OSError: there is no such vocabulary.
        ValueError: its files are damaged, or not GPT-2's kind of vocabulary.
    """
    paths = _find_files(os.fspath(vocab))
    try:
        return Encoder(*_read(paths))
    except Exception as error:  # the package raises no narrower class
        files = ", ".join(str(path) for path in paths)
        raise ValueError(f"{files}: not a vocabulary of GPT-2's kind ({error})") from error


def _find_files(vocab: str) -> list[Path]:
    """Returns the files of a vocabulary, in one of the formats in `FILES`."""
    if os.path.isdir(vocab):
        for names in FILES:
            paths = [Path(vocab, name) for name in names]
            if all(path.is_file() for path in paths):
                return paths
        formats = ", or ".join(" with ".join(names) for names in FILES)
        raise FileNotFoundError(f"{vocab}: holds no vocabulary ({formats})")
    return hub_files(vocab, FILES[1:])


def _read(paths: list[Path]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Reads the ids of tokens, and the merges."""
    if len(paths) == 2:
        return BPE.read_file(*map(str, paths))
    model = json.loads(paths[0].read_text("utf-8"))["model"]
    if model["type"] != "BPE":
        raise ValueError(f"the model is {model['type']}, not BPE")
    # Older files store a merge as one string, newer ones as a pair.
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return model["vocab"], [tuple(pair) for pair in pairs]
