"""Models from `model_init`, and hyperparameter searches."""

import importlib.util
import math
import random
import sys
import types
from pathlib import Path

import pytest
import torch
from small_trainers import Line, line_of, make_line_trainer

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import BestRun, default_hp_space_optuna

NO_OPTUNA = "hyperparameter_search needs optuna: pip install optuna"


@pytest.fixture
def make(tmp_path):
    """See `make_line_trainer`."""
    return lambda **settings: make_line_trainer(tmp_path / "out", **settings)


# ---- model_init, and default arguments ----


def test_each_run_has_a_new_model(make):
    plain = make(model=Line())
    plain.train()
    trainer = make(model_init=Line)
    first = trainer.model
    for seed in (42, 42, 3):
        trainer.args.seed = seed
        trainer.train()
        assert trainer.model is not first
        assert trainer.callback_handler.model is trainer.model
        assert (line_of(trainer) == line_of(plain)) is (seed == 42)


def test_each_new_model_has_the_same_seed(make):
    class Random(Line):
        def __init__(self):
            super().__init__(*torch.randn(2).tolist())

    trainer = make(model_init=Random)
    lines = []
    for _ in range(2):
        trainer.train()
        lines.append(line_of(trainer))
    assert lines[0] == lines[1]


def test_an_optimizer_of_an_earlier_model_is_replaced(make):
    trainer, plain = make(model_init=Line), make(model=Line())
    trainer.create_optimizer_and_scheduler(num_training_steps=10)
    for each in (trainer, plain):
        each.train()
    assert line_of(trainer) == line_of(plain) != (0, 0)


def test_model_init_may_take_the_trial(make):
    seen = []
    for start in (
        lambda trial: seen.append(trial) or Line(),
        lambda trial, b=1.0: seen.append(trial) or Line(b=b),
        lambda trial="not given": seen.append(trial) or Line(),
    ):
        make(model_init=start).train()
    assert seen == [None] * 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": None}, "needs a model or a model_init"),
        ({"model_init": lambda: None}, "model_init returned None"),
        ({"model_init": lambda trial, more: Line()}, "no argument, or only the trial"),
        (
            {"model_init": Line, "optimizers": (torch.optim.SGD(Line().parameters()), None)},
            "optimizers belong to one model",
        ),
        (
            {"model_init": Line, "optimizers": (None, "a schedule")},
            "optimizers belong to one model",
        ),
    ],
)
def test_missing_or_wrong_models_are_errors(make, settings, message):
    with pytest.raises(RuntimeError, match=message):
        make(**settings)


def test_train_prefers_model_init_to_the_model(make):
    with pytest.warns(FutureWarning, match="train uses model_init's"):
        trainer = make(model=Line(5.0), model_init=Line)
    assert trainer.model.a.item() == 5
    trainer.train()
    expected = make(model=Line())
    expected.train()
    assert line_of(trainer) == line_of(expected)


def test_default_arguments_write_to_tmp_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(Line())
    assert trainer.args.output_dir == "tmp_trainer"
    assert trainer.args == TrainingArguments("tmp_trainer", logging_dir=trainer.args.logging_dir)
    trainer.create_optimizer_and_scheduler(3)
    assert trainer.lr_scheduler.get_last_lr() == [5e-5]


# ---- searches ----


class Pruned(Exception):
    """What optuna raises to end a trial."""


class Trial:
    """Stands in for optuna's trial: chooses at random."""

    def __init__(self, number, chance, worst):
        self.number, self.chance, self.worst = number, chance, worst
        self.params, self.reports = {}, []

    def suggest_float(self, name, low, high, log=False):
        return self.params.setdefault(name, self.chance.uniform(low, high))

    def suggest_int(self, name, low, high):
        return self.params.setdefault(name, self.chance.randint(low, high))

    def suggest_categorical(self, name, choices):
        return self.params.setdefault(name, self.chance.choice(choices))

    def report(self, value, step):
        self.reports.append((step, value))

    def should_prune(self):
        return self.worst is not None and self.reports[-1][1] > self.worst


class Study:
    """Stands in for optuna's study."""

    def __init__(self, direction, worst=None):
        self.direction, self.worst, self.trials, self.values = direction, worst, [], []

    def optimize(self, objective, n_trials, timeout):
        self.timeout, chance = timeout, random.Random(0)
        for number in range(n_trials):
            trial = Trial(number, chance, self.worst)
            self.trials.append(trial)
            try:
                trial.value = objective(trial)
            except Pruned:
                trial.value = None
            if trial.value is not None and math.isnan(trial.value):
                trial.value = None  # to optuna, a failed trial

    @property
    def best_trial(self):
        sign = 1 if self.direction == "minimize" else -1
        done = [trial for trial in self.trials if trial.value is not None]
        return min(done, key=lambda trial: sign * trial.value)


