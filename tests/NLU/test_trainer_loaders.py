"""The Trainer's loaders, a user's own loaders and samplers, and sets without an index."""

import itertools

import pytest
import torch
from compare import assert_same_bits
from datasets import Dataset
from small_trainers import Line, SizedStream, Stream, line_of, make_line_trainer, make_points
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from trainer_runs import Recorder, without_runtimes

from loralib.errors import CheckpointError
from loralib.training.determinism import rng_state
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
    TrainingError,
    default_data_collator,
    trainer_checkpoint,
    trainer_data,
)


@pytest.fixture
def make(tmp_path):
    """See `make_line_trainer`."""
    return lambda kind=Trainer, **settings: make_line_trainer(tmp_path / "out", kind, **settings)


def values(loader):
    return [batch["x"].tolist() for batch in loader]


# ---- the Trainer's own loaders ----


def test_loaders_have_the_batch_sizes_and_lengths_of_the_settings(make):
    trainer = make(per_device_train_batch_size=8, per_device_eval_batch_size=2)
    train, evaluation = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
    assert (train.batch_size, len(train), len(list(train))) == (8, 3, 3)
    assert (evaluation.batch_size, len(evaluation), len(list(evaluation))) == (2, 5, 5)
    assert trainer.num_examples(train) == 20
    # A loader keeps the set's order; `evaluate` may use another one.
    xs = [point["x"] for point in trainer.eval_dataset]
    assert list(itertools.chain(*values(evaluation))) == pytest.approx(xs)
    assert sorted(itertools.chain(*values(train))) == pytest.approx(
        sorted(point["x"] for point in trainer.train_dataset)
    )
    others = make_points(3, seed=8)
    for loader in (trainer.get_eval_dataloader(others), trainer.get_test_dataloader(others)):
        assert len(loader) == 2


def test_drop_last_changes_loaders_but_not_evaluate(make):
    trainer = make(
        per_device_train_batch_size=8,
        dataloader_drop_last=True,
        compute_metrics=lambda p: {"rows": len(p.predictions)},
    )
    assert len(trainer.get_train_dataloader()) == 2
    assert len(trainer.get_eval_dataloader()) == len(list(trainer.get_eval_dataloader())) == 2
    assert trainer.evaluate()["eval_rows"] == 9


def test_loaders_yield_the_collator_s_batches(make_trainer):
    """They leave out `packed_rows`, which training adds for models of this package."""
    trainer = make_trainer()
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        assert next(iter(loader)).keys() == {"input_ids", "attention_mask", "labels"}


def test_loaders_of_missing_sets_are_errors(make):
    trainer = make(train_dataset=None, eval_dataset=None)
    with pytest.raises(ValueError, match="training needs a train_dataset"):
        trainer.get_train_dataloader()
    with pytest.raises(ValueError, match="evaluating needs an eval_dataset"):
        trainer.get_eval_dataloader()


# ---- sets that can only be iterated over ----


def trained_by_hand(batches):
    """Returns the line after gradient descent on these batches, at a rate of 0.1."""
    a = b = 0.0
    for batch in batches:
        errors = [(a * p["x"] + b - p["labels"], p["x"]) for p in batch]
        step = (sum(e * x for e, x in errors), sum(e for e, _ in errors))
        a, b = (v - 0.2 * d / len(batch) for v, d in zip((a, b), step, strict=True))
    return a, b


