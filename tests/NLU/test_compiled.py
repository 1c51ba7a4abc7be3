"""torch.compile of both encoders: a forward pass with its loss is one graph, and so is a layer.

`--torch_compile` compiles each layer. The tests use backends that need no compiler.
"""

import copy

import pytest
import torch
from compare import assert_close_to_rounding, assert_same_bits, error_of
from compiled import compile_layers, flash_on_cpu, gradients_of, graph_breaks
from encoder_options import ENCODER_TERMS
from trainer_runs import make_data, trained

from loralib.errors import CheckpointError
from loralib.nn.fast_paths import fast_paths_off
from loralib.training import compiled
from loralib.training.precision import cast_frozen
from transformers import TrainerCallback
from transformers.data.data_collator import PackedCollator
from transformers.models.deberta_v2 import modeling_deberta_v2
from transformers.trainer_data import EpochBatches
from transformers.weight_files import read_weights

pytestmark = pytest.mark.slow

FAMILIES = ("roberta", "deberta")
LORA = {"apply_lora": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.1}
STEADY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "lora_dropout": 0.0}
LENGTHS = ([7, 5, 12], [9, 9, 3, 8], [4, 14], [6, 2, 3, 5, 11])


@pytest.fixture
def model_of(make_classifier):
    def make(family, **settings):
        settings = {"num_labels": 3, "pad_token_id": 1, **LORA, **settings}
        model = make_classifier(family, **settings).train()
        model.train_only(("lora",))
        return model

    return make


def batch_of(lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    batch = {
        "input_ids": torch.randint(5, 60, mask.shape, generator=generator),
        "attention_mask": mask,
        "labels": torch.randint(3, (len(lengths),), generator=generator),
    }
    return PackedCollator(lambda _: batch)([])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_pass_is_one_graph(model_of, monkeypatch, family):
    """As on a GPU, to which DeBERTa copies its table of distances once."""
    monkeypatch.setattr(modeling_deberta_v2, "_FROM_PINNED_MEMORY", ("cpu",))
    model = model_of(family)
    assert graph_breaks(lambda batch: model(**batch).loss, batch_of([7, 4, 11])) == []


def test_a_forward_pass_in_half_precision_is_one_graph(model_of):
    """Under autocast, with frozen weights in half precision, and without a GPU."""
    model = model_of("deberta")
    cast_frozen(model, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert graph_breaks(lambda batch: model(**batch).loss, batch_of([7, 4, 11])) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_one_graph_for_any_number_of_tokens(make_trainer, model_of, family):
    """There are two: the first layer's, whose input needs no gradient, and the second's.

    DDP is warmed up with a batch that has the graphs of all others.
    """
    expected = model_of(family, **STEADY)
    model = copy.deepcopy(expected)
    loader = make_trainer(model, train=make_data(9)).get_train_dataloader()
    graphs = compile_layers(model.base_model.encoder.layer)
    warm_up = EpochBatches(loader, 0, torch.device("cpu"), step_size=4).example()
    assert len(warm_up["labels"]) == 2
    for batch in (warm_up, *map(batch_of, LENGTHS)):
        ours, theirs = (network(**batch).loss for network in (model, expected))
        assert_close_to_rounding(ours, theirs, ENCODER_TERMS)
        found, wanted = gradients_of(model, ours), gradients_of(expected, theirs)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert_close_to_rounding(found[name], gradient, ENCODER_TERMS)
        assert len(graphs) == 2


def test_half_precision_has_as_few_graphs(model_of):
    """Under autocast, with frozen weights in half precision."""
    eager = model_of("deberta", **STEADY)
    cast_frozen(eager, torch.bfloat16)
    model, half = copy.deepcopy(eager), torch.autocast("cpu", torch.bfloat16)
    graphs = compile_layers(model.base_model.encoder.layer)
    for lengths in LENGTHS:
        with half, fast_paths_off():
            theirs = eager(**batch_of(lengths)).loss
        with half:
            ours = model(**batch_of(lengths)).loss
        found, wanted = gradients_of(model, ours), gradients_of(eager, theirs)
        assert error_of(found, wanted) < 0.02  # successive products round by 2^-9 each
        assert len(graphs) == 2


def test_a_layer_with_a_gpus_attention_is_one_graph(model_of):
    """In bfloat16, with packed rows whose lengths, and the longest, change from batch to batch."""
    eager = model_of("roberta", hidden_size=32, **STEADY).bfloat16()
    model = copy.deepcopy(eager)
    with flash_on_cpu() as longest:
        graphs = compile_layers(model.base_model.encoder.layer)
        for lengths in LENGTHS:
            longest.clear()
            ours, theirs = (network(**batch_of(lengths)).loss for network in (model, eager))
            assert longest == [max(lengths)] * 4  # two layers, twice
            assert torch.equal(ours, theirs)
            assert_same_bits(gradients_of(model, ours), gradients_of(eager, theirs))
            assert len(graphs) == 2


class Stopped(TrainerCallback):
    """Ends a run after its third update, as if it were killed."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_run_trains_and_resumes_as_an_uncompiled_one(
    make_trainer, model_of, tmp_path, monkeypatch, family
):
    """With evaluations between the updates, and a last batch of one row."""
    torch.compiler.reset()
    monkeypatch.setattr(compiled, "_BACKEND", "eager")
    data = make_data(9)
    settings = {"max_steps": 5, "logging_steps": 1, "save_strategy": "steps", "save_steps": 3}
    settings |= {"evaluation_strategy": "steps", "eval_steps": 2, "train": data}

    def run(name, checkpoint=None, **more):
        out = str(tmp_path / name)
        model = model_of(family, num_hidden_layers=1, **STEADY)
        trainer = make_trainer(model, output_dir=out, **settings, **more)
        trainer.train(checkpoint)
        return trainer

    plain, whole = run("plain"), run("whole", torch_compile=True)
    for ours, theirs in zip(whole.state.log_history, plain.state.log_history, strict=True):
        for name in {"loss", "eval_loss"} & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3)
    checkpoints = [str(tmp_path / name / "checkpoint-3") for name in ("whole", "plain")]
    names = [read_weights(folder).keys() for folder in checkpoints]
    assert names[0] == names[1]
    assert not any("_orig_mod" in name for name in names[0])

    if family == "deberta":  # resuming does not depend on the family
        return
    run("killed", torch_compile=True, callbacks=[Stopped])
    again = run("killed", str(tmp_path / "killed" / "checkpoint-3"), torch_compile=True)
    assert_same_bits(trained(again.model), trained(whole.model))
    with pytest.raises(CheckpointError, match="with --torch_compile False, but this run has True"):
        run("again", checkpoints[1], torch_compile=True)


def test_models_of_other_packages_are_refused(make_trainer):
    with pytest.raises(ValueError, match="--torch_compile needs a model of this package"):
        make_trainer(torch.nn.Linear(2, 2), torch_compile=True)


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel])
def test_a_wrapped_model_is_refused(make_trainer, model_of, wrap):
    """Its checkpoints would have no config.json."""
    with pytest.raises(ValueError, match=r"wraps the model.*--torch_compile compiles it"):
        make_trainer(wrap(model_of("roberta")))