@pytest.fixture
def studies(monkeypatch):
    """Replaces optuna by a package of this file; returns the studies that it makes."""
    made = []
    package = types.ModuleType("optuna")
    package.__spec__ = sys.__spec__
    package.create_study = lambda **settings: made.append(Study(**settings)) or made[-1]
    package.TrialPruned = Pruned
    monkeypatch.setitem(sys.modules, "optuna", package)
    return made


def start(trial):
    """Makes a line whose start the trial chooses, mostly far from 2x + 3."""
    begin = 0 if trial is None else trial.suggest_int("begin", -40, 4)
    return Line(float(begin), float(begin))


def rates(trial):
    return {"learning_rate": trial.suggest_float("learning_rate", 0.0, 0.5)}


def test_a_search_finds_the_best_of_its_trials(make, studies, tmp_path):
    trainer = make(
        model_init=start, evaluation_strategy="epoch", save_strategy="epoch", report_to=[]
    )
    names, evaluated = [], []

    class Names(type(trainer.callback_handler.callbacks[0])):
        def on_train_begin(self, args, state, control, **kwargs):
            names.append((state.is_hyper_param_search, state.trial_name, state.trial_params))

        def on_evaluate(self, args, state, control, **kwargs):
            evaluated.append(state.trial_name)

    trainer.add_callback(Names)
    best = trainer.hyperparameter_search(hp_space=rates, n_trials=4, timeout=100)
    (study,) = studies
    assert (study.direction, study.timeout) == ("minimize", 100)
    values = [trial.value for trial in study.trials]
    assert best == BestRun(str(values.index(min(values))), min(values), study.best_trial.params)
    for trial in study.trials:
        assert [step for step, _ in trial.reports] == [1, 2]
        assert trial.value == trial.reports[-1][1]
        assert (True, f"run-{trial.number}", trial.params) in names
        assert evaluated.count(f"run-{trial.number}") == 2
        folder = tmp_path / "out" / f"run-{trial.number}"
        assert {path.name for path in folder.iterdir()} == {"checkpoint-5", "checkpoint-10"}
    assert trainer.args.output_dir == str(tmp_path / "out")
    # Training with the best trial's choices gives the same loss.
    alone = make(
        model=Line(*[float(best.hyperparameters["begin"])] * 2),
        learning_rate=best.hyperparameters["learning_rate"],
    )
    alone.train()
    assert alone.evaluate()["eval_loss"] == best.objective


@pytest.mark.parametrize(("overwrite", "limit"), [(True, 3), (False, 3), (False, 2)])
def test_a_trial_never_uses_checkpoints_of_an_earlier_search(
    make, studies, tmp_path, overwrite, limit
):
    """With --overwrite_output_dir, or if there are too many, it removes them."""
    settings = {
        "evaluation_strategy": "epoch",
        "load_best_model_at_end": True,
        "save_total_limit": limit,
    }
    lines = []
    for epochs in (3, 2):
        trainer = make(
            model_init=Line, num_train_epochs=epochs, overwrite_output_dir=overwrite, **settings
        )
        trainer.hyperparameter_search(hp_space=lambda trial: {"learning_rate": 0.1}, n_trials=1)
        lines.append((line_of(trainer), trainer.state.best_model_checkpoint))
    alone = make(model=Line(), output_dir=str(tmp_path / "alone"), num_train_epochs=2, **settings)
    alone.train()
    folder = tmp_path / "out" / "run-0"
    assert lines[1] == (line_of(alone), str(folder / "checkpoint-10"))
    assert (folder / "checkpoint-15").exists() is (limit == 3 and not overwrite)


def test_objective_direction_and_names_can_be_chosen(make, studies):
    trainer = make(model_init=Line, compute_metrics=lambda p: {"score": 1.0})
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"seed": trial.suggest_int("seed", 1, 40)},
        compute_objective=lambda metrics: metrics["eval_score"] * len(studies[0].trials),
        n_trials=3,
        direction="maximize",
        backend="optuna",
        hp_name=lambda trial: f"own-{trial.number}",
    )
    assert best.objective == 3
    assert best.run_id == "2"
    assert trainer.args.seed == best.hyperparameters["seed"]


def test_a_trial_can_be_pruned(make, studies):
    """The next trial starts from a new model."""
    trainer = make(
        model_init=start, evaluation_strategy="epoch", num_train_epochs=3, disable_tqdm=False
    )
    trainer.hyperparameter_search(hp_space=rates, n_trials=6, worst=500.0)
    reports = [len(trial.reports) for trial in studies[0].trials]
    assert set(reports) == {1, 3}
    assert all((t.value is None) == (len(t.reports) == 1) for t in studies[0].trials)


def test_each_evaluation_within_an_epoch_is_reported(make, studies):
    """Optuna ignores a second report of the same number."""
    trainer = make(model_init=start, evaluation_strategy="steps", eval_steps=2)
    trainer.hyperparameter_search(hp_space=rates, n_trials=2)
    for trial in studies[0].trials:
        assert [number for number, _ in trial.reports] == [1, 2, 3, 4, 5]


