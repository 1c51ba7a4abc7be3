"""The collator for multiple choice, and the lengths of its examples."""

import pytest
from tokenizers import Tokenizer, models

from transformers import DataCollatorForMultipleChoice, PreTrainedTokenizerFast
from transformers.trainer_data import lengths_of

PAD = 1


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": PAD, "a": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(backend, pad_token="<pad>", unk_token="<unk>")


def example(*rows: list[int], **label: int) -> dict:
    return {"input_ids": list(rows), "attention_mask": [[1] * len(row) for row in rows], **label}


@pytest.mark.parametrize("name", ["label", "labels"])
def test_choices_are_padded_to_the_longest_of_all(tokenizer, name):
    rows = [example([5], [6, 7, 8], **{name: 1}), example([9, 9], [4], **{name: 0})]
    batch = DataCollatorForMultipleChoice(tokenizer)(rows)
    assert batch["input_ids"].tolist() == [
        [[5, PAD, PAD], [6, 7, 8]],
        [[9, 9, PAD], [4, PAD, PAD]],
    ]
    assert batch["attention_mask"].sum(-1).tolist() == [[1, 3], [2, 1]]
    assert batch["labels"].tolist() == [1, 0]


def test_padding_as_for_other_collators(tokenizer):
    rows = [example([5], [6, 7])]
    collate = DataCollatorForMultipleChoice
    assert collate(tokenizer, "max_length", 6)(rows)["input_ids"].shape == (1, 2, 6)
    assert collate(tokenizer, pad_to_multiple_of=4)(rows)["input_ids"].shape == (1, 2, 4)
    assert "labels" not in collate(tokenizer)(rows)
    assert "labels" not in collate(tokenizer)([{**row, "label": None} for row in rows])


def test_a_label_that_only_some_examples_have_is_refused(tokenizer):
    rows = [example([5], label=0), example([6])]
    with pytest.raises(ValueError, match="label: cannot become a tensor"):
        DataCollatorForMultipleChoice(tokenizer)(rows)


def test_examples_with_different_numbers_of_choices_are_refused(tokenizer):
    with pytest.raises(ValueError, match="examples of 1 to 2 choices cannot be batched"):
        DataCollatorForMultipleChoice(tokenizer)([example([5]), example([5], [6])])


def test_an_example_is_as_long_as_its_choices_together():
    """For batches of about one length, and for estimates."""
    from datasets import Dataset

    rows = [example([5], [6, 7, 8]), example([9, 9], [4])]
    assert lengths_of(rows) == lengths_of(Dataset.from_list(rows)) == [4, 3]
    assert lengths_of([{"input_ids": []}, {"input_ids": [1]}]) == [0, 1]