def sgd(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def passes_of(stream, count):
    """Yields the batches of four of the first `count` epochs."""
    for epoch in range(count):
        stream.set_epoch(epoch)
        rows = list(stream)
        yield from (rows[start : start + 4] for start in range(0, len(rows), 4))


@pytest.mark.parametrize(
    ("kind", "settings", "steps", "epoch"),
    [
        (Stream, {"max_steps": 7}, 7, 2 + 1 / 7),
        (Stream, {"max_steps": 2}, 2, 1.0),
        (SizedStream, {"max_steps": 7}, 7, 2 + 1 / 3),
        (SizedStream, {}, 6, 2.0),
        (SizedStream, {"dataloader_drop_last": True}, 4, 2.0),
    ],
)
def test_training_on_a_stream(make, kind, settings, steps, epoch):
    model = Line()
    trainer = make(
        model=model, train_dataset=kind(10), optimizers=sgd(model), max_grad_norm=0, **settings
    )
    assert trainer.train().global_step == steps
    batches = list(passes_of(kind(10), 3))
    if "dataloader_drop_last" in settings:
        batches = [batch for batch in batches if len(batch) == 4]
    assert line_of(trainer) == pytest.approx(trained_by_hand(batches[:steps]), rel=1e-5)
    assert trainer.state.epoch == pytest.approx(epoch)


def test_training_on_any_iterable(make):
    class Iterable:
        def __iter__(self):
            return iter(make_points(6))

    trainer = make(train_dataset=Iterable(), max_steps=4)
    assert values(trainer.get_train_dataloader())[1] == pytest.approx(
        [point["x"] for point in make_points(6)[4:]]
    )
    assert trainer.train().global_step == 4


def test_training_on_an_iterable_dataset_of_datasets(make):
    rows = [{**point, "more": 1} for point in make_points(10)]
    trainer = make(train_dataset=Dataset.from_list(rows).to_iterable_dataset(), max_steps=4)
    found = list(trainer.get_train_dataloader())
    assert [len(batch["x"]) for batch in found] == [4, 4, 2]
    assert found[0].keys() == {"x", "labels"}
    assert trainer.train().global_step == 4


def test_evaluation_of_a_stream_with_a_length(make):
    stream = SizedStream(9)
    stream.points = make_points(9, seed=5)
    trainer = make(eval_dataset=stream)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(make().evaluate()["eval_loss"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_dataset": Stream(8)}, "train_dataset has no length: give --max_steps"),
        (
            {"train_dataset": SizedStream(8), "group_by_length": True},
            "--group_by_length needs a map-style train_dataset",
        ),
        ({"eval_dataset": Stream(8)}, "the set to evaluate has no length: give one that has"),
    ],
)
def test_streams_that_cannot_be_used_are_errors_in_the_constructor(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_evaluating_a_stream_without_a_length_is_an_error(make):
    trainer = make()
    for method in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="the set to evaluate has no length"):
            method(Stream(3))


def test_several_workers_on_a_stream_give_a_warning(make, caplog, monkeypatch):
    with monkeypatch.context() as another_process:
        another_process.setattr(TrainingArguments, "is_main_process", False)
        make(train_dataset=Stream(8), max_steps=2, dataloader_num_workers=2).get_train_dataloader()
    make(train_dataset=Stream(8), max_steps=2, dataloader_num_workers=1).get_train_dataloader()
    assert not caplog.records
    make(train_dataset=Stream(8), max_steps=2, dataloader_num_workers=2).get_train_dataloader()
    assert "each of 2 workers iterates over the training set" in caplog.text


def test_a_batch_without_tensors_is_an_error(make):
    class Custom(Trainer):
        def get_eval_dataloader(self, eval_dataset=None):
            return [{"x": 1.0}]

    with pytest.raises(TrainingError, match="no tensor with a row for each example"):
        make(Custom).evaluate()


@pytest.mark.parametrize("count", [0, 3])
def test_a_stream_too_short_for_an_update_is_an_error(make, count):
    trainer = make(train_dataset=Stream(count), max_steps=4, gradient_accumulation_steps=2)
    batches = "1 batch" if count else "0 batches"
    message = f"yielded {batches} in an epoch, fewer than an update takes"
    with pytest.raises(TrainingError, match=message):
        trainer.train()


@pytest.mark.parametrize("steps", [1, 7])
def test_a_stream_is_read_again_until_max_steps(make, steps):
    assert make(train_dataset=Stream(9), max_steps=steps).train().global_step == steps


def test_a_run_on_a_stream_without_a_length_is_one_epoch(make):
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2, "logging_steps": 1}
    trainer = make(train_dataset=Stream(40), **settings)
    trainer.train()
    epochs = [record["epoch"] for record in trainer.state.log_history if "loss" in record]
    assert epochs == [0.25, 0.5, 0.75, 1.0]


# ---- a user's own loaders ----


class Shuffled(Trainer):
    """A Trainer whose batches come from PyTorch's random numbers, as dropout's do."""

    def get_train_dataloader(self):
        return DataLoader(
            self.train_dataset, batch_size=4, shuffle=True, collate_fn=self.data_collator
        )


class ShuffledByItsOwn(Trainer):
    """A Trainer whose loader has a generator of its own."""

    def get_train_dataloader(self):
        generator = torch.Generator().manual_seed(3)
        return DataLoader(
            self.train_dataset, 4, True, collate_fn=self.data_collator, generator=generator
        )


