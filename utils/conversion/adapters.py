"""Prepares an adapter for writing: adds what the user says of it, and converts its dtype."""

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
from loralib.text import counted
from transformers.data.processors import GLUE_TASKS, glue_task, similar_glue_task

# What messages call the format of an adapter that was extracted from a full checkpoint.
FULL = "in a full model"
# The head that a model gets if its adapter has none.
DEFAULT_HEAD = "sequence_classification"


def with_metadata(adapter: Adapter) -> Adapter:
    """Returns the adapter with metadata, derived from its tensors if missing; alpha is then NaN."""
    if adapter.metadata is not None:
        return adapter
    rank = rank_of(adapter.tensors, adapter.source)
    return replace(adapter, metadata=lora_metadata(adapter.tensors, rank, math.nan))


def with_task(adapter: Adapter, task: str | None, labels: Sequence[str] | None) -> Adapter:
    """Returns the adapter with the user's task and labels, if it does not record its own.

    Raises:
        CheckpointError: it records others, or its head has another number of outputs than labels
            or a GLUE task need.
    """
    said = adapter.metadata and adapter.metadata.task
    if task:
        task = said if said and _glue_name(said) == _glue_name(task) else _glue_name(task)
    named = {"task": task, "labels": tuple(labels) if labels else None}
    for what, value in named.items():
        known = getattr(adapter.metadata, what, None)
        if value and known and known != value:
            raise CheckpointError(
                f"{adapter.source}: records {what} {in_words(known)}, but --{what} is "
                f"{in_words(value)}"
            )
    outputs = adapter.outputs
    if labels and outputs != len(labels):
        has = "has no head" if outputs is None else f"has a head of {counted(outputs, 'output')}"
        raise CheckpointError(f"{adapter.source}: {has}, but --labels names {len(labels)}")
    if task and not said:
        _check_outputs(adapter, task)
    if adapter.metadata is None:
        return adapter
    own = {what: value for what, value in named.items() if value}
    return replace(adapter, metadata=replace(adapter.metadata, **own))


def _check_outputs(adapter: Adapter, task: str) -> None:
    """Checks that an adapter's head has the outputs of its task, if that is one of GLUE's.

    Raises:
        CheckpointError: it has another number of outputs.
    """
    known, outputs = GLUE_TASKS.get(task), adapter.outputs
    if known is None or not _is_of_texts(adapter) or outputs in (None, known.num_labels):
        return
    words = known.label_words
    needed = f"the labels {', '.join(words)}" if words else "a score, which is one output"
    raise CheckpointError(
        f"{adapter.source}: has a head of {counted(outputs, 'output')}, but {known.name} has "
        f"{needed}: leave --task out, or name another task"
    )


def _is_of_texts(adapter: Adapter) -> bool:
    """Returns whether an adapter is for a model that classifies texts, as GLUE's tasks need."""
    family = family_of(adapter.tensors)
    is_possible = family is not None and DEFAULT_HEAD in family.heads
    return is_possible and adapter.head in (None, DEFAULT_HEAD)


def _glue_name(task: str) -> str:
    """Returns a task's name as run_glue.py records it, and compares it when it evaluates."""
    with suppress(ValueError):  # the user's own task
        return glue_task(task).name
    return task


def unknown_task(before: Adapter, after: Adapter) -> list[str]:
    """Returns a remark for the user if the task that was given is not one of GLUE's.

    Args:
        before: the adapter as it was read.
        after: the adapter as `with_task` returned it.
    """
    task = after.metadata and after.metadata.task
    if not task or not _is_of_texts(after) or task in GLUE_TASKS or task == before.metadata.task:
        return []
    near = similar_glue_task(task)
    meant = f" (did you mean {near}?)" if near else ""
    return [f"{task} is not a GLUE task{meant}; it is recorded as given"]


def in_dtype(adapter: Adapter, dtype: torch.dtype | None) -> Adapter:
    """Returns the adapter with all floating-point tensors in one dtype.

    Its other tensors, which are buffers such as counters and masks, stay as they are.

    Raises:
        CheckpointError: the adapter has several dtypes and `dtype` is None; or values are beyond
            the range of `dtype`.
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
