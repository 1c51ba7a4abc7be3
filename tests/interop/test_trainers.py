"""LoRA in the training loops of Transformers' Trainer, Accelerate and Lightning."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from models import BY_NAME, Batch, Case
from ours import assert_close, with_lora
from test_experts import build as build_experts
from theirs import adapter_of
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader

import loralib as lora
import transformers

STEPS, RATE = 4, 0.1
NAMES = ("llama", "gpt2")  # the second of which has tied weights


def batch_of(case: Case) -> Batch:
    """The case's tokens with labels, without padding."""
    ids = case.batch()["input_ids"]
    return {"input_ids": ids, "labels": ids}


def states_by_hand(case: Case, variant: str = "lora") -> Iterator[tuple[str, Tensor]]:
    """Trains in a plain PyTorch loop; yields each tensor of the adapter after each step."""
    model = with_lora(case, variant)
    optimizer = torch.optim.SGD(lora.parameter_groups(model, lr=RATE))
    for _ in range(STEPS):
        model(**batch_of(case)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield from ((name, each.detach().clone()) for name, each in adapter_of(model).items())


def trained_by_hand(case: Case, variant: str = "lora") -> dict[str, Tensor]:
    """The adapter after the last step of `states_by_hand`."""
    return dict(states_by_hand(case, variant))


def assert_trained_as(model: nn.Module, expected: dict[str, Tensor], start: nn.Module) -> None:
    """Asserts that a model's adapter was trained to `expected`, up to the rounding of sums."""
    own, before = adapter_of(model), adapter_of(start)
    assert own.keys() == expected.keys()
    for name, tensor in expected.items():
        moved = (tensor - before[name]).detach()
        assert_close((own[name] - before[name]).detach(), moved, 1e-3, name)


# ------------------------------------------------------------------------------------------------
# Transformers' Trainer
# ------------------------------------------------------------------------------------------------


class SavesAdapter(transformers.TrainerCallback):
    """Saves the adapter in each checkpoint's folder."""

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Called with the model as it was given."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        lora.save_adapter(model, folder / "adapter.safetensors")


def trainer_of(model: nn.Module, batch: Batch, folder: Path, **options: Any) -> Any:
    """A Trainer whose batches are all the same, with a checkpoint after each step."""
    rows = [{name: value[row] for name, value in batch.items()} for row in range(2)]
    given = {"max_steps": STEPS, "save_steps": 1, "learning_rate": RATE, "logging_steps": 1}
    given |= {"lr_scheduler_type": "constant", "max_grad_norm": 0, "optim": "sgd"}
    given |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 0}
    given |= {"per_device_train_batch_size": 2} | options
    arguments = transformers.TrainingArguments(str(folder), **given)
    return transformers.Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[SavesAdapter()]
    )


