"""Tests the Trainer with CUDA graphs, on a simulated GPU and on a real one."""

from pathlib import Path

import pytest
import torch
from compare import assert_close_to_rounding, rounding
from encoder_options import ENCODER_TERMS, NO_DROPOUT
from simulated_gpu import GPUS, SimulatedGpu, to_cpu
from simulated_graphs import SimulatedGraphs
from trainer_runs import collate, make_data

from loralib.errors import CheckpointError
from loralib.nn.packing import PackedRows
from loralib.training.cuda_graphs import fill_up
from transformers import (
    DebertaV2ForQuestionAnswering,
    RobertaConfig,
    RobertaForCausalLM,
    RobertaForMaskedLM,
    RobertaForMultipleChoice,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.fine_tuning import script
from transformers.modeling_losses import IGNORED_LABEL
from transformers.trainer_pt_utils import LabelSmoother

FAMILIES = ("roberta", "deberta")
# Ten updates, each by a gradient that rounds as often as an encoder's output.
TERMS = 10 * ENCODER_TERMS
SLOW = {"logging_steps": 1, "learning_rate": 1e-3}


def trained_by(trainer):
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    trained = {n: to_cpu(p) for n, p in trainer.model.named_parameters() if p.requires_grad}
    return losses, trained


def assert_same_training(found, expected, dtype=torch.float32):
    """Compares losses and trained parameters, as `trained_by` returns them, up to rounding."""
    losses, parameters = expected
    assert found[0] == pytest.approx(losses, abs=rounding(max(1, *losses), TERMS, dtype))
    for name, parameter in parameters.items():
        difference = (found[1][name] - parameter).norm()
        assert difference <= rounding(parameter.norm(), TERMS, dtype), name


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("roberta", {}),
        ("deberta", {}),
        ("roberta", {"fp16": True}),
        ("deberta", {"gradient_accumulation_steps": 2}),
    ],
)
@pytest.mark.parametrize("kind", GPUS)
def test_training_is_that_without_graphs(make_trainer, lora_classifier, kind, family, how):
    how = {**SLOW, "max_grad_norm": 1.0, **how}

    def run(**more):
        return trained_by(make_trainer(lora_classifier(family, **NO_DROPOUT), **how, **more))

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
    assert_same_training((ours, trained), (losses, expected), dtype)


@pytest.mark.parametrize(
    ("family", "settings"), [("roberta", {}), ("deberta", {"lora_variant": "dora"})]
)
def test_evaluations_and_checkpoints_between_steps(make_trainer, lora_classifier, family, settings):
    often = dict.fromkeys(("eval_steps", "save_steps"), 2)
    often |= dict.fromkeys(("evaluation_strategy", "save_strategy"), "steps")
    with SimulatedGpu(), SimulatedGraphs() as graphs:
        model = lora_classifier(family, **settings)
        trainer = make_trainer(
            model, cuda_graphs=True, max_steps=4, load_best_model_at_end=True, **often
        )
        trainer.train()
        assert graphs.replays == 4
        trainer.train()  # after the best weights were loaded
        assert graphs.replays == 8


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", [RobertaForMaskedLM, RobertaForTokenClassification])
def test_labels_of_tokens_are_filled_with_ignored_ones(kind, smoothing):
    config = RobertaConfig(60, 32, 2, 4, 48, max_position_embeddings=72, type_vocab_size=1)
    model = kind(config).eval()
    ids = torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([9, 4, 1, 7])[:, None]).long()
    labels = (ids % 2).masked_fill((mask == 0) | (ids % 3 == 0), IGNORED_LABEL)
    rows = PackedRows(mask).with_targets(labels != IGNORED_LABEL)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, "packed_rows": rows}
    filled = fill_up(batch, {"labels": IGNORED_LABEL}, config.longest_sequence)
    assert filled["packed_rows"].is_filled

    def loss(batch):
        if not smoothing:
            return model(**batch).loss
        labels = batch["labels"]
        return LabelSmoother(smoothing)(model(**{**batch, "labels": None}), labels)

    assert_close_to_rounding(loss(filled), loss(batch), ENCODER_TERMS)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_learned_as_without_graphs(make_trainer, lora_classifier, family):
    """The added row has a score as well, which must not count."""

    def run(**more):
        model = lora_classifier(family, num_labels=1, **NO_DROPOUT)
        return trained_by(make_trainer(model, train=make_data(20, scores=True), **SLOW, **more))

    with SimulatedGpu(), SimulatedGraphs() as graphs:
        expected = run()
        assert graphs.replays == 0
        found = run(cuda_graphs=True)
        assert graphs.replays == 10  # batches
    assert_same_training(found, expected)


def collate_spans(rows):
    """The third token answers, up to the last one; some answers end beyond their row."""
    batch = collate(rows)
    lengths = batch["attention_mask"].sum(1)
    ends = (lengths - 1).where(lengths % 3 != 0, 60)
    return {**batch, "start_positions": lengths.clamp(max=2), "end_positions": ends}


