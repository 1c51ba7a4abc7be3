"""Writes encoder_fixture.json: token ids by upstream's GPT2Tokenizer, to compare ours with.

Run it in an environment that has upstream's `transformers` (5.23 made the file):

    python tests/NLG/make_encoder_fixture.py --data ../shared/data

The fixture holds a tiny byte-level BPE vocabulary, with a hole in its ids before <|endoftext|>,
the ids of awkward strings in it, and SHA-256 sums of the ids of whole corpora in GPT-2's own
vocabulary. The functions that do not need upstream are the tests' as well.
"""

import argparse
import csv
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

FIXTURE = Path(__file__).with_name("encoder_fixture.json")
DATA = Path(__file__).parents[2].parent / "shared" / "data"
END_OF_TEXT = "<|endoftext|>"

STRINGS = (
    "",
    " ",
    "   ",
    "\t",
    "\n\n",
    "name : The Mill | Type : pub | price : less than £ 20",
    " The Mill is a cheap pub .",
    "  two  spaces  between  words  ",
    "tab\tand\nnew line\r\nand more",
    "it's they're we'd I'll you've don't O'Neill 'quoted'",
    "IT'S THEY'RE DON'T",
    "numbers 0 12 3.14159 1,000,000 2nd",
    "e-mail@example.org; C++/C# & <b>bold</b>",
    "naïve façade — “quotes” … £5 €6 ½ Café",
    "日本語のテキストと한국어 텍스트",
    "Привет, мир!",
    "שלום עולם مرحبا",
    "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f",
    "e\u0301 and \u00e9; \u200b\ufeff\u00a0\u2028",
    "\x00\x01\x7f control",
    "<|endoftext|>",
    "a text<|endoftext|>another <|endoftext|> third",
    "<|endoftext|><|endoftext|>\n\n",
    "<|endo <|ENDOFTEXT|> < |endoftext|>",
    "pub " * 150,
    "w" * 300,
    "trailing space ",
)

CORPUS = (
    "name : The Mill | Type : pub | area : riverside | family friendly : yes",
    " The Mill is a family friendly pub by the river, and it's cheap.",
    "name : The Bay | Type : restaurant | price : cheap | near : The Mill",
    " There is a cheap restaurant near The Mill which is called The Bay.",
    " They're serving food at a price of less than twenty pounds, and the pub is near the centre.",
    " In the centre of the city there is a pub that doesn't serve any food for families.",
)


def tiny_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Ids of tokens, with a hole before the last one, and merges, trained on `CORPUS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"] | {END_OF_TEXT: 50256}, [tuple(pair) for pair in model["merges"]]


def write_vocabulary(
    folder: Path, vocab: dict[str, int], merges: list[tuple[str, str]], names: tuple[str, str]
) -> Path:
    """Writes the ids and the merges into files of a folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(json.dumps(vocab), "utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    (folder / names[1]).write_text("\n".join(lines), "utf-8")
    return folder


def _e2e(path: Path) -> Iterator[str]:
    for line in path.read_text("utf-8").splitlines():
        context, completion = line.split("||")
        yield from (context, " " + completion.strip())


def _e2e_csv(path: Path) -> Iterator[str]:
    with open(path, encoding="utf-8", newline="") as file:
        for context, completion in csv.reader(file):
            yield from (context, " " + completion)


def _webnlg(path: Path) -> Iterator[str]:
    for number, entry in enumerate(json.loads(path.read_text("utf-8"))["entries"], start=1):
        triples = entry[str(number)]["modifiedtripleset"]
        parts = ([triple[name] for name in ("subject", "property", "object")] for triple in triples)
        yield " | ".join(" : ".join(part) for part in parts)
        yield from (" " + text["lex"] for text in entry[str(number)]["lexicalisations"])


def _dart(path: Path) -> Iterator[str]:
    for entry in json.loads(path.read_text("utf-8")):
        parts = ((subject, name.lower(), value) for subject, name, value in entry["tripleset"])
        yield " | ".join(" : ".join(part) for part in parts)
        yield from (" " + text["text"] for text in entry["annotations"])


CORPORA = {
    "e2e/valid.txt": _e2e,
    "e2e/test.txt": _e2e,
    "e2e/devset.csv": _e2e_csv,
    "e2e/testset_w_refs.csv": _e2e_csv,
    "webnlg/dev.json": _webnlg,
    "dart/dart-v1.1.1-full-dev.json": _dart,
}
"""Readers of the texts of each file in the data's folder nlg."""


def corpus_texts(data: Path, name: str) -> list[str]:
    """The contexts of a file, and its texts with the space before them."""
    return list(CORPORA[name](data / "nlg" / name))


def checksum(ids: list[list[int]]) -> str:
    """SHA-256 of the ids, a row a line."""
    return hashlib.sha256("\n".join(" ".join(map(str, row)) for row in ids).encode()).hexdigest()


def main(argv: list[str] | None = None) -> None:
    """Writes the fixture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder with nlg/ and gpt2-vocab/ in it"
    )
    data = parser.parse_args(argv).data
    from transformers import GPT2Tokenizer, __version__

    names = ("vocab.json", "merges.txt")
    vocab, merges = tiny_vocabulary()
    gpt2 = json.loads((data / "gpt2-vocab" / "encoder.json").read_text("utf-8"))
    lines = (data / "gpt2-vocab" / "vocab.bpe").read_text("utf-8").splitlines()[1:]
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_vocabulary(Path(folder, "tiny"), vocab, merges, names)
        large = write_vocabulary(
            Path(folder, "large"), gpt2, [tuple(line.split(" ")) for line in lines], names
        )
        tiny_tokenizer = GPT2Tokenizer.from_pretrained(str(tiny))
        tokenizer = GPT2Tokenizer.from_pretrained(str(large))
    fixture = {
        "transformers": __version__,
        "vocab": vocab,
        "merges": merges,
        "strings": tiny_tokenizer(list(STRINGS))["input_ids"],
        "corpora": {
            name: checksum(tokenizer(corpus_texts(data, name))["input_ids"]) for name in CORPORA
        },
    }
    parts = [f"{json.dumps(name)}: {json.dumps(part)}" for name, part in fixture.items()]
    FIXTURE.write_text("{\n" + ",\n".join(parts) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
