"""Evaluation sorts examples by length if it may, and gives the same results."""

import numpy as np
import pytest
import torch
from compare import rounding
from datasets import Dataset
from encoder_options import ENCODER_TERMS
from trainer_runs import collate, make_data

from loralib.adapters.adapter import Adapter, lora_metadata
from loralib.serving.bank import AdapterBank
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    RobertaTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_data import EvaluationBatches, lengths_of
from transformers.trainer_results import Evaluation, gather_in_order

COUNT, BATCH = 23, 4


class Lazy(torch.utils.data.Dataset):
    """A data set that records which examples are read."""

    def __init__(self, rows):
        self.rows, self.read = rows, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.read.append(index)
        return self.rows[index]


KINDS = {"list": list, "tuple": tuple, "table": Dataset.from_list}


@pytest.fixture
def tokenizer(tiny_base):
    return RobertaTokenizerFast.from_pretrained(tiny_base)


@pytest.fixture
def make(make_model, tokenizer, tmp_path):
    """Makes a Trainer that pads; its `lengths` are those of the rows in each batch of its model."""

    def make(model=None, kind=Trainer, data_collator=None):
        args = TrainingArguments(
            str(tmp_path),
            report_to=["none"],
            disable_tqdm=True,
            per_device_eval_batch_size=BATCH,
            save_strategy="no",
        )
        trainer = kind(
            make_model() if model is None else model,
            args,
            data_collator or DataCollatorWithPadding(tokenizer),
            compute_metrics=accuracy,
        )
        trainer.lengths = []
        trainer.model.register_forward_pre_hook(
            lambda module, given, named: trainer.lengths.append(
                named["attention_mask"].sum(1).tolist()
            ),
            with_kwargs=True,
        )
        return trainer

    return make


def accuracy(prediction):
    right = prediction.predictions.argmax(1) == prediction.label_ids
    return {"accuracy": float(right.mean())}


def allowed(logits):
    return rounding(torch.from_numpy(logits), ENCODER_TERMS)


def tokens(rows):
    return [len(row["input_ids"]) for row in rows]


def in_order(rows):
    """Lengths by batch in the data set's order."""
    lengths = tokens(rows)
    return [lengths[start : start + BATCH] for start in range(0, len(lengths), BATCH)]


def by_length(rows):
    """Lengths by batch from the longest to the shortest."""
    lengths = sorted(tokens(rows), reverse=True)
    return [lengths[start : start + BATCH] for start in range(0, len(lengths), BATCH)]


# ---- the order ----


@pytest.mark.parametrize("world_size", [1, 2, 3, 30])
def test_each_example_comes_once_from_the_longest_on(world_size):
    lengths = tokens(make_data(COUNT))
    shares = [
        EvaluationBatches(COUNT, BATCH, world_size, rank, lengths) for rank in range(world_size)
    ]
    assert sorted(i for share in shares for batch in share for i in batch) == list(range(COUNT))
    for share in shares:
        assert [i for batch in share for i in batch] == share.indices
        found = [lengths[i] for i in share.indices]
        assert found == sorted(found, reverse=True)
    # The n-th batches of all processes are of about one length as well.
    firsts = [lengths[share.indices[0]] for share in shares if share.indices]
    assert firsts == sorted(lengths, reverse=True)[:world_size]


def test_examples_of_one_length_stay_in_order():
    assert EvaluationBatches(7, 2, 1, 0, [5] * 7).indices == list(range(7))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_of_all_processes_come_in_the_set_s_order(monkeypatch, world_size):
    """Each process has a share, and one has no examples."""
    lengths = tokens(make_data(COUNT))
    shares = []
    for rank in range(world_size):
        indices = EvaluationBatches(COUNT, BATCH, world_size, rank, lengths).indices
        shares.append((indices, (np.array(indices) * 10,)))
    monkeypatch.setattr(
        "transformers.trainer_results.gather_objects",
        lambda own, world_size: [*shares, ([], ())],
    )
    (found,) = gather_in_order(*shares[0], world_size)
    assert found.tolist() == [10 * index for index in range(COUNT)]


