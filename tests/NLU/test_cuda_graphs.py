"""Tests the Trainer with CUDA graphs, on a simulated GPU and on a real one."""

import pytest
import torch
from compare import rounding
from encoder_options import ENCODER_TERMS
from simulated_gpu import GPUS, SimulatedGpu, to_cpu
from simulated_graphs import SimulatedGraphs

from transformers import Trainer

FAMILIES = ("roberta", "deberta")
LORA = {"apply_lora": True, "lora_r": 4, "lora_alpha": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Ten updates, each by a gradient that rounds as often as an encoder's output.
TERMS = 10 * ENCODER_TERMS


@pytest.fixture
def model_of(make_classifier):
    def make(family, **settings):
        model = make_classifier(family, **{"num_labels": 2, "pad_token_id": 1, **LORA, **settings})
        model.train_only(("lora",))
        return model

    return make


def trained_by(trainer):
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    trained = {n: to_cpu(p) for n, p in trainer.model.named_parameters() if p.requires_grad}
    return losses, trained


@pytest.mark.parametrize("how", [{}, {"fp16": True}, {"gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", GPUS)
def test_training_is_that_without_graphs(make_trainer, model_of, kind, family, how):
    how = {"logging_steps": 1, "learning_rate": 1e-3, "max_grad_norm": 1.0, **how}

    def run(**more):
        return trained_by(make_trainer(model_of(family, **NO_DROPOUT), **how, **more))

    with kind():
        losses, expected = run()
        if kind is SimulatedGpu:
            with SimulatedGraphs() as graphs:
                ours, trained = run(cuda_graphs=True)
            assert graphs.replays >= 9  # batches
            assert graphs.recorded < 5
        else:
            ours, trained = run(cuda_graphs=True)
    dtype = torch.float16 if "fp16" in how else torch.float32
    assert ours == pytest.approx(losses, abs=rounding(1, TERMS, dtype))
    for name, parameter in expected.items():
        difference = (trained[name] - parameter).norm()
        assert difference <= rounding(parameter.norm(), TERMS, dtype), name


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        return super().compute_loss(model, inputs, return_outputs) * 2


def test_a_subclass_with_its_own_loss_trains_without_graphs(make_trainer, model_of, caplog):
    with SimulatedGpu(), SimulatedGraphs() as graphs:
        trainer = make_trainer(model_of("roberta"), OwnLoss, cuda_graphs=True, max_steps=2)
        trainer.train()
    assert graphs.recorded == 0
    assert "OwnLoss has its own training step or loss, which is run without" in caplog.text


@pytest.mark.parametrize(("settings", "shown"), [({}, True), ({"num_labels": 1}, False)])
def test_a_run_that_could_use_graphs_says_so(make_trainer, model_of, caplog, settings, shown):
    caplog.set_level("INFO")
    with SimulatedGpu(), SimulatedGraphs():
        model = model_of("roberta", **settings)
        make_trainer(model, max_steps=1, log_level="info").train()
        assert ("faster with" in caplog.text) == shown
        caplog.clear()
        if shown:
            make_trainer(model, cuda_graphs=True, max_steps=1, log_level="info").train()
            assert "training" in caplog.text
            assert "faster with" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_checkpointing": True}, "--cuda_graphs and --gradient_checkpointing do not go"),
        ({"torch_compile": True}, "--cuda_graphs and --torch_compile do not go together"),
    ],
)
def test_settings_that_do_not_go_with_graphs(make_trainer, model_of, settings, message):
    with SimulatedGpu(), pytest.raises(ValueError, match=f"^{message}"):
        make_trainer(model_of("roberta"), cuda_graphs=True, **settings).train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_labels": 1}, "--cuda_graphs works for classification, tagging"),
        ({"output_attentions": True}, "--cuda_graphs does not support output_attentions"),
    ],
)
def test_models_that_do_not_go_with_graphs(make_trainer, model_of, settings, message):
    with SimulatedGpu(), pytest.raises(ValueError, match=f"^{message}"):
        make_trainer(model_of("roberta", **settings), cuda_graphs=True).train()


def test_consistency_training_does_not_go_with_graphs(make_trainer, model_of):
    with SimulatedGpu(), pytest.raises(ValueError, match="--cuda_graphs and consistency training"):
        make_trainer(model_of("roberta", reg_loss_wgt=1.0), cuda_graphs=True).train()


def test_graphs_need_a_gpu(make_trainer):
    with pytest.raises(ValueError, match="--cuda_graphs needs a GPU: leave it out"):
        make_trainer(cuda_graphs=True).train()


def test_graphs_need_a_model_of_this_package(make_trainer):
    with SimulatedGpu():
        trainer = make_trainer(torch.nn.Linear(2, 2), cuda_graphs=True)
        with pytest.raises(ValueError, match="--cuda_graphs needs a model of this package"):
            trainer.train()


def test_an_evaluation_takes_the_flag_on_a_cpu(make_trainer):
    """It was trained with the flag on another machine."""
    found = make_trainer(cuda_graphs=True).evaluate()["eval_loss"]
    assert found == make_trainer().evaluate()["eval_loss"]
