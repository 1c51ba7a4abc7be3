"""`--estimate`: counts what a run of the Trainer takes before it begins.

It counts the Trainer's own steps (see loralib.training.step_cost). No weights are read, because a
model's settings define its shapes. The settings of the paper's models are in this package.
"""

import copy
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from loralib.training.estimate import (
    SETTINGS,
    Estimate,
    Plan,
    check_settings,
    estimate,
    notable_batches,
    rate_of,
)
from loralib.training.precision import Precision, estimate_precision
from loralib.training.step_cost import Training

from .configuration_utils import PretrainedConfig
from .hf_argparser import flag
from .modeling_utils import PreTrainedModel
from .trainer import Trainer
from .trainer_data import TrainingBatches, lengths_of
from .training_args import TrainingArguments

# The paper's models -> the model family whose folder has their settings.
_PUBLISHED = {
    "roberta-base": "roberta",
    "roberta-large": "roberta",
    "microsoft/deberta-v2-xxlarge": "deberta_v2",
}


@dataclass
class EstimateArguments:
    """The flags of --estimate."""

    estimate: bool = flag(False, SETTINGS["estimate"])
    estimate_devices: int | None = flag(None, SETTINGS["estimate_devices"])
    estimate_rate: str | None = flag(None, SETTINGS["estimate_rate"])
    estimate_length: int | None = flag(None, SETTINGS["estimate_length"])

    def __post_init__(self) -> None:
        check_settings(self)


def published_settings(name: str) -> str | None:
    """Returns the settings file of one of the paper's models, or None for others and folders."""
    if name not in _PUBLISHED or Path(name).exists():
        return None
    folder = Path(__file__).parent / "models" / _PUBLISHED[name] / "published"
    return str(folder / f"{name.rpartition('/')[2]}.json")


def estimate_run(
    build_model: Callable[[PretrainedConfig], PreTrainedModel],
    config: PretrainedConfig,
    args: TrainingArguments,
    estimate_args: EstimateArguments,
    dataset: Any,
    collator: Callable[[list[Any]], dict[str, Any]],
    counted: bool = True,
) -> Estimate:
    """Returns what training takes.

    Args:
        build_model: makes a model from settings, in which only the parameters to train require
            gradients.
        config: the model's settings.
        args: the run's settings.
        estimate_args: the number of devices and the rate.
        dataset: examples with "input_ids" and "attention_mask".
        collator: makes batches of them.
        counted: whether `dataset` has as many examples as the training set.
    """
    with _without_output(args) as own:
        devices = estimate_args.estimate_devices or own.world_size
        sharing = devices if counted else 1  # else, the set is one device's batch
        # One process with the batches of all devices, see `TrainingBatches`.
        batches = TrainingBatches(
            len(dataset),
            args.train_batch_size * sharing,
            args.seed,
            drop_last=args.dataloader_drop_last,
            lengths=lengths_of(dataset) if args.group_by_length else None,
        )
        an_update, epochs = args.gradient_accumulation_steps, 1
        steps = args.max_steps if args.max_steps > 0 else None
        total = None if steps is None else steps * an_update
        if counted:
            steps = args.updates_of(len(batches))
            total = args.batches_of(steps, len(batches))
            an_update = args.batches_of(1, len(batches))
            epochs = math.ceil(total / len(batches))

        def build(layers: int | None) -> Training:
            shape = config if layers is None else _with_layers(config, layers)
            return training_of(build_model(shape), own, collator)

        def batch_of(rows: Sequence[int]) -> dict[str, Any]:
            return collator([dataset[row] for row in rows])

        plan = Plan(
            build,
            batch_of,
            *notable_batches(_epochs_of(batches, sharing, epochs), _tokens_of(dataset)),
            batches=an_update,
            steps=steps,
            total=total,
            device=own.device,
            dtype=args.compute_dtype,
            devices=devices,
            rate=rate_of(estimate_args.estimate_rate),
        )
        return estimate(plan)


def _epochs_of(
    batches: TrainingBatches, devices: int, epochs: int
) -> Iterator[Iterator[Sequence[int]]]:
    """Yields the batches of each epoch, cut into those of the devices."""
    for epoch in range(epochs):
        batches.epoch = epoch
        each = ([rows[first::devices] for first in range(devices)] for rows in batches)
        yield filter(None, chain.from_iterable(each))  # the last rows may not be enough for all


def _tokens_of(dataset: Any) -> list[int]:
    """Returns the number of tokens of every example, without padding, which is not computed."""
    rows = (row["attention_mask"] for row in dataset)
    if hasattr(dataset, "column_names"):  # read by many rows at once, which is ten times as fast
        parts = dataset.select_columns("attention_mask").iter(1000)
        rows = chain.from_iterable(part["attention_mask"] for part in parts)
    return [sum(mask if isinstance(mask[0], int) else chain.from_iterable(mask)) for mask in rows]


@contextmanager
def _without_output(args: TrainingArguments) -> Iterator[TrainingArguments]:
    """Yields the settings for steps that are only counted, which leave no files behind."""
    with tempfile.TemporaryDirectory() as folder:
        own = replace(args, output_dir=folder, report_to=["none"], fp16=False, bf16=False)
        own.torch_compile = own.cuda_graphs = False  # the counter has to see every operation
        device = own.device  # chosen before the precision, which it need not support
        own.fp16, own.bf16 = estimate_precision(args.fp16, args.bf16, device)
        yield own


def training_of(
    model: PreTrainedModel,
    args: TrainingArguments,
    collator: Callable[[list[Any]], dict[str, Any]],
) -> Training:
    """Returns the steps of the Trainer's loop, without the checks of their results."""
    trainer = Trainer(model, args, collator)
    trainer.precision = Precision(args.compute_dtype, args.device.type, scaled=False)
    trainer.create_optimizer_and_scheduler(1)
    optimizer = trainer.optimizer

    def add_gradients(batch: dict[str, Tensor]) -> None:
        trainer.training_step(trainer.model, batch)

    def update() -> None:
        trainer.precision.step(optimizer, args.max_grad_norm)
        optimizer.zero_grad(set_to_none=True)

    return Training(model, optimizer, add_gradients, update)


def _with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Returns the settings with at most `layers` layers, all of them adapted."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    if config.apply_lora:
        # LoRA's targets hardly affect a rate. Every layer has these two.
        config.lora_layers, config.lora_targets = None, ["query", "value"]
        config.lora_rank_pattern, config.lora_alpha_pattern = {}, {}
    return config
