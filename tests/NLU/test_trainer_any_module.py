"""The Trainer works with any module, whatever its forward takes and returns."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from compare import assert_same_bits, rounding
from torch import nn
from trainer_runs import collate, make_data, sequence, trained, without_runtimes

import loralib as lora
from loralib.errors import CheckpointError
from transformers import Trainer, TrainerCallback, TrainingArguments, TrainingError
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.trainer_utils import list_checkpoints

pytestmark = pytest.mark.slow

WIDTH, CLASSES = 6, 3


@dataclass(slots=True)
class Scored:
    loss: torch.Tensor | None
    logits: torch.Tensor


OUTPUTS = {
    "tuple": lambda loss, logits: (logits,) if loss is None else (loss, logits),
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "dict of other names": lambda loss, logits: {"scores": logits, "loss": loss},
    "dataclass": Scored,
    "output": lambda loss, logits: SequenceClassifierOutput(loss, logits),
}


class Net(nn.Module):
    """A classifier with a buffer that training changes, and with dropout."""

    def __init__(self, output: str = "tuple", dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, CLASSES)
        )
        self.output = output

    def forward(self, x, labels=None):
        logits = self.layers(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return OUTPUTS[self.output](loss, logits)


def make_rows(count: int, seed: int = 0) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=generator)
    return [{"x": row, "label": int(row[:CLASSES].argmax())} for row in x]


@pytest.fixture
def make(tmp_path):
    """Makes a Trainer with 20 rows to train and 9 to evaluate; keyword arguments are settings."""

    def make(model, train=None, evaluated=None, kind=Trainer, **settings):
        own = ("compute_metrics", "callbacks", "optimizers", "data_collator")
        given = {name: settings.pop(name) for name in own if name in settings}
        defaults = {
            "output_dir": str(tmp_path / "out"),
            "report_to": [],
            "disable_tqdm": True,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "save_strategy": "no",
        }
        return kind(
            model,
            TrainingArguments(**{**defaults, **settings}),
            train_dataset=make_rows(20) if train is None else train,
            eval_dataset=make_rows(9, seed=5) if evaluated is None else evaluated,
            **given,
        )

    return make


def trained_by_hand(model, batches, epochs: int, rate: float):
    """Trains a model by gradient descent, written out."""
    rows = make_rows(20)
    model.train()
    for epoch in range(epochs):
        batches.epoch = epoch
        for batch in batches:
            x = torch.stack([rows[i]["x"] for i in batch])
            labels = torch.tensor([rows[i]["label"] for i in batch])
            loss = F.cross_entropy(model.layers(x), labels)
            parameters = list(model.parameters())
            for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.data -= rate * gradient
    return model


@pytest.mark.parametrize("output", OUTPUTS)
def test_training_equals_gradient_descent_written_out(make, output):
    model = Net(output)
    model.layers[1].eval()  # as a part from `from_pretrained`; it is trained in training mode
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    constant = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1.0)
    trainer = make(model, optimizers=(sgd, constant), max_grad_norm=0)
    trainer.train()
    expected = trained_by_hand(Net(output), trainer._training_batches(), epochs=2, rate=0.1)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)
    assert (model.layers[0].weight - Net().layers[0].weight).abs().max() > 1e-2


@pytest.mark.parametrize("output", OUTPUTS)
def test_evaluation_and_predictions_equal_the_model_s_outputs(make, output):
    model, rows = Net(output), make_rows(9, seed=5)
    trainer = make(model, compute_metrics=lambda p: {"rows": len(p.predictions)})
    metrics = trainer.evaluate()
    x, labels = torch.stack([r["x"] for r in rows]), torch.tensor([r["label"] for r in rows])
    logits = model.eval().layers(x)
    assert metrics["eval_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert metrics["eval_rows"] == 9
    found = trainer.predict(rows)
    torch.testing.assert_close(torch.from_numpy(found.predictions), logits.detach())
    assert found.label_ids.tolist() == labels.tolist()
    bare = trainer.predict([{"x": row["x"]} for row in rows])
    torch.testing.assert_close(torch.from_numpy(bare.predictions), logits.detach())
    assert bare.label_ids is None
    assert "eval_loss" not in bare.metrics


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}])
def test_a_resumed_run_ends_with_the_same_bits(make, tmp_path, settings):
    settings = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1, **settings}
    whole = make(Net(dropout=0.5), **settings)
    whole.train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    state = torch.load(checkpoint / "pytorch_model.bin", weights_only=True)
    assert state.keys() == whole.model.state_dict().keys()
    assert not torch.equal(state["layers.1.running_mean"], torch.zeros(8))
    assert not (checkpoint / "config.json").exists()
    resumed = make(Net(dropout=0.5), output_dir=str(tmp_path / "second"), **settings)
    resumed.train(str(checkpoint))
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())
    histories = [without_runtimes(trainer.state.log_history) for trainer in (resumed, whole)]
    assert histories[0] == histories[1]
    # With another seed, the weights differ: dropout is random.
    other = make(Net(dropout=0.5), output_dir=str(tmp_path / "third"), **settings)
    other.args.seed += 1
    other.train()
    assert not torch.equal(other.model.layers[0].weight, whole.model.layers[0].weight)


def test_the_best_model_is_loaded_at_the_end(make, tmp_path):
    trainer = make(
        Net(),
        load_best_model_at_end=True,
        metric_for_best_model="score",
        evaluation_strategy="steps",
        eval_steps=3,
        save_total_limit=1,
        compute_metrics=sequence(1, 5, 3),
    )
    trainer.train()
    best = torch.load(tmp_path / "out" / "checkpoint-6" / "pytorch_model.bin", weights_only=True)
    assert_same_bits(trainer.model.state_dict(), best)
    assert [path[-1] for path in list_checkpoints(tmp_path / "out")] == ["6", "9"]


def test_only_the_state_dict_is_saved(make, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("model.safetensors", "pytorch_model_lora.bin"):
        (out / name).write_text("of an earlier run")
    trainer = make(Net())
    trainer.save_model()
    names = {path.name for path in out.iterdir()}
    assert names == {"pytorch_model.bin", "training_args.bin"}
    saved = torch.load(out / "pytorch_model.bin", weights_only=True)
    assert_same_bits(saved, trainer.model.state_dict())


def test_an_extra_state_that_is_not_a_tensor_is_restored(make, tmp_path):
    class Counting(Net):
        count = 0

        def forward(self, *given, **more):
            self.count += self.training
            return super().forward(*given, **more)

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    first, second = Counting(), Counting()
    make(first, save_strategy="epoch", num_train_epochs=1).train()
    make(second, num_train_epochs=2).train(str(tmp_path / "out" / "checkpoint-5"))
    assert (first.count, second.count) == (5, 10)


def test_another_module_s_checkpoint_is_refused(make, tmp_path):
    make(Net(), save_strategy="epoch").train()
    other = Net()
    other.layers[3] = nn.Linear(8, 7)
    with pytest.raises(CheckpointError, match=r"does not fit the model: .*layers\.3\.weight"):
        make(other).train(str(tmp_path / "out" / "checkpoint-5"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"lora_alpha": 8}, r"with the LoRA scaling of layers\.0 2\.0, but this run has 4\.0"),
        ({"variant": "rslora"}, r"LoRA scaling of layers\.0 2\.0, but this run has 2\.8284"),
        ({"lora_dropout": 0.5}, r"LoRA dropout of layers\.0 0\.0, but this run has 0\.5"),
    ],
)
def test_other_settings_of_lora_are_refused(make, tmp_path, change, message):
    """The checkpoint's tensors do not show them."""

    def adapted(**change):
        model = Net()
        lora.add_lora(model, targets=["layers.0"], **{"r": 2, "lora_alpha": 4, **change})
        return model

    make(adapted(), save_strategy="epoch", num_train_epochs=1).train()
    trainer, checkpoint = make(adapted(**change)), str(tmp_path / "out" / "checkpoint-5")
    if message is None:
        assert trainer.train(checkpoint).global_step == 10
        return
    with pytest.raises(CheckpointError, match=message):
        trainer.train(checkpoint)


