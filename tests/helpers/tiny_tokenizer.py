"""RoBERTa's tiny tokenizer of tokenizer_fixture.json."""

import json
from pathlib import Path

import make_tokenizer_fixture as maker

CLS, PAD, SEP, UNK = 0, 1, 2, 3

FIXTURE = json.loads(maker.FIXTURE.read_text("utf-8"))
VOCABULARY_SIZE = len(FIXTURE["vocabulary"])


def write(path: Path, content) -> None:
    path.write_text(json.dumps(content), "utf-8")


def ids_of(tokenizer) -> list[list[int]]:
    return tokenizer(list(maker.STRINGS))["input_ids"]