class SampledByItsOwn(Trainer):
    """A Trainer whose sampler has a generator of its own."""

    def _get_train_sampler(self):
        return RandomSampler(self.train_dataset, generator=torch.Generator().manual_seed(3))


class Noise:
    """A collator with a generator of its own."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, rows):
        batch = default_data_collator(rows)
        return {**batch, "x": batch["x"] + torch.rand(len(rows), generator=self.generator)}


class WithNoise(Trainer):
    """A Trainer whose collator has a generator of its own."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **{**settings, "data_collator": Noise()})


class ShuffledWithNoise(WithNoise, ShuffledByItsOwn):
    """Both."""


class Backwards(Trainer):
    """A Trainer that evaluates from the last example to the first, in batches of two."""

    def get_eval_dataloader(self, eval_dataset=None):
        rows = list(eval_dataset or self.eval_dataset)[::-1]
        return DataLoader(rows, batch_size=2, collate_fn=self.data_collator)

    get_test_dataloader = get_eval_dataloader


def test_evaluation_with_a_user_s_loader(make):
    seen = []
    trainer = make(
        Backwards, model=Line(1.0, 2.0), compute_metrics=lambda p: seen.append(p) or {"n": 1}
    )
    metrics = trainer.evaluate()
    plain = make(model=Line(1.0, 2.0))
    assert metrics["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"])
    expected = plain.predict(plain.eval_dataset).predictions[::-1]
    assert seen[0].predictions.tolist() == expected.tolist()
    assert trainer.predict(trainer.eval_dataset).predictions.tolist() == expected.tolist()


def test_a_user_s_loader_needs_no_set(make):
    class Custom(Trainer):
        def get_train_dataloader(self):
            return [{"x": torch.ones(2), "labels": torch.ones(2)}] * 3

        def get_eval_dataloader(self, eval_dataset=None):
            return self.get_train_dataloader()

    trainer = make(Custom, train_dataset=None, eval_dataset=None, evaluation_strategy="epoch")
    assert trainer.train().global_step == 6
    assert sum("eval_loss" in record for record in trainer.state.log_history) == 2


class Ordered(Trainer):
    """A Trainer with its own order of data, given by 4.4's hooks."""

    def _get_train_sampler(self):
        return SequentialSampler(self.train_dataset)

    def _get_eval_sampler(self, eval_dataset):
        return range(len(eval_dataset) - 1, -1, -1)


def test_a_user_s_samplers_are_used(make):
    model = Line()
    trainer = make(Ordered, model=model, optimizers=sgd(model), max_grad_norm=0)
    trainer.train()
    expected = trained_by_hand([make_points(20)[i : i + 4] for i in range(0, 20, 4)] * 2)
    assert line_of(trainer) == pytest.approx(expected, rel=1e-5)
    predictions = trainer.predict(trainer.eval_dataset).predictions
    expected = [trainer.model.a * p["x"] + trainer.model.b for p in trainer.eval_dataset[::-1]]
    assert predictions.tolist() == pytest.approx([y.item() for y in expected], rel=1e-5)


@pytest.mark.parametrize("batch_size", [4, 3])
def test_the_trainer_s_samplers_work_in_a_user_s_loaders(make, batch_size):
    """As in copies of 4.4's get_train_dataloader, which subclasses change."""
    passes = []

    class Custom(Trainer):
        def own_loader(self, dataset, sampler):
            return DataLoader(dataset, batch_size, sampler=sampler, collate_fn=self.data_collator)

        def get_train_dataloader(self):
            return self.own_loader(self.train_dataset, self._get_train_sampler())

        def get_eval_dataloader(self, eval_dataset=None):
            return self.own_loader(self.eval_dataset, self._get_eval_sampler(self.eval_dataset))

        def compute_loss(self, model, inputs, return_outputs=False):
            passes.extend(inputs["x"].tolist())
            return super().compute_loss(model, inputs, return_outputs)

    trainer = make(Custom)
    trainer.train()
    first, second = passes[:20], passes[20:]
    assert first != second
    assert sorted(first) == sorted(second) == pytest.approx(sorted(p["x"] for p in make_points(20)))
    expected = make(model=trainer.model).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected)


# ---- resuming ----

