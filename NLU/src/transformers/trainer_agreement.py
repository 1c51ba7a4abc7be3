"""Checks that all of a Trainer's processes have the same settings, data, checkpoint and model.

With a single process, the checks do nothing.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from loralib.errors import TrainingError
from loralib.training.agreement import check_alike, check_same_code, check_same_weights
from loralib.training.distributed import gather_objects
from loralib.training.output import appears

from .configuration_utils import PretrainedConfig
from .file_utils import CONFIG_NAME
from .modeling_utils import PreTrainedModel
from .trainer_checkpoint import TRAINER_STATE_NAME, lora_settings_of
from .training_args import TrainingArguments

# Flags that may differ between processes: where files are, what is logged, and local resources. The
# files' contents are compared separately.
_OWN = {"output_dir", "overwrite_output_dir", "logging_dir", "run_name", "report_to", "log_level"}
_OWN |= {"local_rank", "no_cuda", "disable_tqdm", "dataloader_num_workers", "dataloader_pin_memory"}
_OWN |= {"ddp_timeout", "skip_memory_metrics", "preprocessing_num_workers", "overwrite_cache"}
_OWN |= {"model_name_or_path", "config_name", "tokenizer_name", "cache_dir", "use_auth_token"}
_OWN |= {"lora_path", "adapter_path", "bitfit_path", "data_dir"}
_OWN |= {"train_file", "validation_file", "test_file"}

# Settings of a model that do not affect its results once its weights are loaded.
_WITHOUT_EFFECT = {"name_or_path", "base_name_or_path", "base_revision"}
_WITHOUT_EFFECT |= {"initializer_range", "gradient_checkpointing"}


def check_same_flags(args: TrainingArguments, *others: Any) -> None:
    """Checks that all processes were started with the same flags and the same code.

    Called first of all, before the processes wait for each other anywhere else.

    Args:
        args: the run's settings.
        others: the script's other flags, a dataclass for each group.

    Raises:
        TrainingError: a flag or the project's version differs.
    """
    check_same_code(args.process_index, args.world_size)
    flags = _flags(args.to_dict())
    for group in others:
        flags |= _flags(vars(group))
    check_alike(flags, args.world_size)


def about_examples(purpose: str, number: int | None, digest: str | None) -> dict[str, Any]:
    """Returns what the processes compare of a dataset, by name.

    Args:
        purpose: what the examples are for, in words.
        number: how many there are; None if unknown.
        digest: their `table_digest`.
    """
    name = f"examples {purpose}"
    # The beginning of the digest is short enough for an error message.
    return {f"{name} (number)": number, f"{name} (digest)": digest and digest[:16]}


def check_same_settings(
    args: TrainingArguments, model: nn.Module | None, others: Mapping[str, Any]
) -> None:
    """Checks that all processes train or evaluate with the same settings on the same data.

    With different settings, replicas would drift apart.

    Args:
        args: the run's settings.
        model: the model, whose settings are compared; None compares none. Weights are not compared
            before training, because DDP sends the first process's weights to all.
        others: further settings to compare, and what `about_examples` returns, by name.

    Raises:
        TrainingError: a process has different settings or data.
    """
    of_model: dict[str, Any] = {}
    if isinstance(model, PreTrainedModel):
        of_model = _of_config(model.config)
    elif model is not None:
        of_model = lora_settings_of(model)
    check_alike({**_flags(args.to_dict()), **of_model, **others}, args.world_size)


def check_same_evaluation(
    args: TrainingArguments, model: nn.Module | None, examples: Mapping[str, Any]
) -> None:
    """Checks that all processes evaluate the same model on the same set, with the same settings.

    Args:
        args: the run's settings.
        model: the model, whose settings and weights are compared. None after training steps: the
            model is then the same on all processes, except for rounding if their hardware differs.
        examples: what `about_examples` returns for the set.

    Raises:
        TrainingError: a process has a different model, set or setting.
    """
    check_same_settings(args, model, examples)
    if model is not None:
        check_same_weights(model, args.world_size)


def _flags(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"--{name}": value for name, value in values.items() if name not in _OWN}


def _of_config(config: PretrainedConfig) -> dict[str, Any]:
    """Returns the settings that affect what a model computes, without any it does not know."""
    known: set[str] = set()
    for kind in type(config).__mro__:
        known |= {*inspect.signature(kind.__init__).parameters}
    names = known - _WITHOUT_EFFECT
    values = config.to_dict().items()
    return {f"{name} ({CONFIG_NAME})": value for name, value in values if name in names}


def agreed_checkpoint(args: TrainingArguments, checkpoint: str | None) -> str | None:
    """Returns the path of the checkpoint that the first process resumes from.

    On another machine, the listing of a shared folder may be some seconds old and lack the last
    checkpoint.

    Args:
        args: the run's settings.
        checkpoint: the last checkpoint that this process has found, or None.

    Raises:
        TrainingError: the processes found different checkpoints, and the first process has none or
            another one cannot see the first one's.
    """
    names = gather_objects(checkpoint and Path(checkpoint).name, args.world_size)
    if len({*names}) == 1:
        return checkpoint
    own = Path(args.output_dir, names[0] or "")
    is_seen = names[0] is not None and appears(own / TRAINER_STATE_NAME)
    if not all(gather_objects(is_seen, args.world_size)):
        found = ", ".join(sorted({name or "none" for name in names}))
        raise TrainingError(
            f"processes see different last checkpoints in {args.output_dir} ({found}), and not "
            "all see that of process 0: all machines have to share that folder"
        )
    return str(own)
