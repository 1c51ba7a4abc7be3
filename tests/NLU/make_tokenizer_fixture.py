"""Writes tokenizer_fixture.json: token ids by upstream Transformers, to compare ours with.

Run it in an environment that has upstream's `transformers` and not this project's:

    python tests/NLU/make_tokenizer_fixture.py --data ../shared/data

The fixture holds a tiny byte-level BPE vocabulary, the ids of awkward strings in it, and SHA-256
sums of the ids of whole GLUE files in GPT-2's BPE vocabulary with RoBERTa's special tokens. The
functions here that do not need upstream are the tests' as well.
"""

import argparse
import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

FIXTURE = Path(__file__).with_name("tokenizer_fixture.json")
DATA = Path(__file__).parents[2].parent / "shared" / "data"

# As upstream's own RoBERTa has it: the mask takes the space before it along.
MASK = {
    "content": "<mask>",
    "lstrip": True,
    "normalized": True,
    "rstrip": False,
    "single_word": False,
}

# (folder, file, first text's column, second text's, whether there is a header)
GLUE_FILES = (
    ("RTE", "train", 1, 2, True),
    ("RTE", "dev", 1, 2, True),
    ("RTE", "test", 1, 2, True),
    ("CoLA", "train", 3, None, False),
    ("CoLA", "dev", 3, None, False),
    ("CoLA", "test", 1, None, True),
    ("SST-2", "train", 0, None, True),
    ("SST-2", "dev", 0, None, True),
)

CALLS = {
    "single": {},
    "cut": {"truncation": True, "max_length": 16},
    "cut left": {"truncation": True, "max_length": 7, "truncation_side": "left"},
    "pair": {"pair": True},
    "pair, longest first": {"pair": True, "truncation": True, "max_length": 16},
    "pair, only second": {"pair": True, "truncation": "only_second", "max_length": 406},
    "prefix space": {"add_prefix_space": True},
    "no specials": {"add_special_tokens": False},
}

STRINGS = (
    "",
    " ",
    "   ",
    "\t",
    "\n\n",
    "The rain fell on the harbour.",
    " The rain fell on the harbour.",
    "  two  spaces  between  words  ",
    "tab\tand\nnew line\r\nand more",
    "it's they're we'd I'll you've don't O'Neill 'quoted'",
    "IT'S THEY'RE DON'T",
    "numbers 0 12 3.14159 1,000,000 2nd",
    "e-mail@example.org; C++/C# & <b>bold</b>",
    "naïve façade — “quotes” … £5 €6 ½",
    "日本語のテキストと한국어 텍스트",
    "Привет, мир! Γειά σου Κόσμε",  # noqa: RUF001
    "שלום עולם مرحبا بالعالم",
    "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 \u2764\ufe0f",
    "e\u0301 and \u00e9 are two spellings; \u200b\ufeff\u00a0\u2028 are spaces",
    "\x00\x01\x7f control",
    "The <mask> fell on the <mask>.",
    "The<mask>fell",
    "The  <mask>  fell",
    "<mask>",
    "an end</s> inside </s></s> and <s> a start",
    "<pad> <unk> <s></s><pad>",
    "<MASK> < mask> <mask <<mask>> </ s>",
    "word " * 150,
    "w" * 400,
    "harbourharbour" * 10,
    "a\u0300\u0301\u0302\u0303" * 5,
    "trailing space ",
)

CORPUS = (
    "The rain fell on the harbour, and the boats came home before the evening.",
    "She said that they were going to the market because there was nothing left in the house.",
    "He didn't know whether it's the words or the spaces between the words that make a language.",
    "A sentence is not entailed by another sentence when it may be false while the other is true.",
    "There is no film that is more charming, more affecting, or less honest than this one.",
    "Two hundred people were working in the mines of the north in nineteen hundred and twelve.",
    "They're learning to read the numbers 10, 100 and 1,000; we've been counting since then.",
    "What they wanted was rain, what they had was wind, and what they got was another winter.",
)


