"""`--estimate`: what a run of the Trainer takes, counted before it begins.

The Trainer's own steps are counted, see loralib.training.estimate. No weights are read: a model's
shape is in its settings, and those of the models that the paper adapts are here.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from loralib.training.estimate import (
    SETTINGS,
    Estimate,
    Plan,
    Training,
    check_settings,
    estimate,
    notable_batches,
    rate_of,
)
from loralib.training.precision import Precision, counted_half

from .configuration_utils import PretrainedConfig
from .hf_argparser import flag
from .modeling_utils import PreTrainedModel
from .trainer import Trainer
from .trainer_data import TrainingBatches, lengths_of
from .training_args import TrainingArguments

# The paper's models -> the family that has their settings.
_PUBLISHED = {
    "roberta-base": "roberta",
    "roberta-large": "roberta",
    "microsoft/deberta-v2-xxlarge": "deberta_v2",
}


@dataclass
class EstimateArguments:
    """What the run takes, before it begins."""

    estimate: bool = flag(False, SETTINGS["estimate"])
    estimate_devices: int | None = flag(None, SETTINGS["estimate_devices"])
    estimate_rate: str | None = flag(None, SETTINGS["estimate_rate"])
    estimate_length: int | None = flag(None, SETTINGS["estimate_length"])

    def __post_init__(self) -> None:
        check_settings(self)


def published_settings(name: str) -> str | None:
    """The file of settings of one of the paper's models; None for others, and for folders."""
    if name not in _PUBLISHED or Path(name).exists():
        return None
    folder = Path(__file__).parent / "models" / _PUBLISHED[name] / "published"
    return str(folder / f"{name.rpartition('/')[2]}.json")


class EqualRows(Sequence):
    """Examples in place of a set that is not read: all of one length.

    Args:
        count: how many.
        length: tokens of each.
        label: of each.
    """

    def __init__(self, count: int, length: int, label: int | float):
        self.count = count
        self.row = {"input_ids": [0] * length, "attention_mask": [1] * length, "label": label}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.row)


def estimate_run(
    build_model: Callable[[PretrainedConfig], PreTrainedModel],
    config: PretrainedConfig,
    args: TrainingArguments,
    estimate_args: EstimateArguments,
    dataset: Any,
    collator: Callable[[list[Any]], dict[str, Any]],
    counted: bool = True,
) -> Estimate:
    """What training takes.

    Args:
        build_model: makes a new model of given settings, with what is to be trained marked.
        config: the model's settings.
        args: the run's.
        estimate_args: devices and rate.
        dataset: examples with "input_ids" and "attention_mask".
        collator: makes batches of them.
        counted: the set has as many examples as the training set.
    """
    lengths = lengths_of(dataset)
    grouped, drop = lengths if args.group_by_length else None, args.dataloader_drop_last
    count, size = len(lengths), args.train_batch_size
    batches = TrainingBatches(count, size, args.seed, drop_last=drop, lengths=grouped)
    notable = notable_batches(list(batches), lengths)
    with _without_output(args) as own:
        devices = estimate_args.estimate_devices or own.world_size
        steps = args.max_steps if args.max_steps > 0 else None
        if counted:
            shared = TrainingBatches(count, size, args.seed, devices, drop_last=drop)
            steps = args.updates_of(len(shared))

        def build(layers: int | None) -> Training:
            shape = config if layers is None else _with_layers(config, layers)
            return training_of(build_model(shape), own, collator)

        def batch_of(rows: Sequence[int]) -> dict[str, Any]:
            return collator([dataset[row] for row in rows])

        plan = Plan(
            build,
            batch_of,
            *notable,
            batches=args.gradient_accumulation_steps,
            steps=steps,
            device=own.device,
            dtype=args.compute_dtype,
            devices=devices,
            rate=rate_of(estimate_args.estimate_rate),
        )
        return estimate(plan)


@contextmanager
def _without_output(args: TrainingArguments) -> Iterator[TrainingArguments]:
    """The settings for steps that are counted: nothing of them is kept."""
    with tempfile.TemporaryDirectory() as folder:
        own = replace(args, output_dir=folder, report_to=["none"], fp16=False, bf16=False)
        own.torch_compile = False  # operations are counted one by one
        device = own.device  # chosen first, so that it need not have the run's precision
        own.fp16, own.bf16 = counted_half(args.fp16, args.bf16, device)
        yield own


def training_of(
    model: PreTrainedModel,
    args: TrainingArguments,
    collator: Callable[[list[Any]], dict[str, Any]],
) -> Training:
    """The Trainer's loop, without its checks of what was computed."""
    trainer = Trainer(model, args, collator)
    trainer.precision = Precision(args.compute_dtype, args.device.type, scaled=False)
    trainer.create_optimizer_and_scheduler(1)
    optimizer = trainer.optimizer

    def add_gradients(batch: dict[str, Tensor]) -> None:
        trainer.training_step(trainer.model, batch)

    def update() -> None:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        trainer.precision.step(optimizer, trained, args.max_grad_norm)
        optimizer.zero_grad(set_to_none=True)

    return Training(model, optimizer, add_gradients, update)


def _with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The settings with fewer layers, all of them adapted."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    if config.apply_lora:
        # Which projections LoRA is in hardly changes a rate, and these are in every layer.
        config.lora_layers, config.lora_targets = None, ["query", "value"]
        config.lora_rank_pattern, config.lora_alpha_pattern = {}, {}
    return config
