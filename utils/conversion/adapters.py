"""An adapter as it is to be written: with what its user says of it, and in one dtype."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from conversion.dtypes import check_range, dtypes_of
from loralib.adapters.adapter import Adapter, in_words, lora_metadata
from loralib.adapters.deltas import rank_of
from loralib.adapters.families import family_of
from loralib.errors import CheckpointError
from transformers.data.processors import GLUE_TASKS, glue_task, similar_glue_task

# The format, as messages show it, of an adapter that was extracted from a full checkpoint.
FULL = "in a full model"
# The head of a model for an adapter that brings none.
DEFAULT_HEAD = "sequence_classification"


def with_metadata(adapter: Adapter) -> Adapter:
    """The adapter with what its tensors say; its alpha, if that is unknown, is not a number."""
    if adapter.metadata is not None:
        return adapter
    rank = rank_of(adapter.tensors, adapter.source)
    return replace(adapter, metadata=lora_metadata(adapter.tensors, rank, math.nan))


def with_task(adapter: Adapter, task: str | None, labels: Sequence[str] | None) -> Adapter:
    """The adapter with the task and labels that a user named, where it does not say its own.

    Raises:
        CheckpointError: it says others, or its head has another number of outputs.
    """
    said = adapter.metadata and adapter.metadata.task
    if task:
        task = said if said and _glue_name(said) == _glue_name(task) else _glue_name(task)
    named = {"task": task, "labels": tuple(labels) if labels else None}
    for what, value in named.items():
        known = getattr(adapter.metadata, what, None)
        if value and known and known != value:
            raise CheckpointError(
                f"{adapter.source}: says {what} {in_words(known)}, but --{what} is "
                f"{in_words(value)}"
            )
    outputs = adapter.outputs
    if labels and outputs != len(labels):
        has = "has no head" if outputs is None else f"has a head of {outputs} outputs"
        raise CheckpointError(f"{adapter.source}: {has}, but --labels names {len(labels)}")
    if adapter.metadata is None:
        return adapter
    own = {what: value for what, value in named.items() if value}
    return replace(adapter, metadata=replace(adapter.metadata, **own))


def _glue_name(task: str) -> str:
    """A task's name as run_glue.py records it, and compares it when it evaluates an adapter."""
    with suppress(ValueError):  # a task of one's own
        return glue_task(task).name
    return task


def unknown_task(before: Adapter, after: Adapter) -> list[str]:
    """What a user has to know of a task that was named, a line; none where GLUE has it.

    Args:
        before: an adapter as it was read.
        after: the same, `with_task`.
    """
    task = after.metadata and after.metadata.task
    family = family_of(after.tensors)
    is_of_texts = after.head in (None, DEFAULT_HEAD) and family and DEFAULT_HEAD in family.heads
    if not task or not is_of_texts or task in GLUE_TASKS or task == before.metadata.task:
        return []
    near = similar_glue_task(task)
    meant = f" (did you mean {near}?)" if near else ""
    return [f"{task} is not a GLUE task{meant}; it is written as --task says"]


def in_dtype(adapter: Adapter, dtype: torch.dtype | None) -> Adapter:
    """The adapter with all tensors in one dtype, but for counters and masks among its buffers.

    Raises:
        CheckpointError: it has several, and none was asked for; or values are beyond the range of
            the one that was.
    """
    found = dtypes_of(adapter)
    if dtype is None and len(found) > 1:
        raise CheckpointError(
            f"{adapter.source}: holds tensors of {' and '.join(found)}; choose one with --dtype"
        )
    if dtype is None:
        return adapter
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in adapter.tensors.items()
    }
    check_range(tensors, adapter.source, dtype)
    return replace(adapter, tensors=tensors)