def test_rows_beyond_the_set_s_count_are_ignored():
    """A user's own sampler may fill up the last batch."""
    loader = torch.utils.data.DataLoader(range(5), batch_size=2)
    found = Evaluation(loader, torch.device("cpu"), world_size=1, rank=0)
    for rows, loss in (([0, 1], 1.0), ([2, 3], 2.0), ([4, 0], 6.0)):
        rows = torch.tensor(rows)
        found.add({"rows": rows}, torch.tensor(loss), rows, rows)
    loss, predictions, labels, count = found.results()
    assert loss == (2 * 1 + 2 * 2 + 1 * 6) / 5
    assert predictions.tolist() == labels.tolist() == [0, 1, 2, 3, 4]
    assert count == 5


def test_lengths_of_a_table_are_those_of_its_rows():
    rows = make_data(COUNT)
    table = Dataset.from_list(rows)
    assert lengths_of(table) == lengths_of(rows) == tokens(rows)
    chosen = table.select([7, 3, 3, 20]).with_format("torch", columns=["label"])
    assert lengths_of(chosen) == [tokens(rows)[i] for i in (7, 3, 3, 20)]
    assert lengths_of(Dataset.from_dict({"input_ids": [[1], [1, 2]]}).shuffle(seed=1)) in (
        [1, 2],
        [2, 1],
    )
    with pytest.raises(ValueError, match="needs examples with 'input_ids'"):
        lengths_of([{"x": 1}])


# ---- sets that are sorted ----


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sorted_evaluation_gives_the_results_of_the_set_s_order(make, kind):
    rows = make_data(COUNT)
    trainer, plain = make(), make(data_collator=collate)
    found = trainer.predict(KINDS[kind](rows))
    assert trainer.lengths == by_length(rows)
    trainer.lengths.clear()
    expected = plain.predict(rows)
    assert plain.lengths == in_order(rows)
    np.testing.assert_allclose(
        found.predictions,
        expected.predictions,
        rtol=0,
        atol=allowed(expected.predictions),
    )
    assert np.array_equal(found.label_ids, expected.label_ids)
    assert found.metrics["eval_accuracy"] == expected.metrics["eval_accuracy"]
    loss = expected.metrics["eval_loss"]
    assert found.metrics["eval_loss"] == pytest.approx(loss, abs=rounding(loss, ENCODER_TERMS))
    evaluated = trainer.evaluate(KINDS[kind](rows))
    assert evaluated["eval_loss"] == found.metrics["eval_loss"]
    assert evaluated["eval_accuracy"] == found.metrics["eval_accuracy"]


@pytest.mark.slow
def test_unlabeled_rows_are_sorted_too(make):
    bare = [{n: v for n, v in row.items() if n != "label"} for row in make_data(COUNT)]
    trainer = make()
    found = trainer.predict(bare).predictions
    assert trainer.lengths == by_length(bare)
    assert np.array_equal(found, make().predict(make_data(COUNT)).predictions)


@pytest.mark.slow
def test_each_row_has_the_logits_that_it_has_alone(make, make_model):
    rows = make_data(COUNT)
    found = make().predict(rows).predictions
    model = make_model().eval()
    for row, logits in zip(rows, found, strict=True):
        with torch.no_grad():
            alone = model(torch.tensor([row["input_ids"]])).logits[0]
        torch.testing.assert_close(
            torch.from_numpy(logits), alone, rtol=0, atol=rounding(alone, ENCODER_TERMS)
        )


# ---- sets that stay in order ----


@pytest.mark.slow
def test_a_set_that_loads_its_examples_is_read_once_in_order(make):
    rows = Lazy(make_data(COUNT))
    trainer = make()
    trainer.predict(rows)
    assert rows.read == list(range(COUNT))
    assert trainer.lengths == in_order(rows.rows)


