"""What the Trainer's processes compare before they train or evaluate together."""

import runpy
from types import SimpleNamespace

import pytest
import torch
from paths import ROOT
from trainer_runs import make_data

import loralib as lora
import transformers.trainer as trainer_module
from transformers import (
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    TrainingError,
    trainer_agreement,
    trainer_evaluation,
)
from transformers.data import table_digest
from transformers.fine_tuning import script as script_module
from transformers.trainer_agreement import (
    about_examples,
    agreed_checkpoint,
    check_same_evaluation,
    check_same_flags,
)
from transformers.trainer_evaluation import TrainerEvaluation

EXAMPLES = ROOT / "examples"


@pytest.fixture
def compared(monkeypatch):
    """Collects the values that are compared, by name, and the model, as "weights"."""
    found = {}
    monkeypatch.setattr(trainer_agreement, "check_alike", lambda given, _: found.update(given))
    monkeypatch.setattr(
        trainer_agreement, "check_same_weights", lambda model, _: found.update(weights=model)
    )
    return found


def test_settings_and_data_of_a_training_are_compared(make_trainer, compared):
    trainer = make_trainer(train=make_data(20), max_steps=2, seed=5)
    trainer.data_collator = DataCollatorForLanguageModeling(trainer.tokenizer, mlm=False)
    trainer._check_same_training(20, 2)
    expected = {
        "--seed": 5,
        "lora_r (config.json)": 4,
        "examples to train on (number)": 20,
        "updates to make": 2,
        "mlm (data collator)": False,
        "mlm_probability (data collator)": 0.15,
    }
    assert expected.items() <= compared.items()
    own = {"--output_dir", "--local_rank", "--dataloader_num_workers"}
    assert not (own | {"base_name_or_path (config.json)"}) & compared.keys()


def two_processes(**settings):
    """Stands for the arguments of a run with two processes."""
    return SimpleNamespace(world_size=2, process_index=0, to_dict=lambda: settings)


def test_settings_data_and_weights_of_an_evaluation_are_compared(make_trainer, compared):
    model, arguments = make_trainer().model, two_processes(bf16=True, output_dir="own")
    check_same_evaluation(
        arguments, model, about_examples("to evaluate on", 7, "0123456789abcdef0123")
    )
    assert compared["examples to evaluate on (number)"] == 7
    assert compared["examples to evaluate on (digest)"] == "0123456789abcdef"
    assert compared["--bf16"] is True
    assert "--output_dir" not in compared
    assert compared["lora_alpha (config.json)"] == model.config.lora_alpha
    assert compared["layer_norm_eps (config.json)"] == model.config.layer_norm_eps
    assert compared.pop("weights") is model
    check_same_evaluation(arguments, None, about_examples("to evaluate on", None, None))
    assert "weights" not in compared


def test_settings_of_lora_in_any_module_are_compared(compared):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    lora.add_lora(model, targets=["0"], r=2, lora_alpha=4)
    check_same_evaluation(two_processes(), model, {})
    expected = {"the LoRA scaling of 0": 2.0, "the LoRA dropout of 0": 0.0, "weights": model}
    assert compared == expected


def test_settings_without_effect_may_differ(make_trainer, compared):
    model, names = make_trainer().model, {"architectures", "initializer_range", "torch_dtype"}
    names |= {"base_name_or_path", "of another version"}
    for name in names:
        setattr(model.config, name, "another")
    check_same_evaluation(two_processes(), model, about_examples("to evaluate on", 1, None))
    assert not {f"{name} (config.json)" for name in names} & compared.keys()
    assert {"hidden_size (config.json)", "pad_token_id (config.json)"} <= compared.keys()


def test_flags_and_code_of_a_script_are_compared(compared, monkeypatch):
    of_code = []
    monkeypatch.setattr(trainer_agreement, "check_same_code", lambda *given: of_code.append(given))
    groups = (
        SimpleNamespace(model_name_or_path="own", lora_alpha=4),
        SimpleNamespace(train_file="own", mlm_probability=0.2),
    )
    check_same_flags(two_processes(seed=3, local_rank=1), *groups)
    assert compared == {"--seed": 3, "--lora_alpha": 4, "--mlm_probability": 0.2}
    assert of_code == [(0, 2)]