RESUMED = {
    "stream": {"train_dataset": Stream, "max_steps": 8},
    "sized stream": {"train_dataset": SizedStream},
    "own loader": {"kind": Shuffled},
    # In two steps an epoch, so that the third is within the second epoch.
    "own loader's generator": {"kind": ShuffledByItsOwn, "train_dataset": lambda _: make_points(8)},
    "own sampler's generator": {"kind": SampledByItsOwn, "train_dataset": lambda _: make_points(8)},
    "own collator's generator": {"kind": WithNoise},
    "collator's generator, drawn from in evaluations": {
        "kind": ShuffledWithNoise,
        "evaluation_strategy": "steps",
        "eval_steps": 1,
    },
    "own loader, accumulated": {"kind": Shuffled, "gradient_accumulation_steps": 2},
    "several outputs": {"twice": True},
}


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, case, step):
    def make(folder):
        settings = dict(RESUMED[case])
        kind, twice = settings.pop("kind", Trainer), settings.pop("twice", False)
        if "train_dataset" in settings:
            settings["train_dataset"] = settings["train_dataset"](11)
        return make_line_trainer(
            tmp_path / folder,
            kind,
            model=Line(dropout=0.5, twice=twice),
            save_strategy="steps",
            save_steps=1,
            logging_steps=1,
            compute_metrics=lambda p: {"first": float(p.predictions[0].sum())},
            **{"evaluation_strategy": "epoch", **settings},
        )

    whole = make("whole")
    whole.train()
    resumed = make("resumed")
    resumed.train(str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())
    first, second = (without_runtimes(t.state.log_history) for t in (whole, resumed))
    assert first == second
    assert first[-1]["step"] > step


def test_a_generator_goes_on_after_a_checkpoint_of_an_older_version(make, tmp_path, monkeypatch):
    """It lacks the generator's state, but of the first epoch, that at the beginning is known."""
    with monkeypatch.context() as older:
        for module in (trainer_checkpoint, trainer_data):
            older.setattr(module, "rng_state", lambda device, _: rng_state(device))
        whole = make(kind=ShuffledByItsOwn, save_strategy="steps", save_steps=2)
        whole.train()
    resumed = make(kind=ShuffledByItsOwn)
    resumed.train(str(tmp_path / "out" / "checkpoint-2"))
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())


def test_a_stream_resumes_with_another_batch_size(make, tmp_path):
    """It has no length, but a resumed run still leaves out the examples that it has seen."""
    seen = []

    def collate(rows):
        seen.append([row["x"] for row in rows])
        return default_data_collator(rows)

    settings = {"train_dataset": Stream(24), "max_steps": 4, "data_collator": collate}
    make(save_strategy="steps", save_steps=2, **settings).train()
    whole = list(itertools.chain(*seen))
    seen.clear()
    make(per_device_train_batch_size=2, **settings).train(str(tmp_path / "out" / "checkpoint-2"))
    assert seen[4:] == [whole[8:10], whole[10:12]]


def test_resume_from_checkpoint_true_finds_the_last_checkpoint(make):
    settings = {"save_strategy": "steps", "save_steps": 4}
    with pytest.raises(ValueError, match="has no checkpoint to resume from"):
        make(**settings).train(resume_from_checkpoint=True)
    whole = make(**settings)
    whole.train()
    recorder = Recorder()
    resumed = make(callbacks=[recorder], **settings)
    resumed.train(resume_from_checkpoint=True)
    assert len(recorder.rates) == 2
    assert line_of(resumed) == line_of(whole)
    with pytest.raises(TypeError, match="unexpected argument: steps"):
        resumed.train(steps=3)


def test_resuming_keeps_whether_a_process_is_the_main_one(make, monkeypatch):
    """The main process wrote the checkpoint; the others must not show bars and records as well."""
    settings = {"save_strategy": "steps", "save_steps": 4}
    make(**settings).train()
    resumed = make(**settings)
    monkeypatch.setattr(TrainingArguments, "is_main_process", False)
    monkeypatch.setattr(TrainingArguments, "is_local_main_process", False)
    resumed.train(resume_from_checkpoint=True)
    state = resumed.state
    assert (state.is_world_process_zero, state.is_local_process_zero) == (False, False)