def test_a_trial_starts_with_the_search_s_own_settings(make, studies):
    """Not with the choices of the trial before."""
    trainer = make(model_init=Line, weight_decay=0.5)
    seen = []

    class Recording(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seen.append((args.weight_decay, args.adafactor, args.learning_rate))

    trainer.add_callback(Recording)
    chosen = iter([{"adafactor": True}, {"weight_decay": 0.25}, {}])
    trainer.hyperparameter_search(hp_space=lambda trial: next(chosen), n_trials=3)
    assert seen == [(0.5, True, 0.1), (0.25, False, 0.1), (0.5, False, 0.1)]


def test_label_smoothing_and_precision_can_be_chosen(make, studies):
    trainer = make(model_init=Line)
    seen = []

    class Recording(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            smoother = trainer.label_smoother
            seen.append((smoother and smoother.epsilon, trainer.precision.dtype))
            control.should_training_stop = True

    trainer.add_callback(Recording)
    chosen = iter([{"label_smoothing_factor": 0.2}, {"bf16": True}])
    search = {"compute_objective": lambda metrics: 1.0, "n_trials": 2}
    trainer.evaluate = dict  # a line has no classes whose labels could be smoothed
    trainer.hyperparameter_search(hp_space=lambda trial: next(chosen), **search)
    trainer.args.label_smoothing_factor = 0.4  # such as the best trial's
    trainer.train()
    assert seen == [(0.2, torch.float32), (None, torch.bfloat16), (0.4, torch.bfloat16)]


def test_a_label_smoother_of_a_subclass_stays(make):
    trainer = make(model_init=Line)
    own = trainer.label_smoother = LabelSmoother(0.3)
    trainer._forget_last_run(None)
    assert trainer.label_smoother is own


def test_a_trial_that_diverges_does_not_end_the_search(make, studies, caplog):
    trainer = make(model_init=Line, max_grad_norm=0)
    chosen = iter([1e39, 0.1])
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": next(chosen)}, n_trials=2
    )
    assert best.run_id == "1"
    assert studies[0].trials[0].value is None
    assert "trial 0 has failed: the loss is not finite at step 2" in caplog.text


def test_default_space():
    trial = Trial(0, random.Random(1), None)
    chosen = default_hp_space_optuna(trial)
    assert chosen == trial.params
    assert 1e-6 <= chosen["learning_rate"] <= 1e-4
    assert 1 <= chosen["num_train_epochs"] <= 5
    assert chosen["per_device_train_batch_size"] in (4, 8, 16, 32, 64)


@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="needs optuna")
def test_a_search_with_optuna_itself(make):
    trainer = make(model_init=start, evaluation_strategy="epoch")
    best = trainer.hyperparameter_search(hp_space=rates, n_trials=3)
    assert best.hyperparameters.keys() == {"begin", "learning_rate"}
    assert best.run_id in {"0", "1", "2"}


# ---- errors ----


@pytest.mark.parametrize(
    ("settings", "search", "error", "message"),
    [
        ({"model": Line()}, {}, RuntimeError, "needs a Trainer with a model_init"),
        ({}, {"backend": "ray"}, ValueError, 'supports only backend="optuna", not Ray'),
        ({}, {"backend": "grid"}, ValueError, "'grid' is not a valid"),
        ({}, {"n_jobs": 2}, ValueError, "leave n_jobs out"),
        (
            {},
            {"hp_space": lambda trial: {"rate": 1}},
            ValueError,
            "hp_space chooses rate, which TrainingArguments do not have",
        ),
        (
            {},
            {"hp_space": lambda trial: {"learning_rate": -1}},
            ValueError,
            "--learning_rate must be",
        ),
        ({}, {"hp_space": lambda trial: {"fp16": True}}, ValueError, "fp16 needs a GPU"),
        (
            {},
            {"hp_space": lambda trial: {"warmup_steps": 0.1}},
            ValueError,
            "hp_space chooses 0.1 for warmup_steps, which has to be of type int",
        ),
        (
            {},
            {"hp_space": lambda trial: {"adafactor": "no"}},
            ValueError,
            "hp_space chooses 'no' for adafactor, which has to be of type bool",
        ),
        ({"eval_dataset": None}, {}, ValueError, "give the Trainer an eval_dataset"),
    ],
)
def test_bad_searches_are_errors(make, studies, settings, search, error, message):
    trainer = make(**({"model_init": Line} if "model" not in settings else {}), **settings)
    with pytest.raises(error, match=message):
        trainer.hyperparameter_search(n_trials=1, **search)
    assert Path(trainer.args.output_dir).name == "out"


def test_a_search_without_optuna_is_an_error(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(RuntimeError, match=NO_OPTUNA):
        make(model_init=Line).hyperparameter_search(n_trials=1)