@pytest.mark.parametrize("script", ["text-classification/run_glue", "language-modeling/run_mlm"])
def test_scripts_compare_flags_before_they_read_anything(monkeypatch, tmp_path, script):
    """The model does not exist, and the comparison still comes first."""

    def compare(args, *groups):
        raise LookupError({name for group in groups for name in vars(group)})

    path = EXAMPLES / f"{script}.py"
    found = runpy.run_path(str(path))
    monkeypatch.setattr(script_module, "check_same_flags", compare)
    monkeypatch.setitem(found["main"].__globals__, "check_same_flags", compare)
    argv = ["--output_dir", str(tmp_path), "--do_train", "--model_name_or_path", "nowhere"]
    with pytest.raises(LookupError) as caught:
        found["main"]([*argv, "--train_file", "nothing.json"])
    assert {"model_name_or_path", "estimate"} <= caught.value.args[0]


def test_processes_compare_their_training_before_they_join(make_trainer, monkeypatch):
    def compare(trainer, *given):
        raise LookupError(*given)

    monkeypatch.setattr(Trainer, "_check_same_training", compare)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(LookupError) as caught:
        make_trainer().train()
    assert caught.value.args == (20, 6)  # examples, and the updates of two epochs


def test_training_compares_the_evaluation_set_that_it_will_use(make_trainer, monkeypatch):
    compared = []
    monkeypatch.setattr(
        trainer_module, "check_same_settings", lambda args, model, others: compared.append(others)
    )
    trainer = make_trainer(evaluation_strategy="epoch")
    trainer._check_same_training(20, 3)
    make_trainer()._check_same_training(20, 3)
    evaluating, not_evaluating = compared
    assert evaluating["updates to make"] == not_evaluating["updates to make"] == 3
    numbers = {name: value for name, value in evaluating.items() if name.endswith("(number)")}
    assert numbers == {
        "examples to train on (number)": 20,
        "examples to evaluate on (number)": len(trainer.eval_dataset),
    }
    assert [n for n in not_evaluating if n.startswith("examples")] == [
        "examples to train on (number)",
        "examples to train on (digest)",
    ]


@pytest.fixture
def compared_evaluations(monkeypatch):
    """Collects what evaluations compare; only this comparison sees two processes."""
    found = []
    compare = TrainerEvaluation._check_same_evaluation

    def check(trainer, dataset):
        args = trainer.args
        trainer.args = SimpleNamespace(world_size=2)
        compare(trainer, dataset)
        trainer.args = args

    monkeypatch.setattr(TrainerEvaluation, "_check_same_evaluation", check)
    monkeypatch.setattr(
        trainer_evaluation, "check_same_evaluation", lambda args, *given: found.append(given)
    )
    return found


def test_the_digest_of_a_set_is_computed_once(make_trainer, compared_evaluations, monkeypatch):
    digested = []
    monkeypatch.setattr(table_digest, "table_digest", lambda data: digested.append(data))
    trainer = make_trainer()
    for data in (None, None, make_data(3)):
        trainer.evaluate(data)
    assert [len(data) for data in digested] == [len(trainer.eval_dataset), 3]
    numbers = [given[1]["examples to evaluate on (number)"] for given in compared_evaluations]
    assert numbers == [*[len(trainer.eval_dataset)] * 2, 3]


def test_one_process_computes_no_digest(make_trainer, monkeypatch):
    """Computing it takes seconds for a large set."""
    monkeypatch.setattr(table_digest, "table_digest", None)
    make_trainer(max_steps=1, save_strategy="no").train()


def test_weights_are_compared_only_before_training(make_trainer, compared_evaluations):
    """After training, they may differ in rounding, if the machines' processors differ."""
    trainer = make_trainer(max_steps=1)
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    assert [given[0] for given in compared_evaluations] == [trainer.model, None, None]


def test_all_processes_have_the_first_process_s_metrics(make_trainer, monkeypatch):
    def of_process_0(value, world_size):
        is_metrics = isinstance(value, dict) and "eval_runtime" in value
        return [{**value, "eval_runtime": -1.0}] if is_metrics else [value]

    monkeypatch.setattr(trainer_evaluation, "gather_objects", of_process_0)
    assert make_trainer().evaluate()["eval_runtime"] == -1.0


def test_a_checkpoint_that_the_first_process_does_not_find_is_an_error(tmp_path, monkeypatch):
    """A trainer_state.json in the output folder itself is not taken for a checkpoint's."""
    (tmp_path / "trainer_state.json").touch()
    gathered = [[None, "checkpoint-3"], [False, False]]
    monkeypatch.setattr(trainer_agreement, "gather_objects", lambda own, _: [own, *gathered.pop(0)])
    seen = []
    monkeypatch.setattr(trainer_agreement, "appears", lambda path: seen.append(path) or True)
    args = TrainingArguments(str(tmp_path))
    with pytest.raises(
        TrainingError, match=r"different last checkpoints .* \(checkpoint-3, none\)"
    ):
        agreed_checkpoint(args, None)
    assert not seen
