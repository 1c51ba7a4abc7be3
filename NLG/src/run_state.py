"""Saves and restores the state of a gpt2_ft.py run, from which the run resumes bit-exact.

The state is ``resume.pt`` in the run's work folder. It is one file, so that a crash cannot leave
parts of two states, and it is written when no gradients are pending.
"""

import argparse
import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from checkpoints import check_finite
from gpu import DistEnv
from lora_flags import PATTERNS
from loralib.adapters.fingerprint import are_of_one_base
from loralib.errors import CheckpointError
from loralib.io.digests import lines_digest
from loralib.io.structure import check_structure
from loralib.io.tensors import write_torch
from loralib.training.agreement import check_alike, check_same_weights
from loralib.training.cuda_graphs import goes_on_without
from loralib.training.determinism import rng_state, set_rng_state, warn_of_other_threads
from loralib.training.distributed import barrier, gather_on_first
from loralib.training.resume import (
    Stateful,
    check_not_beyond,
    check_same_run,
    like_rng_state,
    naming_damaged_file,
    read_state,
    restore,
    warn_of_length,
)
from model import GPT2Config
from weights import own_tensors

logger = logging.getLogger(__name__)

RESUME_NAME = "resume.pt"
_ANOTHER_FOLDER = "another --work_dir (for a recipe: another RUN_DIR)"
_IS_FINISHED = f"it is finished; begin a new run of that length in {_ANOTHER_FOLDER}"
_WAY_OUT = "remove it and the model.*.pt next to it to start the run over"

# The flags that affect the bits of a run's results: a resumed run needs the same values.
_FIXED_FLAGS = (
    *("model_card", "lora_dim", "lora_alpha", "lora_targets", "lora_dropout", "lora_variant"),
    *("lora_init", "lora_freeze_A", "lora_plus_ratio"),
    *("obj", "seq_len", "label_smooth"),
    *("train_batch_size", "grad_acc", "clip", "fp16", "bf16", "tf32", "random_seed"),
    *("use_deterministic_algorithms", "torch_compile", "cuda_graphs"),
    *("lr", "weight_decay", "correct_bias", "adam_epislon", "no_decay_bias"),
    *("adam_beta1", "adam_beta2", "scheduler", "warmup_step", "i_steps", "i_lrs"),
)
_GRAPHS = "--cuda_graphs"
# The ends of the learning rate's schedule and of the run. They may change until a run is finished.
_LENGTHS = ("last step", "number of steps")


class Progress(NamedTuple):
    """How far a run has come: its last step, and the best perplexity of its evaluations."""

    step: int = 0
    best_ppl: float = math.inf


def identity_of(
    args: argparse.Namespace,
    config: GPT2Config,
    dist_env: DistEnv,
    max_step: int,
    last_step: int,
    base: str | None,
) -> dict[str, Any]:
    """Returns the settings that must not change if a run is to resume bit-exact, by name.

    Args:
        args: the flags.
        config: the model's configuration, which has patterns resolved to layers, because the same
            pattern can be written in several ways.
        dist_env: this process.
        max_step: the step at which the learning rate's schedule ends.
        last_step: the step at which the run ends.
        base: the fingerprint of the model that the run starts from.
    """
    return {
        **{f"--{name}": _as_written(getattr(args, name)) for name in _FIXED_FLAGS},
        **{f"--{name}": _as_written(getattr(config, name)) for name in PATTERNS},
        "number of processes": dist_env.world_size,
        "last step": max_step,
        "training data": lines_digest(args.train_data),
        "base": base,
        "number of steps": last_step,
    }


def _as_written(value: Any) -> Any:
    """Returns a flag's value, with several words joined as on the command line."""
    if isinstance(value, dict):
        value = [f"{module}={number}" for module, number in value.items()] or None
    return " ".join(value) if isinstance(value, tuple | list) else value