@pytest.mark.parametrize("kind", [RobertaForQuestionAnswering, DebertaV2ForQuestionAnswering])
def test_answers_are_learned_as_without_graphs(make_trainer, make_classifier, kind):
    """An answer of the added row must not count, as one that is not in its row does not."""
    family = "roberta" if kind is RobertaForQuestionAnswering else "deberta"
    settings = make_classifier(family, **NO_DROPOUT).config
    rows = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in make_data(20)]

    def run(**more):
        torch.manual_seed(0)
        trainer = make_trainer(kind(settings), train=rows, **SLOW, **more)
        trainer.data_collator = collate_spans
        return trained_by(trainer)

    with SimulatedGpu(), SimulatedGraphs() as graphs:
        losses, _ = run()
        found, _ = run(cuda_graphs=True)
        assert graphs.replays == 10  # batches
    # Not weights: those without a gradient, such as the keys' biases, follow its rounding in Adam.
    assert found == pytest.approx(losses, abs=rounding(max(losses), TERMS))


@pytest.mark.parametrize(("began", "goes_on"), [(True, False), (False, True)])
def test_a_run_goes_on_as_it_began(make_trainer, lora_classifier, tmp_path, caplog, began, goes_on):
    """One with graphs may go on without: they may turn out to take too much memory."""
    checkpoint = str(tmp_path / "out" / "checkpoint-3")
    often = {"save_strategy": "steps", "save_steps": 3}
    with SimulatedGpu(), SimulatedGraphs():
        make_trainer(lora_classifier("roberta"), cuda_graphs=began, **often).train()
        trainer = make_trainer(lora_classifier("roberta"), cuda_graphs=goes_on)
        trainer.args.cuda_graphs = trainer._uses_graphs(checkpoint)
        if began:
            trainer.checkpoints._check_same_run(Path(checkpoint), trainer.model)
            assert "the run began with CUDA graphs, and goes on without" in caplog.text
        else:
            with pytest.raises(CheckpointError, match="--cuda_graphs False, but this run has True"):
                trainer.checkpoints._check_same_run(Path(checkpoint), trainer.model)
        trainer = make_trainer(lora_classifier("roberta"))
        assert trainer._uses_graphs(checkpoint) == began
    on_cpu = make_trainer(lora_classifier("roberta"), no_cuda=True)
    on_cpu.args.cuda_graphs = on_cpu._uses_graphs(checkpoint)
    assert not on_cpu.args.cuda_graphs
    on_cpu.checkpoints._check_same_run(Path(checkpoint), on_cpu.model)


def test_scripts_use_graphs_by_default(make_trainer, lora_classifier, caplog):
    """A Trainer of one's own has to be asked: its hooks would not be run."""
    caplog.set_level("INFO")
    with SimulatedGpu(), SimulatedGraphs() as graphs:
        trainer = make_trainer(lora_classifier("roberta"), max_steps=2, log_level="info")
        trainer.args.graphs_by_default = True
        trainer.train()
        assert graphs.replays == 2
        assert "CUDA graphs    used; --no_cuda_graphs turns them off" in caplog.text
        for model, cls, settings in (
            (lora_classifier("roberta"), Trainer, {"cuda_graphs": False}),
            (lora_classifier("roberta"), OwnLoss, {}),
            (lora_classifier("roberta", reg_loss_wgt=1.0), Trainer, {}),
            (lora_classifier("roberta"), Trainer, {"gradient_checkpointing": True}),
            (lora_classifier("roberta", gradient_checkpointing=True), Trainer, {}),
        ):
            trainer = make_trainer(model, cls, **settings)
            trainer.args.graphs_by_default = True
            assert not trainer._uses_graphs(None)
        assert not make_trainer(lora_classifier("roberta"))._uses_graphs(None)


def test_a_run_leaves_the_arguments_as_they_are(make_trainer, lora_classifier):
    with SimulatedGpu(), SimulatedGraphs() as graphs:
        trainer = make_trainer(lora_classifier("roberta"), max_steps=1)
        trainer.args.graphs_by_default = True
        trainer.train()
        assert graphs.replays == 1
        assert trainer.args.cuda_graphs is None
        trainer.args.torch_compile = True  # which does not go together with graphs
        assert not trainer._uses_graphs(None)


def test_scripts_say_that_they_are_scripts(tmp_path):
    seen = []
    flags = ["--output_dir", str(tmp_path)]
    script.start(flags, None, (), fine_tune=seen.append, estimate=seen.append)
    assert [args.graphs_by_default for args in seen] == [True]
    assert not TrainingArguments(str(tmp_path)).graphs_by_default


class Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def test_an_interrupted_run_keeps_no_graphs(make_trainer, lora_classifier):
    """Their memory is freed, and a later step of the caller's own is not run by them."""
    with SimulatedGpu(), SimulatedGraphs() as graphs:
        trainer = make_trainer(
            lora_classifier("roberta"), cuda_graphs=True, callbacks=[Interrupt()]
        )
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    assert graphs.replays == 1
    assert trainer._graphs is None


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        return super().compute_loss(model, inputs, return_outputs) * 2


def test_a_subclass_with_its_own_loss_trains_without_graphs(make_trainer, lora_classifier, caplog):
    caplog.set_level("INFO")
    settings = {"cuda_graphs": True, "max_steps": 2, "log_level": "info"}
    with SimulatedGpu(), SimulatedGraphs() as graphs:
        make_trainer(lora_classifier("roberta"), OwnLoss, **settings).train()
    assert graphs.recorded == 0
    assert "training" in caplog.text
    assert "CUDA graphs    used" not in caplog.text
    assert "OwnLoss has its own training step or loss, which is run without" in caplog.text


@pytest.mark.parametrize(("settings", "shown"), [({}, True), ({"reg_loss_wgt": 1.0}, False)])
def test_a_run_that_could_use_graphs_says_so(
    make_trainer, lora_classifier, caplog, settings, shown
):
    caplog.set_level("INFO")
    with SimulatedGpu(), SimulatedGraphs():
        model = lora_classifier("roberta", **settings)
        make_trainer(model, max_steps=1, log_level="info").train()
        assert ("faster with" in caplog.text) == shown
        caplog.clear()
        if shown:
            make_trainer(model, cuda_graphs=True, max_steps=1, log_level="info").train()
            assert "training" in caplog.text
            assert "faster with" not in caplog.text


def test_a_subclass_with_its_own_loss_is_not_told_of_graphs(make_trainer, lora_classifier, caplog):
    caplog.set_level("INFO")
    with SimulatedGpu():
        make_trainer(lora_classifier("roberta"), OwnLoss, max_steps=1, log_level="info").train()
    assert "training" in caplog.text
    assert "faster with" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_checkpointing": True}, "--cuda_graphs and --gradient_checkpointing do not go"),
        ({"torch_compile": True}, "--cuda_graphs and --torch_compile do not go together"),
    ],
)
def test_settings_that_do_not_go_with_graphs(make_trainer, lora_classifier, settings, message):
    with SimulatedGpu(), pytest.raises(ValueError, match=f"^{message}"):
        make_trainer(lora_classifier("roberta"), cuda_graphs=True, **settings).train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output_attentions": True}, "--cuda_graphs does not support output_attentions"),
        ({"is_decoder": True}, "--cuda_graphs does not support output_attentions and is_decoder"),
    ],
)
def test_models_that_do_not_go_with_graphs(make_trainer, lora_classifier, settings, message):
    with SimulatedGpu(), pytest.raises(ValueError, match=f"^{message}"):
        make_trainer(lora_classifier("roberta", **settings), cuda_graphs=True).train()


@pytest.mark.parametrize("kind", [RobertaForMultipleChoice, RobertaForCausalLM])
def test_heads_that_do_not_go_with_graphs(make_trainer, kind):
    model = kind(RobertaConfig(60, 32, 2, 4, 48))
    message = "--cuda_graphs does not support multiple choice and causal language models"
    with SimulatedGpu(), pytest.raises(ValueError, match=f"^{message}"):
        make_trainer(model, cuda_graphs=True).train()


class OwnForward(RobertaForSequenceClassification):
    def forward(self, labels=None, packed_rows=None, **inputs):
        logits = super().forward(packed_rows=packed_rows, **inputs).logits
        return {"loss": (logits.squeeze(-1) - labels).abs().mean(), "logits": logits}


def test_a_forward_of_ones_own_does_not_learn_scores_with_graphs(make_trainer):
    """It would count the filler row's score."""
    model = OwnForward(RobertaConfig(60, 32, 2, 4, 48, num_labels=1))
    message = "--cuda_graphs does not support a forward of your own that learns scores"
    with SimulatedGpu(), pytest.raises(ValueError, match=f"^{message}"):
        make_trainer(model, cuda_graphs=True).train()


def test_unused_parameters_are_not_looked_for_with_graphs(
    make_trainer, lora_classifier, monkeypatch
):
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    more = {"cuda_graphs": True, "ddp_find_unused_parameters": True}
    message = "--cuda_graphs and --ddp_find_unused_parameters do not go together"
    with SimulatedGpu(), pytest.raises(ValueError, match=f"^{message}"):
        make_trainer(lora_classifier("roberta"), **more).train()


def test_consistency_training_does_not_go_with_graphs(make_trainer, lora_classifier):
    with SimulatedGpu(), pytest.raises(ValueError, match="--cuda_graphs and consistency training"):
        make_trainer(lora_classifier("roberta", reg_loss_wgt=1.0), cuda_graphs=True).train()


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
