"""Reads a file's lines for masked language modeling."""

import os

import torch
from torch.utils.data import Dataset

from ...tokenization_utils_base import PreTrainedTokenizerBase


class LineByLineTextDataset(Dataset):
    """A row for each line of a text file that is not blank.

    Args:
        tokenizer: RoBERTa's or DeBERTa's tokenizer.
        file_path: the file, in UTF-8.
        block_size: the number of tokens that rows are cut to.

    Raises:
        FileNotFoundError: there is no such file.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, file_path: str | os.PathLike, block_size: int
    ):
        with open(file_path, encoding="utf-8-sig") as file:
            lines = [line for line in file.read().splitlines() if line.strip()]
        rows = tokenizer(lines, truncation=True, max_length=block_size)["input_ids"]
        self.examples = [{"input_ids": torch.tensor(row, dtype=torch.long)} for row in rows]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return self.examples[i]