def find_run(work_dir: str | os.PathLike, resume: bool) -> dict[str, Any] | None:
    """Reads the state of the run to resume in a folder, if there is one.

    Returns:
        The state that `write_run` or `write_finished` wrote; None for a new run.

    Raises:
        CheckpointError: there is an unfinished run that has saved a state, and `resume` is not set.
        DamagedStateError: the file is damaged, or is not a state.
    """
    state = read_run(work_dir)
    if resume:
        if state is None:
            logger.warning("%s holds no run to resume: starting a new one", work_dir)
        return state if has_begun(state) else None
    if has_begun(state) and not state["finished"]:
        raise CheckpointError(
            f"{work_dir}: holds an unfinished run, at step {state['step']}: resume it with "
            f"--resume, or remove its {RESUME_NAME} and model.*.pt, or give {_ANOTHER_FOLDER}"
        )
    return None


def check_same_start(
    args: argparse.Namespace,
    dist_env: DistEnv,
    identity: Mapping[str, Any],
    resumed: Mapping[str, Any] | None,
) -> None:
    """Checks that all processes train alike and from the same step; all of them have to call it.

    `check_same_flags` has compared their flags before. This compares what they have read from
    files, which may differ: a machine may see a shared folder as it was some seconds ago, or have
    the files of another run.

    Args:
        args: the flags.
        dist_env: this process.
        identity: see `identity_of`.
        resumed: what `find_run` returned.

    Raises:
        TrainingError: a process has other settings, other data, or resumes from another step.
    """
    if dist_env.world_size > 1:
        step = None if resumed is None else resumed["step"]
        own = {"validation data": lines_digest(args.valid_data), "step to resume from": step}
        own["a resumed run with finished ="] = resumed is not None and resumed["finished"]
        check_alike({**identity, **own}, dist_env.world_size)


def had_graphs(state: Mapping[str, Any]) -> bool:
    """Returns whether a run has used CUDA graphs."""
    return bool(state["run"].get(_GRAPHS))


def has_begun(state: Mapping[str, Any] | None) -> bool:
    """Returns whether a run has reached its first `write_run`."""
    return state is not None and state["step"] > 0


def read_run(work_dir: str | os.PathLike) -> dict[str, Any] | None:
    """Reads a folder's ``resume.pt``; returns None if there is no such file.

    Raises:
        DamagedStateError: the file is damaged, or is not a state.
    """
    path = Path(work_dir, RESUME_NAME)
    if not path.is_file():
        return None
    with naming_damaged_file(path, _WAY_OUT):
        return read_state(path, {"run": {}, "step": 0, "finished": False})


def begin_run(args: argparse.Namespace, dist_env: DistEnv, identity: Mapping[str, Any]) -> None:
    """Checks that there are no models of another run, and writes the first ``resume.pt``.

    Raises:
        CheckpointError: there are models of another run.
    """
    barrier(dist_env.world_size)  # until all processes have looked for a run to resume
    if not dist_env.is_main:
        return
    work_dir = Path(args.work_dir)
    state = read_run(work_dir)
    # This run may have been killed between its first model and its first state.
    is_own = args.resume and state is not None and not has_begun(state) and state["run"] == identity
    if not is_own and any(work_dir.glob("model.*.pt")):
        raise CheckpointError(
            f"{args.work_dir}: holds models of another run, which would be mixed up with this "
            f"one's: remove them, or give {_ANOTHER_FOLDER}"
        )
    write_torch(work_dir / RESUME_NAME, {"run": dict(identity), "step": 0, "finished": False})


def write_run(
    work_dir: str | os.PathLike,
    dist_env: DistEnv,
    identity: Mapping[str, Any],
    progress: Progress,
    model: nn.Module,
    parts: Mapping[str, Stateful],
) -> None:
    """Writes the state from which a run is resumed; all processes have to call it.

    Args:
        work_dir: the run's folder.
        dist_env: this process.
        identity: see `identity_of`.
        progress: how far the run has come.
        model: the model; its trained weights and all of LoRA's tensors are written.
        parts: optimizer, scheduler and precision, by name.

    Raises:
        CheckpointError: a weight is not finite; the previous state stays.
    """
    own = rng_state(dist_env.device)
    generators = gather_on_first(own, dist_env.rank, dist_env.world_size)
    if dist_env.is_main:
        path = Path(work_dir, RESUME_NAME)
        trained = _kept(model)
        check_finite(path, trained)
        state = {
            "run": dict(identity),
            "finished": False,
            "trained": trained,
            **progress._asdict(),
            "threads": torch.get_num_threads(),
            **{name: part.state_dict() for name, part in parts.items()},
            "rng_state": generators,
        }
        write_torch(path, state)