@pytest.mark.slow
def test_examples_without_ids_stay_in_order(make_model, tokenizer, tmp_path):
    """Texts that a transform turns into ids as they are read."""
    rows = make_data(COUNT)
    table = Dataset.from_dict({"row": list(range(COUNT))})
    table.set_transform(lambda batch: {n: [rows[i][n] for i in batch["row"]] for n in rows[0]})
    args = TrainingArguments(
        str(tmp_path), report_to=["none"], disable_tqdm=True, remove_unused_columns=False
    )
    trainer = Trainer(make_model(), args, DataCollatorWithPadding(tokenizer))
    assert trainer.predict(table).label_ids.tolist() == [row["label"] for row in rows]


def make_adapter(model, seed):
    """LoRA of rank 2 on all queries, and a head."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"classifier.{name}": t for name, t in model.classifier.state_dict().items()}
    for name, module in model.named_modules():
        if name.endswith("query"):
            tensors[f"{name}.lora_A"] = torch.empty(2, module.in_features)
            tensors[f"{name}.lora_B"] = torch.empty(module.out_features, 2)
    tensors = {n: torch.randn(t.shape, generator=generator) / 4 for n, t in tensors.items()}
    return Adapter(tensors, lora_metadata(tensors, 2, 4))


@pytest.mark.slow
def test_rows_with_adapters_of_their_own_stay_in_order(make, make_model):
    """A bank's `use` lists them by row: the fifth row has the fifth adapter."""
    rows = make_data(BATCH)
    trainer = make(make_model(lora=False))
    bank = AdapterBank(trainer.model)
    for seed, name in enumerate("abcd"):
        bank.add(name, make_adapter(trainer.model, seed))
    with bank.use(list("abcd")):
        found = trainer.predict(rows).predictions
    assert trainer.lengths == in_order(rows)
    for row, name, logits in zip(rows, "abcd", found, strict=True):
        with bank.use(name):
            alone = trainer.predict([row]).predictions[0]
        np.testing.assert_allclose(logits, alone, rtol=0, atol=allowed(alone))
    with bank.use("a"):
        trainer.lengths.clear()
        trainer.predict(rows)
    assert trainer.lengths == by_length(rows)


class Weighting(Trainer):
    """Its loss depends on which examples share a batch."""

    def compute_loss(self, model, inputs, return_outputs=False):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss * inputs["labels"].float().mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
def test_a_trainer_with_its_own_loss_stays_in_order(make):
    trainer = make(kind=Weighting)
    trainer.evaluate(make_data(COUNT))
    assert trainer.lengths == in_order(make_data(COUNT))


def with_token_labels(rows):
    """Examples with a label for each token."""
    return [{**row, "label": row["input_ids"]} for row in rows]


@pytest.mark.parametrize(
    ("kind", "change", "is_sorted"),
    [
        (list, lambda rows: rows, True),
        (Dataset.from_list, lambda rows: rows, True),
        (list, with_token_labels, False),
        (Dataset.from_list, with_token_labels, False),
        (list, lambda rows: [{"x": row["input_ids"]} for row in rows], False),
        (list, lambda rows: [row["input_ids"] for row in rows], False),
        (Lazy, lambda rows: rows, False),
    ],
)
def test_sets_that_are_sorted_by_length(make, kind, change, is_sorted):
    lengths = make()._lengths_to_sort_by(kind(change(make_data(COUNT))))
    assert lengths == (tokens(make_data(COUNT)) if is_sorted else None)


def test_sets_with_collators_that_do_more_than_pad_stay_in_order(make, tokenizer):
    class Own(DataCollatorWithPadding):
        pass

    rows = make_data(COUNT)
    assert make(data_collator=default_data_collator)._lengths_to_sort_by(rows) == tokens(rows)
    for collator in (collate, Own(tokenizer), DataCollatorForLanguageModeling(tokenizer)):
        assert make(data_collator=collator)._lengths_to_sort_by(rows) is None


def test_an_empty_set_and_one_without_a_length_are_refused(make):
    with pytest.raises(ValueError, match="is empty"):
        make().evaluate([])
    with pytest.raises(ValueError, match="has no length"):
        make().evaluate(iter(make_data(3)))
