"""Defines GPT-2 small's shape, and reads or makes up prompts and lengths of rows of E2E.

As in the release's preparation of E2E, both context and completion end in <|endoftext|>.
"""

import random
import sys
from itertools import groupby
from pathlib import Path

from vocab import open_vocab

GPT2_SMALL = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
}
QUICK = {**GPT2_SMALL, "n_embd": 96, "n_layer": 2}
END_OF_TEXT = 50256
BATCH = 8

# The numbers of tokens in (context, completion).
Row = tuple[int, int]
# A prompt, and the number of lines of the test file that have it.
Group = tuple[list[int], int]

# E2E's 4,672 validation rows, ordered by number of tokens, at the quantiles 0.01, 0.03, … 0.99.
# fmt: off
ROWS = [
    (15, 14), (18, 13), (18, 16), (18, 19), (18, 21), (21, 20), (21, 22), (21, 24), (26, 20),
    (31, 16), (24, 25), (24, 26), (26, 25), (25, 27), (34, 18), (23, 31), (32, 22), (30, 25),
    (29, 27), (35, 21), (31, 26), (30, 28), (28, 31), (32, 27), (30, 30), (34, 26), (32, 29),
    (30, 32), (34, 28), (32, 31), (29, 35), (37, 27), (34, 31), (32, 34), (31, 36), (38, 29),
    (37, 31), (37, 32), (36, 34), (34, 37), (38, 33), (37, 35), (37, 36), (37, 37), (37, 38),
    (41, 35), (37, 41), (41, 39), (41, 41), (41, 45),
]
# (lines with a prompt, the prompt's tokens) at 40 quantiles of the 630 prompts of E2E's test file.
PROMPTS = [
    (1, 22), (2, 16), (2, 42), (4, 15), (4, 36), (4, 40), (4, 45), (5, 39), (6, 23), (6, 30),
    (6, 31), (6, 35), (6, 36), (6, 36), (6, 38), (6, 39), (6, 39), (6, 39), (6, 40), (6, 42),
    (6, 42), (6, 42), (6, 42), (6, 43), (6, 43), (6, 44), (7, 29), (7, 36), (7, 39), (7, 43),
    (7, 43), (9, 38), (10, 31), (11, 31), (11, 38), (11, 40), (11, 42), (16, 36), (20, 30),
    (33, 31),
]
# fmt: on


def count_rows(data_dir: Path, vocab: Path) -> list[Row]:
    """Counts the tokens of each row of train.txt or, if that is missing, of valid.txt.

    Args:
        data_dir: a folder with E2E's files, lines ``context||completion``.
        vocab: a folder with a byte-level BPE.
    """
    names = ("train.txt", "valid.txt")
    path = next((data_dir / name for name in names if (data_dir / name).is_file()), None)
    if path is None:
        sys.exit(f"{data_dir} has neither train.txt nor valid.txt: --data_dir takes E2E's folder")
    tokenizer, rows = open_vocab(vocab), _read(path)
    contexts = tokenizer.encode_batch([context for context, _ in rows])
    completions = tokenizer.encode_batch([f" {completion}" for _, completion in rows])
    return [(len(a.ids) + 1, len(b.ids) + 1) for a, b in zip(contexts, completions, strict=True)]


def read_groups(data_dir: Path, vocab: Path) -> list[Group]:
    """Reads the prompts of test.txt in order, each with the number of consecutive lines of it.

    Args:
        data_dir: a folder with E2E's files.
        vocab: a folder with a byte-level BPE.
    """
    path = data_dir / "test.txt"
    if not path.is_file():
        sys.exit(f"{path} is missing: --data_dir takes E2E's folder")
    tokenizer = open_vocab(vocab)
    return [
        ([*tokenizer.encode(context).ids, END_OF_TEXT], len(list(rows)))
        for context, rows in groupby(_read(path), key=lambda row: row[0])
    ]


def _read(path: Path) -> list[tuple[str, str]]:
    """Reads contexts and completions, without white space around them."""
    lines = path.read_text(encoding="utf-8").rstrip().split("\n")
    parts = (line.partition("||") for line in lines)
    return [(context.strip(), completion.strip()) for context, _, completion in parts]


def make_groups(seed: int) -> list[Group]:
    """Makes up random prompts, as long as E2E's, in random order."""
    rng = random.Random(seed)
    sizes = rng.sample(PROMPTS, k=len(PROMPTS))
    return [
        ([*(rng.randrange(END_OF_TEXT) for _ in range(tokens - 1)), END_OF_TEXT], lines)
        for lines, tokens in sizes
    ]


def draw_batches(rows: list[Row], count: int, seed: int) -> list[list[Row]]:
    """Samples the lengths of the rows of `count` batches."""
    rng = random.Random(seed)
    return [rng.choices(rows, k=BATCH) for _ in range(count)]


def draw_run(groups: list[Group], count: int, seed: int) -> list[Group]:
    """Samples `count` consecutive groups; returns all groups if there are no more.

    They are sampled from the tenth of all such runs of groups whose number of lines per prompt is
    closest to the average.
    """
    share = sum(lines for _, lines in groups) / len(groups)

    def distance(start: int) -> float:
        run = groups[start : start + count]
        return abs(sum(lines for _, lines in run) / len(run) - share)

    starts = sorted(range(max(1, len(groups) - count + 1)), key=distance)
    start = random.Random(seed).choice(starts[: -(-len(starts) // 10)])
    return groups[start : start + count]