def test_a_dropout_that_a_callback_schedules_is_no_other_setting(make, tmp_path):
    class Falling(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **given):
            model.layers[0].lora_dropout.p = 0.5 / (1 + state.global_step)

    def trainer_of_a_new_model():
        model = Net()
        lora.add_lora(model, targets=["layers.0"], r=2, lora_alpha=4, lora_dropout=0.5)
        return make(model, callbacks=[Falling], save_strategy="epoch")

    trainer_of_a_new_model().train()
    resumed = trainer_of_a_new_model()
    assert resumed.train(str(tmp_path / "out" / "checkpoint-5")).global_step == 10


class Unfreezing(TrainerCallback):
    """Trains the last layer from the second epoch on."""

    def __init__(self, frozen_at_the_beginning: bool):
        self.frozen_at_the_beginning = frozen_at_the_beginning

    def on_train_begin(self, args, state, control, model, **given):
        if self.frozen_at_the_beginning:
            model.layers[3].requires_grad_(False)

    def on_epoch_end(self, args, state, control, model, **given):
        model.layers[3].requires_grad_(True)


@pytest.mark.parametrize("is_known", [True, False])
def test_what_a_callback_unfreezes_has_to_be_in_the_optimizer(make, caplog, is_known):
    model = Net()
    model.layers[3].requires_grad_(is_known)
    before = model.layers[3].weight.detach().clone()
    make(model, callbacks=[Unfreezing(is_known)], num_train_epochs=3).train()
    assert torch.equal(model.layers[3].weight, before) is not is_known
    message = "the optimizer lacks layers.3.bias, layers.3.weight, which became trainable after"
    assert caplog.text.count(message) == (0 if is_known else 1)