OPTIONS = {
    "plain": {},
    "checkpointed": {"gradient_checkpointing": True},
    "checkpointed, reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("name", ["llama", "qwen2"])  # with GPT-2, it counts first tokens as well
def test_the_trainer_trains_as_a_pytorch_loop(name: str, options: dict[str, Any], tmp_path: Path):
    case = BY_NAME[name]
    model = with_lora(case)
    trainer_of(model, batch_of(case), tmp_path, **options).train()
    assert_trained_as(model, trained_by_hand(case), with_lora(case))


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_resumes(name: str, optim: str, tmp_path: Path):
    case = BY_NAME[name]
    trainer = trainer_of(with_lora(case), batch_of(case), tmp_path, optim=optim)
    trainer.train()
    resumed = trainer_of(with_lora(case), batch_of(case), tmp_path, optim=optim)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for ours, theirs in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_loads_the_best_checkpoint_at_the_end(name: str, tmp_path: Path):
    case = BY_NAME[name]
    options = {"load_best_model_at_end": True, "greater_is_better": True}  # the first step's
    options |= {"eval_strategy": "steps", "eval_steps": 1}
    trainer = trainer_of(with_lora(case), batch_of(case), tmp_path, **options)
    trainer.train()
    losses = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
    assert losses[0] == max(losses) > losses[-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("with_adapter", [True, False])
def test_a_trainer_resumes_experts_only_with_their_adapter(with_adapter: bool, tmp_path: Path):
    """Mixtral's checkpoints have other names than the model, so that the Trainer loads no LoRA."""

    def build() -> nn.Module:
        model = build_experts("mixtral").train()
        torch.manual_seed(0)
        lora.add_lora(model, ["q_proj", "experts.down_proj"], r=2)
        return model

    batch = batch_of(BY_NAME["llama"])
    trainer = trainer_of(build(), batch, tmp_path)
    trainer.train()
    model, checkpoint = build(), tmp_path / "checkpoint-2"
    if with_adapter:
        lora.load_adapter(model, checkpoint / "adapter.safetensors")
    trainer_of(model, batch, tmp_path).train(resume_from_checkpoint=str(checkpoint))
    own, expected = lora.lora_state_dict(model), lora.lora_state_dict(trainer.model)
    assert all(torch.equal(own[name], each) for name, each in expected.items()) is with_adapter


# ------------------------------------------------------------------------------------------------
# Accelerate
# ------------------------------------------------------------------------------------------------


def test_accelerate_saves_its_state_and_loads_it(tmp_path: Path):
    case = BY_NAME["llama"]
    accelerator = accelerate.Accelerator(cpu=True)
    model = with_lora(case)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(lora.parameter_groups(model, lr=RATE))
    )

    def step() -> None:
        accelerator.backward(model(**batch_of(case)).loss)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(STEPS):
        if number == 2:
            accelerator.save_state(tmp_path / "state")
        step()
    plain = accelerator.unwrap_model(model)
    assert_trained_as(plain, trained_by_hand(case), with_lora(case))
    first = {name: each.clone() for name, each in lora.lora_state_dict(model).items()}
    accelerator.load_state(tmp_path / "state")
    for _ in range(2):
        step()
    again = lora.lora_state_dict(model)
    assert all(torch.equal(again[name], each) for name, each in first.items())


# ------------------------------------------------------------------------------------------------
# Lightning
# ------------------------------------------------------------------------------------------------

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    """A Lightning module around a model with LoRA."""

    def __init__(self, case: Case, manual: bool = False, variant: str = "lora"):
        super().__init__()
        self.model, self.automatic_optimization = with_lora(case, variant), not manual

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The loss; with manual optimization, also takes a step."""
        loss = self.model(**batch).loss
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        """Logs the loss."""
        self.log("loss", self.model(**batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD on what is trained."""
        return torch.optim.SGD(lora.parameter_groups(self.model, lr=RATE))


class SavesLoraOnly(Module):
    """A module whose checkpoints hold only LoRA."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leaves the base out."""
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: t for name, t in state.items() if "lora_" in name}


def lightning_of(folder: Path, **options: Any) -> lightning.Trainer:
    """A quiet Trainer of four steps."""
    given = {"max_steps": STEPS, "accelerator": "cpu", "logger": False} | options
    return lightning.Trainer(
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, **given
    )


def loader_of(case: Case) -> DataLoader:
    """The same batch for each step."""
    return DataLoader([batch_of(case)] * STEPS, batch_size=None)


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_lightning_trains_as_a_pytorch_loop(manual: bool, variant: str, tmp_path: Path):
    case = BY_NAME["llama"]
    module = Module(case, manual, variant)
    trainer = lightning_of(tmp_path, enable_checkpointing=False)
    trainer.fit(module, loader_of(case))
    expected = trained_by_hand(case, variant)
    assert_trained_as(module.model, expected, with_lora(case, variant))
    before = trainer.validate(module, loader_of(case), verbose=False)[0]["loss"]
    lora.merge(module.model)
    after = trainer.validate(module, loader_of(case), verbose=False)[0]["loss"]
    assert after == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize("kind", [Module, SavesLoraOnly])
def test_lightning_resumes(kind: type[Module], tmp_path: Path):
    case = BY_NAME["llama"]
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1)
    saving.save_top_k = -1
    module, resumed = kind(case), kind(case)
    for each in lora.lora_state_dict(resumed.model).values():
        each.detach().zero_()
    lightning_of(tmp_path, callbacks=[saving]).fit(module, loader_of(case))
    lightning_of(tmp_path).fit(resumed, loader_of(case), ckpt_path=str(tmp_path / "step=2.ckpt"))
    own, expected = resumed.state_dict(), module.state_dict()
    assert all(torch.equal(own[name], each) for name, each in expected.items())


def test_lightning_averages_weights(tmp_path: Path):
    case = BY_NAME["llama"]
    module = Module(case)
    averaging = WeightAveraging(avg_fn=get_ema_avg_fn(0.5))
    trainer = lightning_of(tmp_path, callbacks=[averaging], enable_checkpointing=False)
    trainer.fit(module, loader_of(case), loader_of(case))
    averages: dict[str, Tensor] = {}
    for name, tensor in states_by_hand(case):
        averages[name] = (averages.get(name, tensor) + tensor) / 2
    assert_trained_as(module.model, averages, with_lora(case))
    of_averages = with_lora(case, adapter=averages).eval()
    loss = of_averages(**batch_of(case)).loss.item()
    assert trainer.callback_metrics["loss"].item() == pytest.approx(loss, rel=1e-5)
