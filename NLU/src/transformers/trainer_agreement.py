"""What the Trainer's processes agree on, on all machines: settings, data, checkpoint, model.

Of one process there is nothing to compare.
"""

from pathlib import Path
from typing import Any

from torch import nn

from loralib.errors import TrainingError
from loralib.training.agreement import check_alike, check_same_weights
from loralib.training.distributed import gather_objects
from loralib.training.output import appears

from .file_utils import CONFIG_NAME
from .modeling_utils import PreTrainedModel
from .trainer_checkpoint import TRAINER_STATE_NAME
from .training_args import TrainingArguments

# Settings that may be each process's own.
_OWN = {"output_dir", "overwrite_output_dir", "logging_dir", "run_name", "report_to", "log_level"}
_OWN |= {"local_rank", "no_cuda", "disable_tqdm", "dataloader_num_workers", "dataloader_pin_memory"}
_OWN |= {"ddp_timeout", "debug", "skip_memory_metrics", "tpu_num_cores", "tpu_metrics_debug"}

# Settings of a model that say where it was read from.
_PLACES = {"base_name_or_path", "_name_or_path"}


def check_same_training(
    args: TrainingArguments, model: nn.Module, updates: int, examples: int, digest: str | None
) -> None:
    """Checks that all processes train alike: with other settings, replicas would drift apart.

    Args:
        args: the run's.
        model: its weights are not compared: DDP gives all processes the first one's.
        updates: of the run.
        examples: of the training set.
        digest: what `table_digest` says of them.

    Raises:
        TrainingError: a process has other settings or other data.
    """
    flags = {f"--{name}": each for name, each in args.to_dict().items() if name not in _OWN}
    config = model.config.to_dict() if isinstance(model, PreTrainedModel) else {}
    of_model = {f"{n} ({CONFIG_NAME})": each for n, each in config.items() if n not in _PLACES}
    of_data = _about_data("to train on", examples, digest)
    check_alike({**flags, **of_model, **of_data, "updates to make": updates}, args.world_size)


def check_same_evaluation(
    args: TrainingArguments, model: nn.Module | None, examples: int | None, digest: str | None
) -> None:
    """Checks that all processes evaluate one model on one set.

    Args:
        args: the run's.
        model: its weights are compared; None after a training, in which it is the same, but for
            rounding where machines are of several kinds.
        examples: of the set, where it has a length.
        digest: what `table_digest` says of them.

    Raises:
        TrainingError: a process has others.
    """
    check_alike(_about_data("to evaluate on", examples, digest), args.world_size)
    if model is not None:
        check_same_weights(model, args.world_size)


def _about_data(what: str, examples: int | None, digest: str | None) -> dict[str, Any]:
    short = digest and digest[:16]  # to be read by people
    return {f"examples {what} (number)": examples, f"examples {what} (digest)": short}


def agreed_checkpoint(args: TrainingArguments, checkpoint: str | None) -> str | None:
    """The checkpoint that the first process resumes from, as this process sees it.

    Another machine's view of a shared folder may be some seconds old, and lack the last one.

    Args:
        args: the run's.
        checkpoint: what this process has found.

    Raises:
        TrainingError: the first process has none, or another one cannot see it.
    """
    names = gather_objects(checkpoint and Path(checkpoint).name, args.world_size)
    if len({*names}) == 1:
        return checkpoint
    own = Path(args.output_dir, names[0] or "")
    is_seen = names[0] is not None and appears(own / TRAINER_STATE_NAME)
    if not all(gather_objects(is_seen, args.world_size)):
        found = ", ".join(sorted({name or "none" for name in names}))
        raise TrainingError(
            f"processes see other last checkpoints in {args.output_dir} ({found}), and not all see "
            "the first one's: machines have to share that folder"
        )
    return str(own)