def test_an_optimizer_made_before_lora_is_refused(make):
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    lora.add_lora(model, targets=["layers.0"], r=2, lora_alpha=4)
    with pytest.raises(ValueError, match=r"has none of the model's trainable .* LoRA is added"):
        make(model, optimizers=(sgd, None)).train()


@pytest.mark.parametrize("with_model", [True, False])
def test_an_optimizer_may_train_what_is_beside_the_model(make, caplog, with_model):
    model, beside = Net(), nn.Linear(CLASSES, CLASSES)

    class Probing(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            return F.cross_entropy(beside(model(**inputs)[1]), inputs["labels"])

    trained = [*beside.parameters(), *(model.parameters() if with_model else ())]
    sgd, before = torch.optim.SGD(trained, lr=0.1), beside.weight.detach().clone()
    make(model, kind=Probing, optimizers=(sgd, None), num_train_epochs=1).train()
    assert not torch.equal(beside.weight, before)
    warnings = [
        "the optimizer has none of the model's trainable parameters",
        "the optimizer also trains parameters outside of the model, which are not saved",
    ]
    assert [caplog.text.count(warning) for warning in warnings] == [not with_model, with_model]


def test_another_optimizer_s_checkpoint_is_refused(make, tmp_path):
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    constant = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1.0)
    make(model, optimizers=(sgd, constant), save_strategy="epoch").train()
    with pytest.raises(
        CheckpointError,
        match=r"optimizer\.pt: missing or damaged \(the state is another optimizer's",
    ):
        make(Net()).train(str(tmp_path / "out" / "checkpoint-5"))


# ---- names of labels, several outputs ----


