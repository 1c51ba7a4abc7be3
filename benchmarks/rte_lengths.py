"""Reads RTE's pairs of texts, counts their tokens, and samples batches of such lengths."""

import random
import sys
from pathlib import Path

from vocab import open_vocab

BATCH, LONGEST = 16, 512

# The numbers of tokens in RTE's 2,490 training pairs at the quantiles 0.01, 0.03, … 0.99, special
# tokens included.
# fmt: off
QUANTILES = [
    23, 28, 30, 32, 33, 35, 36, 38, 39, 40, 42, 42, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55,
    56, 57, 58, 60, 61, 63, 64, 65, 67, 69, 73, 76, 80, 86, 92, 100, 108, 116, 121, 127, 133, 139,
    146, 157, 171, 196,
]
# fmt: on


def count_tokens(data_dir: Path, vocab: Path) -> list[int]:
    """Counts the tokens of each pair in `data_dir`/RTE/train.tsv, with special ones, up to 512.

    Args:
        data_dir: a folder with GLUE's tasks.
        vocab: a folder with a byte-level BPE.
    """
    pairs, tokenizer = read_pairs(data_dir), open_vocab(vocab)
    # <s> A </s></s> B </s>
    counts = (sum(len(tokenizer.encode(text).ids) for text in pair) + 4 for pair in pairs)
    return [min(count, LONGEST) for count in counts]


def read_pairs(data_dir: Path) -> list[list[str]]:
    """Reads the pairs of texts in `data_dir`/RTE/train.tsv."""
    train = data_dir / "RTE" / "train.tsv"
    if not train.is_file():
        sys.exit(f"{train} is missing: --data_dir takes a folder of GLUE")
    lines = train.read_text(encoding="utf-8").split("\n")[1:]
    return [line.split("\t")[1:3] for line in lines if line]


def draw_batches(lengths: list[int], count: int, seed: int, rows: int = BATCH) -> list[list[int]]:
    """Samples the lengths of the rows of `count` batches with `rows` rows each."""
    rng = random.Random(seed)
    return [rng.choices(lengths, k=rows) for _ in range(count)]