def tiny_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens by id and merges of a byte-level BPE trained on `CORPUS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        min_frequency=2,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return [*tokens, "<mask>"], [" ".join(pair) for pair in model["merges"]]


def roberta_vocabulary(data: Path) -> tuple[list[str], list[str]]:
    """Tokens by id and merges of GPT-2's BPE with RoBERTa's special tokens."""
    ids = json.loads((data / "gpt2-vocab" / "encoder.json").read_text("utf-8"))
    tokens = [token for token in sorted(ids, key=ids.get) if token != "<|endoftext|>"]
    merges = (data / "gpt2-vocab" / "vocab.bpe").read_text("utf-8").splitlines()[1:]
    return ["<s>", "<pad>", "</s>", "<unk>", *tokens, "<mask>"], merges


def write_vocabulary(folder: Path, tokens: list[str], merges: list[str]) -> Path:
    """Writes vocab.json, merges.txt and special_tokens_map.json into a folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {token: index for index, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), "utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps({"mask_token": MASK}), "utf-8")
    return folder


def string_ids(open_tokenizer, call: dict) -> list[list[int]]:
    """The ids of `STRINGS`; for pairs, of each with the one after it.

    Args:
        open_tokenizer: takes a tokenizer's settings.
        call: one of `CALLS`: arguments of a call and settings.
    """
    names = ("truncation_side", "add_prefix_space")
    tokenizer = open_tokenizer(**{name: call[name] for name in names if name in call})
    arguments = {name: each for name, each in call.items() if name not in (*names, "pair")}
    second = [*STRINGS[1:], STRINGS[0]] if call.get("pair") else None
    return tokenizer(list(STRINGS), second, **arguments)["input_ids"]


def glue_texts(
    data: Path, task: str, split: str, first: int, second: int | None, header: bool
) -> tuple[list[str], list[str]]:
    """First and second texts of a GLUE file; the next row's text where it has no second one."""
    lines = (data / "glue" / task / f"{split}.tsv").read_text("utf-8").split("\n")
    rows = [line.rstrip("\r").split("\t") for line in lines[int(header) :] if line]
    texts = [row[first] for row in rows]
    return texts, [row[second] for row in rows] if second else [*texts[1:], texts[0]]


def glue_sums(tokenizer, data: Path) -> Iterator[tuple[str, str]]:
    """(what was encoded, SHA-256 of the ids) for each GLUE file, as singles and pairs, cut.

    SST-2, by far the largest, goes without pairs, which it has none of.
    """
    for file, paired, length in itertools.product(GLUE_FILES, (False, True), (128, 16)):
        if paired and file[0] == "SST-2":
            continue
        texts, seconds = glue_texts(data, *file)
        batch = tokenizer(texts, seconds if paired else None, truncation=True, max_length=length)
        ids = "\n".join(" ".join(map(str, row)) for row in batch["input_ids"])
        name = f"{file[0]} {file[1]} {'pairs' if paired else 'singles'} at {length}"
        yield name, hashlib.sha256(ids.encode()).hexdigest()


def main(argv: list[str] | None = None) -> None:
    """Writes the fixture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder with glue/ and gpt2-vocab/ in it"
    )
    data = parser.parse_args(argv).data
    from transformers import RobertaTokenizerFast, __version__

    tokens, merges = tiny_vocabulary()
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_vocabulary(Path(folder, "tiny"), tokens, merges)
        large = write_vocabulary(Path(folder, "large"), *roberta_vocabulary(data))

        def open_tiny(**settings):
            return RobertaTokenizerFast.from_pretrained(str(tiny), **settings)

        fixture = {
            "transformers": __version__,
            "vocabulary": tokens,
            "merges": merges,
            "strings": {name: string_ids(open_tiny, call) for name, call in CALLS.items()},
            "glue": dict(glue_sums(RobertaTokenizerFast.from_pretrained(str(large)), data)),
        }
    lines = [f"{json.dumps(name)}: {json.dumps(part)}" for name, part in fixture.items()]
    FIXTURE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
