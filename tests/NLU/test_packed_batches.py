"""Batches with `packed_rows` give the same bits, and only models that know these rows get them."""

import pytest
import torch
from compare import assert_same_bits
from torch import nn
from trainer_runs import make_data, trained, without_runtimes

from loralib.nn.packing import PackedRows
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    RobertaTokenizerFast,
    Trainer,
    TrainingArguments,
    consistency,
    default_data_collator,
)
from transformers.data.data_collator import PackedCollator
from transformers.trainer_data import takes_packed_rows

FAMILIES = ("roberta", "deberta")
LOSSES = ("loss", "eval_loss")
HOLES = torch.tensor([[1] * 11, [1] * 4 + [0] * 7, [1, 1, 0, 1, 1, 1, 0, 0, 1, 0, 0], [1] * 11])


@pytest.fixture
def tokenizer(tiny_base):
    return RobertaTokenizerFast.from_pretrained(tiny_base)


def step(model, **inputs):
    """The loss, the logits and the gradients of a batch, by name; random numbers from one seed."""
    torch.manual_seed(3)
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss, "logits": output.logits, **gradients}


# ---- models ----


@pytest.mark.parametrize("mask", ["padded", "holes", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_do_not_change_a_bit(make_classifier, batch, family, mask):
    model = make_classifier(family, num_labels=3, pad_token_id=1).train()
    if mask == "none":
        del batch["attention_mask"]
    elif mask == "holes":
        batch["attention_mask"] = HOLES
    rows = PackedRows(batch.get("attention_mask", torch.ones(4, 11)))
    assert_same_bits(step(model, **batch, packed_rows=rows), step(model, **batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_do_not_change_hidden_states(make_classifier, batch, family):
    model = make_classifier(family)
    del batch["labels"]
    rows = PackedRows(batch["attention_mask"])
    for module in (model, model.base_model):
        outputs = [
            module(**batch, output_hidden_states=True, **given)
            for given in ({}, {"packed_rows": rows})
        ]
        states = [dict(enumerate(output.hidden_states)) for output in outputs]
        assert_same_bits(*states)


@pytest.mark.parametrize("settings", [{"reg_loss_wgt": 1.0}, {"masking_prob": 0.4}])
def test_packed_rows_do_not_change_consistency_training(make_classifier, batch, settings):
    settings |= {"unk_token_id": 3, "special_token_ids": [0, 1, 2]}
    model = make_classifier("roberta", num_labels=3, **settings).train()
    assert consistency.is_on(model)
    rows = PackedRows(batch["attention_mask"])
    assert_same_bits(step(model, **batch, packed_rows=rows), step(model, **batch))


@pytest.mark.parametrize("targets_only", [None, False])
def test_packed_rows_with_targets_do_not_change_masked_language_models(mlm_batch, targets_only):
    model, batch = mlm_batch
    rows = PackedRows(batch["attention_mask"]).with_targets(batch["labels"] != -100)
    given = {**batch, "targets_only": targets_only}
    assert_same_bits(step(model, **given, packed_rows=rows), step(model, **given))


@pytest.fixture(params=FAMILIES)
def mlm_batch(request, batch):
    """A model with its language-model head, in training, and a batch with three targets."""
    from two_predictions import make_mlm

    model = make_mlm(request.param).train()
    vocabulary = model.config.vocab_size
    ids = batch["input_ids"] % (vocabulary - 3) + 3
    ids = ids.masked_fill(batch["attention_mask"] == 0, model.config.pad_token_id)
    labels = torch.full_like(ids, -100)
    for place in ((0, 3), (2, 1), (2, 8)):
        labels[place] = ids[place]
    return model, {**batch, "input_ids": ids, "labels": labels}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_pass_reads_no_value_of_a_tensor(make_classifier, batch, family, training):
    """The meta device has no values, so that waiting for a device would be an error."""
    settings = {"apply_lora": True, "lora_r": 2, "lora_alpha": 4}
    model = make_classifier(family, **settings).train(training).base_model.to("meta")
    rows = PackedRows(batch.pop("attention_mask"))
    encoded = model.encode(batch["input_ids"].to("meta"), packed_rows=rows.to("meta"))
    hidden = encoded.last
    assert hidden.shape == (31, 32)
    assert encoded.rows.pad(hidden).shape == (4, 11, 32)
    hidden.sum().backward()
    assert all(p.grad.is_meta for n, p in model.named_parameters() if "lora_" in n)


def test_rows_of_another_batch_are_refused(make_classifier, batch):
    rows = PackedRows(batch["attention_mask"][:, :10])
    with pytest.raises(ValueError, match=r"mask is \(4, 10\), the batch is \(4, 11\)"):
        make_classifier("roberta", num_labels=3)(**batch, packed_rows=rows)


# ---- the collator ----


def test_the_collator_adds_packed_rows_to_the_batch(tokenizer):
    features = [{"input_ids": [0] * n, "attention_mask": [1] * n, "label": 1} for n in (3, 5)]
    plain = DataCollatorWithPadding(tokenizer)
    packed = PackedCollator(plain)(features)
    rows = packed.pop("packed_rows")
    assert_same_bits(packed, plain(features))
    assert (rows.lengths, rows.shape, rows.targets) == ([3, 5], (2, 5), None)


def test_a_batch_without_a_mask_is_all_tokens():
    batch = PackedCollator(default_data_collator)([{"input_ids": [4, 5, 6]}] * 2)
    assert batch["packed_rows"].lengths == [3, 3]


@pytest.mark.parametrize("mask", [(2, 5, 5), (1, 5)])
def test_a_batch_whose_mask_is_not_of_the_ids_shape_stays_as_it_is(mask):
    ids = torch.full((2, 5), 4)
    plain = {"input_ids": ids, "attention_mask": torch.ones(mask), "labels": ids}
    assert_same_bits(PackedCollator(lambda _: plain)([]), plain)


def test_a_batch_of_embeddings_stays_as_it_is():
    features = [{"inputs_embeds": torch.randn(5, 4), "attention_mask": [1] * 5, "label": 1}] * 2
    packed = PackedCollator(default_data_collator)(features)
    assert_same_bits(packed, default_data_collator(features))


def test_targets_are_where_there_are_labels(tokenizer):
    torch.manual_seed(0)
    collator = PackedCollator(DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5))
    batch = collator([list(range(5, 5 + n)) for n in (9, 4, 7)])
    labels, rows = batch["labels"], batch["packed_rows"]
    assert 0 < len(rows.targets) < 20
    assert torch.equal(rows.pack(labels)[rows.targets], labels[labels != -100])


def test_padding_on_the_left(tokenizer):
    tokenizer.padding_side = "left"
    collator = PackedCollator(DataCollatorWithPadding(tokenizer))
    rows = collator([{"input_ids": [5] * n} for n in (3, 5)])["packed_rows"]
    assert rows.starts_padded
    assert rows.index.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]


# ---- the Trainer ----


class Wrapper(nn.Module):
    """A module around a classifier that has no argument `packed_rows`."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, labels=None):
        return self.model(input_ids, attention_mask, labels=labels)


def recorded_calls(model) -> list[dict]:
    """Returns a list to which the keyword arguments of each later forward pass are added."""
    calls = []
    model.register_forward_pre_hook(
        lambda module, given, named: calls.append(named), with_kwargs=True
    )
    return calls


def use_both_loops(trainer) -> None:
    trainer.train()
    trainer.evaluate()
    trainer.predict([{n: v for n, v in row.items() if n != "label"} for row in make_data(3)])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_the_trainer_s_batches_have_packed_rows(make_trainer, workers):
    trainer = make_trainer(max_steps=2, dataloader_num_workers=workers)
    calls = recorded_calls(trainer.model)
    use_both_loops(trainer)
    assert len(calls) == 2 + 2 + 1
    for named in calls:
        assert named["packed_rows"].lengths == named["attention_mask"].sum(1).tolist()


@pytest.mark.slow
def test_embeddings_train_as_their_ids_do(make_trainer, make_model):
    """With frozen word embeddings."""
    ids = [{"input_ids": row["input_ids"][:5], "labels": row["label"]} for row in make_data(8)]
    words = make_model().get_input_embeddings().weight.detach()
    embedded = [{"inputs_embeds": words[row["input_ids"]], "labels": row["labels"]} for row in ids]
    losses = []
    for rows in (ids, embedded):
        trainer = make_trainer(make_model(), train=rows, evaluated=rows, logging_steps=1)
        trainer.model.get_input_embeddings().requires_grad_(False)
        trainer.data_collator = default_data_collator
        trainer.train()
        trainer.evaluate()
        losses.append([v for row in trainer.state.log_history for v in map(row.get, LOSSES) if v])
    assert len(losses[0]) == 5
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"label_smoothing_factor": 0.1}])
def test_training_gives_the_same_bits_without_packed_rows(make_trainer, monkeypatch, settings):
    runs = []
    for takes in (takes_packed_rows, lambda model: False):
        monkeypatch.setattr("transformers.trainer_evaluation.takes_packed_rows", takes)
        trainer = make_trainer(dropout=0.1, logging_steps=1, **settings)
        calls = recorded_calls(trainer.model)
        trainer.train()
        assert ("packed_rows" in calls[0]) == (takes is takes_packed_rows)
        trainer.evaluate()
        runs.append((trained(trainer.model), without_runtimes(trainer.state.log_history)))
    (first, first_log), (second, second_log) = runs
    assert_same_bits(first, second)
    assert first_log == second_log


def twice_as_many_rows(kind):
    """A Trainer that overrides one of its steps to double every tensor of a batch."""

    class Doubling(Trainer):
        pass

    def doubled(inputs):
        return {name: torch.cat([part, part]) for name, part in inputs.items()}

    if kind == "compute_loss":

        def compute_loss(self, model, inputs, return_outputs=False):
            return Trainer.compute_loss(self, model, doubled(inputs), return_outputs)

        Doubling.compute_loss = compute_loss
    elif kind == "training_step":

        def training_step(self, model, inputs):
            return Trainer.training_step(self, model, doubled(inputs))

        Doubling.training_step = training_step
    else:

        def prediction_step(self, model, inputs, *others):
            loss, *both = Trainer.prediction_step(self, model, doubled(inputs), *others)
            return loss, *(part if part is None else part.chunk(2)[0] for part in both)

        Doubling.prediction_step = prediction_step
    return Doubling


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("training_step", [8, 8, 8, 1]),
        ("prediction_step", [4, 4, 16, 2]),
        ("compute_loss", [8, 8, 16, 2]),
    ],
)
def test_trainers_that_override_steps_get_tensors_alone(make_trainer, kind, rows):
    """Two batches of 4 rows to train on, and two of 8 and 1 to evaluate on; some are doubled."""
    trainer = make_trainer(kind=twice_as_many_rows(kind), max_steps=2, prediction_loss_only=True)
    calls = recorded_calls(trainer.model)
    trainer.train()
    trainer.evaluate()
    assert [len(named["labels"]) for named in calls] == rows
    assert all("packed_rows" not in named for named in calls)


@pytest.mark.slow
def test_a_method_set_on_one_trainer_is_an_override_too(make_trainer):
    trainer = make_trainer(max_steps=1)
    whole = trainer.compute_loss

    def compute_loss(model, inputs, return_outputs=False):
        return whole(model, {name: part[:2] for name, part in inputs.items()}, return_outputs)

    trainer.compute_loss = compute_loss
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.slow
def test_other_modules_do_not_get_packed_rows(make_model, tokenizer, tmp_path):
    model = make_model()
    calls = recorded_calls(model)
    args = TrainingArguments(
        str(tmp_path), report_to=["none"], disable_tqdm=True, max_steps=2, save_strategy="no"
    )
    trainer = Trainer(
        Wrapper(model),
        args,
        train_dataset=make_data(9),
        eval_dataset=make_data(5),
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    use_both_loops(trainer)
    assert len(calls) == 4
    assert all("packed_rows" not in named for named in calls)
