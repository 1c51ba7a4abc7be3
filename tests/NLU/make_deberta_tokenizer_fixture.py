"""Writes deberta_tokenizer_fixture.json: DeBERTa-v2's token ids by upstream Transformers.

Run it in an environment that has upstream's `transformers` (5.23 made it) and `sentencepiece`:

    python tests/NLU/make_deberta_tokenizer_fixture.py --data ../shared/data

The fixture holds a tiny SentencePiece model, the ids of awkward strings in it, and SHA-256 sums of
the ids of whole GLUE files in a model that is trained on some of their lines, here and in the test.

Upstream 5.23 has a normaliser of its own, where 4.4.2 used the model's: it composes characters, and
leaves a no-break space alone. It also breaks exact ties between two splits ("0" "00", "00" "0")
another way. So texts have neither, and digits are single pieces.
"""

import argparse
import base64
import hashlib
import importlib.util
import io
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import sentencepiece

FIXTURE = Path(__file__).with_name("deberta_tokenizer_fixture.json")


def _load_other_maker() -> ModuleType:
    path = Path(__file__).with_name("make_tokenizer_fixture.py")
    spec = importlib.util.spec_from_file_location("make_tokenizer_fixture", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OTHER = _load_other_maker()
DATA = OTHER.DATA
_SPECIAL = {
    "<mask>": "[MASK]",
    "</s>": "[SEP]",
    "<s>": "[CLS]",
    "<pad>": "[PAD]",
    "<unk>": "[UNK]",
    "<MASK>": "[mask]",
}
CALLS = {
    "single": {},
    "cut": {"truncation": True, "max_length": 16},
    "cut left": {"truncation": True, "max_length": 7, "truncation_side": "left"},
    "pair": {"pair": True},
    "pair, longest first": {"pair": True, "truncation": True, "max_length": 16},
    "pair, longest first, left": {
        "pair": True,
        "truncation": True,
        "max_length": 11,
        "truncation_side": "left",
    },
    "pair, only second": {"pair": True, "truncation": "only_second", "max_length": 820},
    "small letters": {"do_lower_case": True},
    "no specials": {"add_special_tokens": False},
}
_SETTINGS = ("truncation_side", "do_lower_case")


def _spell(string: str) -> str:
    for theirs, ours in _SPECIAL.items():
        string = string.replace(theirs, ours)
    return string


STRINGS = tuple(
    _spell(string)
    for string in OTHER.STRINGS
    if not any(mark in string for mark in ("\u0301", "\u00a0", "\x00"))
)


def train(lines: Iterable[str], pieces: int) -> bytes:
    """A SentencePiece model with the special pieces of DeBERTa-v2's, but for [MASK]."""
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder, "spaces.tsv")
        rules.write_text("9\t20\nA\t20\nD\t20\n")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=pieces,
            model_type="unigram",
            character_coverage=1.0,
            normalization_rule_tsv=str(rules),
            split_digits=True,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            pad_piece="[PAD]",
            bos_piece="[CLS]",
            eos_piece="[SEP]",
            unk_piece="[UNK]",
            # More threads would add up in another order.
            num_threads=1,
            minloglevel=2,
        )
    return model.getvalue()


def pieces_sum(model: bytes) -> str:
    """SHA-256 of a model's pieces and scores; the model itself also holds names of files."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    scored = [(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(len(pieces))]
    return hashlib.sha256(repr(scored).encode()).hexdigest()


def write_model(folder: Path, model: bytes) -> Path:
    """Writes spm.model, and the files published beside it, into a folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spm.model").write_bytes(model)
    (folder / "config.json").write_text('{"model_type": "deberta-v2"}', "utf-8")
    settings = {"do_lower_case": False, "vocab_type": "spm"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder


def string_ids(open_tokenizer, call: dict) -> list[list[int]]:
    """The ids of `STRINGS`; for pairs, of each with the one after it.

    Args:
        open_tokenizer: takes a tokenizer's settings.
        call: one of `CALLS`: arguments of a call and settings.
    """
    tokenizer = open_tokenizer(**{name: call[name] for name in _SETTINGS if name in call})
    arguments = {name: call[name] for name in call if name not in (*_SETTINGS, "pair")}
    second = [*STRINGS[1:], STRINGS[0]] if call.get("pair") else None
    return tokenizer(list(STRINGS), second, **arguments)["input_ids"]


def _glue_texts(data: Path, file: tuple) -> tuple[list[str], list[str]]:
    first, second = OTHER.glue_texts(data, *file)
    return tuple([text.replace("\u00a0", " ") for text in part] for part in (first, second))


def train_on_glue(data: Path) -> bytes:
    """A model of 1,000 pieces, trained on the development sets."""
    files = [file for file in OTHER.GLUE_FILES if file[1] == "dev"]
    return train((text for file in files for text in _glue_texts(data, file)[0]), 1000)


def glue_sums(tokenizer, data: Path) -> Iterator[tuple[str, str]]:
    """(what was encoded, SHA-256 of the ids and token types) for each GLUE file.

    Single texts are cut at 128 tokens and pairs at 32; SST-2, by far the largest, has no pairs.
    """
    for file in OTHER.GLUE_FILES:
        first, second = _glue_texts(data, file)
        for kind, pair, length in (("singles", None, 128), ("pairs", second, 32)):
            if file[0] == "SST-2" and pair:
                continue
            batch = tokenizer(first, pair, truncation=True, max_length=length)
            rows = [*batch["input_ids"], *batch["token_type_ids"]]
            ids = "\n".join(" ".join(map(str, row)) for row in rows)
            yield f"{file[0]} {file[1]} {kind}", hashlib.sha256(ids.encode()).hexdigest()


def main(argv: list[str] | None = None) -> None:
    """Writes the fixture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="folder with glue/ in it")
    data = parser.parse_args(argv).data
    from transformers import DebertaV2Tokenizer, __version__

    tiny, large = train([_spell(line) for line in OTHER.CORPUS], 110), train_on_glue(data)
    with tempfile.TemporaryDirectory() as folder:
        tiny_folder = write_model(Path(folder, "tiny"), tiny)
        large_folder = write_model(Path(folder, "large"), large)

        def open_tiny(**settings):
            return DebertaV2Tokenizer.from_pretrained(str(tiny_folder), **settings)

        tokenizer = open_tiny()
        strings = {name: string_ids(open_tiny, call) for name, call in CALLS.items()}
        texts = {
            str(skip): tokenizer.batch_decode(strings["single"], skip_special_tokens=skip)
            for skip in (False, True)
        }
        large_tokenizer = DebertaV2Tokenizer.from_pretrained(str(large_folder))
        fixture = {
            "transformers": __version__,
            "model": base64.b64encode(tiny).decode(),
            "strings": strings,
            "texts": texts,
            "glue model": pieces_sum(large),
            "glue": dict(glue_sums(large_tokenizer, data)),
        }
    lines = [f"{json.dumps(name)}: {json.dumps(part)}" for name, part in fixture.items()]
    FIXTURE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    print(f"{FIXTURE.name}: {FIXTURE.stat().st_size / 1024:.0f} KiB, transformers {__version__}")


if __name__ == "__main__":
    main()
