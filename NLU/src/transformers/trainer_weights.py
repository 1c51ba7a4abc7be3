"""Saves and loads the Trainer's model: the full weights, and the trained parts as extra files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from loralib.adapters.adapter import Kind
from loralib.adapters.formats import (
    format_of_name,
    read_adapter,
    why_not_expressible,
    write_adapter,
)
from loralib.errors import CheckpointError, SettingsError
from loralib.io.tensors import write_torch
from loralib.training.resume import naming_damaged_file, read_state

from .adapter_kinds import KINDS, fitting_flag
from .file_utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from .modeling_utils import PreTrainedModel
from .weight_files import read_weights


def adapted_by(model: nn.Module) -> tuple[Kind, ...]:
    """Returns `PreTrainedModel.adapted_by`, or () for any other module."""
    return model.adapted_by if isinstance(model, PreTrainedModel) else ()


def save_weights(model: nn.Module, folder: Path, lora_only: bool) -> None:
    """Writes a model, and removes an earlier run's files, which would be taken for this one's.

    Args:
        model: a model of this package is written with its configuration, any other module as a
            state dict.
        folder: an existing folder.
        lora_only: write only the trained parts.
    """
    if isinstance(model, PreTrainedModel):
        _save_pretrained(model, folder, lora_only)
        return
    state = model.state_dict()
    on_cpu = {n: t.cpu() if isinstance(t, Tensor) else t for n, t in state.items()}
    write_torch(folder / WEIGHTS_NAME, on_cpu)
    _remove(folder, SAFE_WEIGHTS_NAME, *(name for kind in KINDS for name in kind.files))


def _save_pretrained(model: PreTrainedModel, folder: Path, lora_only: bool) -> None:
    if lora_only:
        _remove(folder, WEIGHTS_NAME, SAFE_WEIGHTS_NAME)
        model.config.save_pretrained(folder)
    else:
        model.save_pretrained(folder)
    for kind in KINDS:
        if kind not in model.adapted_by:
            _remove(folder, *kind.files)
    for kind in model.adapted_by:
        adapter = model.adapter(kind)
        for name in reversed(kind.files):
            if why_not_expressible(adapter, format_of_name(folder / name)) is None:
                write_adapter(folder / name, adapter)
            else:
                _remove(folder, name)


def _remove(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


def load_weights(model: nn.Module, folder: Path, device: torch.device, way_out: str) -> None:
    """Loads what `save_weights` wrote into a model: the full weights or the trained parts alone.

    Args:
        model: the model as it was built for the run.
        folder: the folder with the files.
        device: the model's device.
        way_out: for error messages, what a user can do if a file is damaged.

    Raises:
        CheckpointError: a file is damaged, or does not fit the model.
    """
    kinds = adapted_by(model)
    if kinds:
        # These files also have rank, alpha and base, which the full model's file does not.
        with _ending_with(way_out):
            adapters = [read_adapter(folder, kind) for kind in kinds]
        try:
            model.load_adapters(adapters)
        except SettingsError as error:
            # Not a SettingsError: scripts add to those the flags for a given adapter's file.
            flags = fitting_flag(error, is_resumed=True)
            raise CheckpointError(f"{error} ({flags})" if flags else f"{error}") from error
        if not (folder / WEIGHTS_NAME).is_file() and not (folder / SAFE_WEIGHTS_NAME).is_file():
            return
    if isinstance(model, PreTrainedModel):
        with _ending_with(way_out):
            weights = read_weights(folder, verify=True)
    else:
        with naming_damaged_file(folder / WEIGHTS_NAME, way_out):
            weights = read_state(folder / WEIGHTS_NAME, device=device)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        lines = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: does not fit the model: {lines}") from error


@contextmanager
def _ending_with(way_out: str) -> Iterator[None]:
    """Appends to errors in reading weights what the user can do."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{error}; {way_out}") from error