class TwoTargets(nn.Module):
    """Two regressions on one layer, each with its labels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, x, first=None, second=None):
        one, two = self.layer(x).unbind(-1)
        if first is None or second is None:
            return one, two
        return F.mse_loss(one, first) + F.mse_loss(two, second), one, two


def two_targets(count: int) -> list[dict]:
    rows = make_rows(count)
    return [{"x": r["x"], "first": r["x"][0], "second": r["x"][1] * 2} for r in rows]


def test_several_labels_and_outputs(make):
    rows, model = two_targets(9), TwoTargets()
    seen = []
    trainer = make(
        model,
        train=two_targets(20),
        evaluated=rows,
        label_names=["first", "second"],
        compute_metrics=lambda p: seen.append(p) or {"kinds": len(p.label_ids)},
    )
    before = trainer.evaluate()
    assert before["eval_kinds"] == 2
    x = torch.stack([row["x"] for row in rows])
    expected = model.layer(x).detach()
    for index in (0, 1):
        torch.testing.assert_close(torch.from_numpy(seen[0].predictions[index]), expected[:, index])
        assert seen[0].label_ids[index].tolist() == (x[:, index] * (1 + index)).tolist()
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before["eval_loss"]
    # A row with only some of its labels has no loss.
    bare = trainer.predict([{"x": row["x"], "first": row["first"]} for row in rows])
    assert bare.label_ids is None
    assert len(bare.predictions) == 2


def test_a_loss_without_labels(make):
    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return {"loss": F.mse_loss(self.layer(x), x), "decoded": self.layer(x)}

    rows = [{"x": row["x"]} for row in make_rows(20)]
    trainer = make(Autoencoder(), train=rows, evaluated=rows, label_names=[])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    found = trainer.predict(rows)
    assert found.predictions.shape == (20, WIDTH)
    assert found.label_ids is None
    assert "eval_loss" in found.metrics


# ---- label smoothing ----


class OtherName(Net):
    def forward(self, x, target=None):
        return super().forward(x, target)


@pytest.mark.parametrize("output", OUTPUTS)
def test_labels_of_another_name_are_smoothed(make, output):
    rows = [{"x": row["x"], "target": row["label"]} for row in make_rows(9)]
    trainer = make(
        OtherName(output),
        evaluated=rows,
        label_names=["target"],
        label_smoothing_factor=0.1,
        compute_metrics=lambda p: {"shape": p.predictions.shape},
    )
    metrics = trainer.evaluate()
    log_p = trainer.model.layers(torch.stack([row["x"] for row in rows])).log_softmax(-1)
    right = -log_p[range(9), [row["target"] for row in rows]]
    expected = (0.9 * right + 0.1 * -log_p.mean(1)).mean().item()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["eval_shape"] == (9, CLASSES)


class NeedsLabels(Net):
    def forward(self, x, labels):
        return super().forward(x, labels)


class NoLogits(Net):
    def forward(self, x, labels=None):
        return {"loss": None if labels is None else self.layers(x).mean()}


class Summary(Net):
    """Returns the mean of the batch instead of its rows."""

    def forward(self, x, labels=None):
        loss, logits = super().forward(x, torch.zeros(len(x), dtype=torch.long))
        return {"loss": loss, "mean": logits.mean(0)}


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (Net, {"label_names": ["labels", "more"]}, "needs exactly one name"),
        (NeedsLabels, {}, "can be called without labels"),
        (NoLogits, {}, r"labels have the shape \(4,\), but that output has no rows"),
        (Summary, {"per_device_train_batch_size": 2}, r"\(2,\), but that output has \(3,\)"),
    ],
)
def test_label_smoothing_that_does_not_fit_the_model_is_an_error(make, model, settings, message):
    with pytest.raises((ValueError, TrainingError), match=f"label.smoothing.*{message}"):
        make(model(), label_smoothing_factor=0.1, **settings).train()


def test_label_smoothing_of_a_batch_without_labels_is_an_error(make):
    class Without(Net):
        def forward(self, x, labels=None):
            return super().forward(x, torch.zeros(len(x), dtype=torch.long))

    trainer = make(Without(), label_smoothing_factor=0.1, label_names=["target"])
    with pytest.raises(TrainingError, match="a batch has no target for --label_smoothing_factor"):
        trainer.train()


# ---- errors ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_checkpointing": True}, "--gradient_checkpointing needs a model of this"),
        ({"save_lora_only": True}, "--save_lora_only needs a model of this package"),
    ],
)
def test_settings_for_this_package_s_models_alone_are_errors(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(Net(), **settings)


@pytest.mark.parametrize(
    "returned",
    [{}, {"logits": torch.zeros(4, 3)}, (), (torch.zeros(4, 3),), torch.zeros(()), None],
    ids=["empty dict", "dict", "empty tuple", "tuple", "tensor", "none"],
)
def test_a_model_that_returns_no_loss_is_an_error(make, monkeypatch, returned):
    model = Net()
    monkeypatch.setattr(Net, "forward", lambda self, x, labels=None: returned)
    with pytest.raises(TrainingError, match="no loss for a batch of x, labels: with labels, its"):
        make(model).train()


def test_a_batch_that_is_a_list_is_an_error(make):
    with pytest.raises(TrainingError, match=r"is a list, not a dict .* have the data_collator"):
        make(Net(), data_collator=lambda rows: [torch.zeros(4, WIDTH)]).train()


def test_predictions_need_a_row_for_each_example(make):
    trainer = make(Summary())
    assert "eval_loss" in trainer.evaluate()
    with pytest.raises(TrainingError, match="returned 3 rows for 4 examples"):
        trainer.predict(make_rows(9))


@pytest.mark.parametrize("squeeze", [torch.squeeze, lambda logits: logits.squeeze(0)])
def test_a_batch_of_one_example_needs_the_same_dimensions(make, monkeypatch, squeeze):
    """In the first case, the last batch has no predictions at all."""

    def forward(self, x, labels=None):
        return {"loss": torch.zeros(()), "logits": squeeze(x[:, :1, None])}

    monkeypatch.setattr(Net, "forward", forward)
    with pytest.raises(TrainingError, match=r"of one example: name .* as in squeeze\(-1\)$"):
        make(Net()).predict(make_rows(9))


# ---- precision and reporting ----


def test_frozen_weights_stay_in_float32(make):
    """Other packages' layers may not work in half precision."""
    model = Net()
    model.layers[0].requires_grad_(False)
    make(model, bf16=True).train()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_tensorboard_works_with_any_module(make, tmp_path):
    pytest.importorskip("tensorboard")
    board = tmp_path / "board"
    make(Net(), report_to=["tensorboard"], logging_dir=str(board), logging_steps=2).train()
    assert list(board.iterdir())


# ---- this package's models with return_dict=False ----


def test_a_model_with_return_dict_off_trains_to_the_same_bits(make_trainer, make_model):
    first, second = (
        make_trainer(make_model(0.1, return_dict=as_dict)) for as_dict in (True, False)
    )
    for trainer in (first, second):
        trainer.train()
    assert isinstance(second.model(**collate(make_data(2))), tuple)
    assert_same_bits(trained(first.model), trained(second.model))
    assert first.evaluate()["eval_loss"] == second.evaluate()["eval_loss"]


def test_predictions_exclude_hidden_states(make_trainer, make_model):
    expected = make_trainer(make_model()).predict(make_data(9)).predictions
    for as_dict in (True, False):
        model = make_model(return_dict=as_dict, output_hidden_states=True)
        assert len(model(**collate(make_data(2)))) == 3
        found = make_trainer(model, per_device_eval_batch_size=2).predict(make_data(9)).predictions
        assert found.shape == expected.shape
        # Batches differ, and states of all tokens are computed instead of the first one's: about
        # two dozen sums over 32 features follow each other.
        assert found == pytest.approx(expected, abs=rounding(expected, 24 * 32))