def _kept(model: nn.Module) -> dict[str, Tensor]:
    """Returns the trained weights and LoRA's others: a frozen A, the initial values of A and B."""
    return {
        name: tensor.detach()
        for name, tensor in own_tensors(model).items()
        if tensor.requires_grad or "lora_" in name
    }


def write_finished(
    work_dir: str | os.PathLike, dist_env: DistEnv, identity: Mapping[str, Any], step: int
) -> None:
    """Marks a run as finished, so that --resume does not start it over."""
    if dist_env.is_main:
        state = {"run": dict(identity), "finished": True, "step": step}
        write_torch(Path(work_dir, RESUME_NAME), state)


def restore_run(
    work_dir: str | os.PathLike,
    dist_env: DistEnv,
    identity: Mapping[str, Any],
    state: Mapping[str, Any],
    model: nn.Module,
    parts: Mapping[str, Stateful],
) -> Progress:
    """Restores the state that `write_run` wrote; see there for the other arguments.

    Args:
        state: what `find_run` returned.

    Raises:
        CheckpointError: the state is of a run with other settings, of one that has taken more steps
            than this run has, or of a finished run of another length.
        DamagedStateError: the state does not have this run's structure.
        TrainingError: another process has read other weights.
    """
    new_run = f"begin a new run in {_ANOTHER_FOLDER}"
    lengths = {name: identity[name] for name in _LENGTHS}
    fixed = {name: value for name, value in identity.items() if name not in lengths}
    before, base = state["run"], identity["base"]
    warns = dist_env.is_main and not state["finished"]  # a finished run does not go on
    if goes_on_without(work_dir, had_graphs(state), bool(identity.get(_GRAPHS)), warns):
        fixed.pop(_GRAPHS, None)
    if base and before.get("base") and are_of_one_base(before["base"], base):
        before = {**before, "base": base}  # an older version wrote a shorter fingerprint
    check_same_run(work_dir, before, fixed, f"give the same to resume it, or {new_run}")
    if state["finished"]:
        check_same_run(work_dir, state["run"], lengths, _IS_FINISHED)
        return Progress(state["step"])
    check_not_beyond(work_dir, state["step"], identity["number of steps"], new_run)
    warn_of_length(work_dir, state["run"]["last step"], identity["last step"])
    weights = _kept(model)
    generators = [like_rng_state()] * dist_env.world_size
    with naming_damaged_file(Path(work_dir, RESUME_NAME), _WAY_OUT), torch.no_grad():
        like = {name: weight.cpu() for name, weight in weights.items()}
        check_structure(state, {**Progress()._asdict(), **{name: {} for name in parts}})
        check_structure(state, {"trained": like, "rng_state": generators, "threads": 1})
        for name, weight in weights.items():
            weight.copy_(state["trained"][name])
        for name, part in parts.items():
            # `restore` need not check it, because an optimizer checks its state itself.
            restore(part, state[name], checked=() if name == "optimizer" else None)
        set_rng_state(state["rng_state"][dist_env.rank], dist_env.device)
    check_same_weights(model, dist_env.world_size, weights)
    warn_of_other_threads(state["threads"], dist_env.device)
    if dist_env.is_main:
        _remove_models_after(state["step"], work_dir)
    return Progress(state["step"], state["best_ppl"])


def _remove_models_after(step: int, work_dir: str | os.PathLike) -> None:
    """Removes the models of steps that a resumed run takes again.

    A run that is resumed with a shorter length may not overwrite them, and the model of the latest
    step counts as the run's result.
    """
    for path in Path(work_dir).iterdir():
        found = re.fullmatch(r"model\.(\d+)\.pt", path.name, re.ASCII)
        if found and int(found[1]) > step:
            path.unlink()
            logger.info("removed %s: the run is resumed from step %d", path, step)
