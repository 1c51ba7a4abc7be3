"""Opens a byte-level BPE, for counting tokens."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import ByteLevelBPETokenizer

FILES = [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")]


def open_vocab(folder: Path) -> "ByteLevelBPETokenizer":
    """Opens the tokenizer in a folder; see `vocab_files`."""
    from tokenizers import ByteLevelBPETokenizer

    return ByteLevelBPETokenizer(*map(str, vocab_files(folder)))


def vocab_files(folder: Path) -> tuple[Path, Path]:
    """Returns the paths of a tokenizer's vocabulary and merges.

    Args:
        folder: a folder with RoBERTa's vocab.json and merges.txt, or GPT-2's encoder.json and
            vocab.bpe, which split text in the same way.
    """
    pairs = [(folder / a, folder / b) for a, b in FILES if (folder / a).is_file()]
    if not pairs:
        sys.exit(f"{folder} has neither vocab.json nor encoder.json: --vocab takes their folder")
    return pairs[0]
