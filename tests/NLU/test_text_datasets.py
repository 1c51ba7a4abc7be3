"""LineByLineTextDataset has a row for each line of a file."""

import pytest

from transformers import (
    DataCollatorForLanguageModeling,
    LineByLineTextDataset,
    RobertaTokenizerFast,
)


def test_each_line_that_is_not_blank_is_a_row(tiny_base, tmp_path):
    tokenizer = RobertaTokenizerFast.from_pretrained(tiny_base)
    path = tmp_path / "lines.txt"
    # "utf-8-sig" writes a byte order mark, as some editors do.
    path.write_text("the dog\n\n  \nthe " + "dog " * 20 + "\n", "utf-8-sig")
    rows = LineByLineTextDataset(tokenizer=tokenizer, file_path=path, block_size=8)
    assert len(rows) == 2
    assert rows[0]["input_ids"].tolist() == tokenizer("the dog")["input_ids"]
    assert len(rows[1]["input_ids"]) == 8
    batch = DataCollatorForLanguageModeling(tokenizer)([rows[0], rows[1]])
    assert batch["labels"].shape == (2, 8)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        LineByLineTextDataset(None, tmp_path / "none.txt", 8)