def test_another_number_of_processes_does_not_change_an_epoch_s_steps():
    """That is so if a step has as many examples as before."""
    layout = {"processes": 1, "examples a step": 8}
    changed = trainer_checkpoint._changed_beside_processes
    assert changed(layout, {**layout, "processes": 2}) == []
    assert changed(layout, {"processes": 2, "examples a step": 16}) == ["examples a step"]


@pytest.mark.parametrize(("saved", "batches", "last"), [(4, 1, 1.2), (5, 1, 2), (2, 2, 1.8)])
def test_ignore_data_skip_resumes_at_the_epoch_s_beginning(make, saved, batches, last):
    """If the epoch's last step was saved, that is the next epoch's."""
    settings = {"save_strategy": "steps", "save_steps": saved, "ignore_data_skip": True}
    settings["gradient_accumulation_steps"] = batches
    make(Shuffled, **settings, max_steps=saved).train()
    resumed = make(Shuffled, **settings)
    assert resumed.train(resume_from_checkpoint=True).global_step == {1: 10, 2: 4}[batches]
    assert resumed.state.epoch == pytest.approx(last)


def test_training_twice_starts_a_second_run(make):
    trainer = make()
    trainer.train()
    first = line_of(trainer)
    output = trainer.train()
    assert output.global_step == 10
    assert [record["step"] for record in trainer.state.log_history] == [10]
    assert trainer.lr_scheduler.last_epoch == 10
    assert line_of(trainer) != first


def test_arguments_that_replace_the_first_ones_are_used(make, tmp_path):
    trainer = make()
    new = {"save_strategy": "epoch", "max_steps": 5, "bf16": True, "disable_tqdm": True}
    trainer.args = TrainingArguments(str(tmp_path / "new"), report_to=[], **new)
    trainer.train()
    assert trainer.precision.dtype is torch.bfloat16
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"checkpoint-3", "checkpoint-5"}
    trainer.args.learning_rate = 1.0
    with pytest.raises(CheckpointError, match="a run with --learning_rate 5e-05, but this run has"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("bf16", [True, False])
def test_arguments_of_another_precision_need_unrounded_weights(make_trainer, tmp_path, bf16):
    trainer = make_trainer(max_steps=1, bf16=True)
    trainer.args = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], bf16=bf16)
    if bf16:
        assert trainer.train().global_step == 1
        return
    for _ in range(2):
        with pytest.raises(ValueError, match="frozen weights have been rounded to bfloat16: to"):
            trainer.train()


def test_training_after_an_interrupt_starts_without_its_gradients(make):
    class Interrupting(TrainerCallback):
        def on_substep_end(self, args, state, control, **given):
            raise KeyboardInterrupt

    settings = {"gradient_accumulation_steps": 2}
    trainer, plain = make(**settings), make(**settings)
    trainer.add_callback(Interrupting)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Interrupting)
    for each in (trainer, plain):
        each.train()
    assert line_of(trainer) == line_of(plain)


def test_a_run_on_other_rows_of_a_table_is_not_resumed(make, tmp_path):
    """Even if only one of many rows differs."""
    rows = [{"x": n / 3000, "labels": 0.5} for n in range(3000)]
    settings = {"per_device_train_batch_size": 1000, "max_steps": 2}
    make(
        train_dataset=Dataset.from_list(rows), save_steps=1, save_strategy="steps", **settings
    ).train()
    checkpoint = str(tmp_path / "out" / "checkpoint-1")
    make(train_dataset=Dataset.from_list(rows), **settings).train(checkpoint)
    rows[1] = {**rows[1], "labels": 0.25}
    with pytest.raises(CheckpointError, match="on other data with the same number of examples"):
        make(train_dataset=Dataset.from_list(rows), **settings).train(checkpoint)
    # With --max_steps, another number of rows is only a warning.
    make(train_dataset=Dataset.from_list(rows[:2000]), **settings).train(checkpoint)


@pytest.mark.parametrize("kinds", [(list, Dataset.from_list), (Dataset.from_list, list)])
def test_a_run_is_resumed_if_its_rows_cannot_be_compared(make, tmp_path, kinds):
    """They are compared only if both runs are on tables."""
    before, now = (kind(make_points(20)) for kind in kinds)
    make(train_dataset=before, save_steps=3, save_strategy="steps").train()
    resumed = make(train_dataset=now)
    assert resumed.train(str(tmp_path / "out" / "checkpoint-3")).global_step == 10
