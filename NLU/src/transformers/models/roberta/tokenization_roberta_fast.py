"""RoBERTa's tokenizer: GPT-2's byte-level BPE in RoBERTa's frame.

<s> A </s>      or, for a pair,      <s> A </s></s> B </s>
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from loralib.io.atomic import atomic_write

from ...tokenization_utils_base import text_of, write_json
from ...tokenization_utils_fast import TOKENIZER_FILE, PreTrainedTokenizerFast, read_tokenizer_file

VOCAB_FILE = "vocab.json"
MERGES_FILE = "merges.txt"


class RobertaTokenizerFast(PreTrainedTokenizerFast):
    """Byte-level BPE: any text has ids, and the ids give the text back.

    A space belongs to the word after it, so a word at the beginning of a text is another token than
    the same word later on; `add_prefix_space` makes them one.

    Args:
        vocab_file: ``vocab.json``: the id of each token.
        merges_file: ``merges.txt``: the pairs that are joined, the first ones first.
        tokenizer_file: ``tokenizer.json``, which holds both; it wins over them.
        mask_token: given as a string, it takes the space before it along.
        add_prefix_space: put a space before each text.
        trim_offsets: the offsets in `BatchEncoding.encodings` leave out that space.
        added_tokens, settings: as in `PreTrainedTokenizerFast`.

    Raises:
        OSError: a file cannot be read.
        ValueError: files are missing, or their model is not BPE.
    """

    vocab_files = (
        {"tokenizer_file": TOKENIZER_FILE},
        {"vocab_file": VOCAB_FILE, "merges_file": MERGES_FILE},
    )
    config_names = (*PreTrainedTokenizerFast.config_names, "add_prefix_space", "trim_offsets")
    model_input_names: list[str] = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        vocab_file: str | os.PathLike | None = None,
        merges_file: str | os.PathLike | None = None,
        tokenizer_file: str | os.PathLike | None = None,
        *,
        bos_token: str | AddedToken = "<s>",
        eos_token: str | AddedToken = "</s>",
        unk_token: str | AddedToken = "<unk>",
        sep_token: str | AddedToken = "</s>",
        pad_token: str | AddedToken = "<pad>",
        cls_token: str | AddedToken = "<s>",
        mask_token: str | AddedToken = "<mask>",
        add_prefix_space: bool = False,
        trim_offsets: bool = True,
        added_tokens: Mapping[int, str | AddedToken] | None = None,
        **settings: Any,
    ):
        self.add_prefix_space = add_prefix_space
        self.trim_offsets = trim_offsets
        if tokenizer_file is not None:
            backend = read_tokenizer_file(tokenizer_file)
        elif vocab_file is not None and merges_file is not None:
            backend = _read_bpe(vocab_file, merges_file)
        else:
            raise ValueError(f"RoBERTa needs {TOKENIZER_FILE}, or {VOCAB_FILE} with {MERGES_FILE}")
        if not isinstance(backend.model, BPE):
            kind = type(backend.model).__name__
            raise ValueError(f"{tokenizer_file}: holds a {kind} model, but RoBERTa's is BPE")
        if isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
            backend.pre_tokenizer.add_prefix_space = add_prefix_space
        if isinstance(mask_token, str):
            mask_token = AddedToken(mask_token, lstrip=True, special=True)
        super().__init__(
            backend,
            # What tokenizer.json does not list is not in its vocabulary.
            added_tokens=added_tokens if tokenizer_file is None else None,
            bos_token=bos_token,
            eos_token=eos_token,
            unk_token=unk_token,
            sep_token=sep_token,
            pad_token=pad_token,
            cls_token=cls_token,
            mask_token=mask_token,
            **settings,
        )
        backend.post_processor = processors.RobertaProcessing(
            (text_of(sep_token), self.sep_token_id),
            (text_of(cls_token), self.cls_token_id),
            trim_offsets=trim_offsets,
            add_prefix_space=add_prefix_space,
        )

    def save_vocabulary(self, save_directory: str | os.PathLike) -> tuple[str, ...]:
        """Writes ``tokenizer.json``, and the same as ``vocab.json`` and ``merges.txt``."""
        vocab_path = Path(save_directory, VOCAB_FILE)
        merges_path = Path(save_directory, MERGES_FILE)
        model = json.loads(self._tokenizer.to_str())["model"]
        write_json(vocab_path, model["vocab"])
        with atomic_write(merges_path) as temporary:
            lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
            temporary.write_text("\n".join(lines) + "\n", "utf-8")
        return (*super().save_vocabulary(save_directory), str(vocab_path), str(merges_path))


def _read_bpe(vocab_file: str | os.PathLike, merges_file: str | os.PathLike) -> Tokenizer:
    """GPT-2's byte-level BPE from its two files."""
    try:
        backend = Tokenizer(BPE.from_file(os.fspath(vocab_file), os.fspath(merges_file)))
    except Exception as error:  # the package raises no narrower class
        raise OSError(f"{vocab_file}, {merges_file}: not a BPE vocabulary ({error})") from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    backend.decoder = decoders.ByteLevel()
    return backend
