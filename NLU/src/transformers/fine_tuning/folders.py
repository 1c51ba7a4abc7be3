"""The folders of a run: its output, which only it uses, and those that it must not overwrite."""

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from loralib.training.output import output_folder
from loralib.training.restarts import find_launch

from ..adapter_kinds import KINDS
from ..file_utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from ..trainer_checkpoint import LEFT_FOLDERS, TRAINING_ARGS_NAME, outdated_checkpoints
from ..trainer_utils import get_last_checkpoint, list_checkpoints
from ..training_args import TrainingArguments

logger = logging.getLogger(__name__)

# Weight files that a run may start from, and that it writes or deletes.
_WEIGHT_FILES = {WEIGHTS_NAME, SAFE_WEIGHTS_NAME, *(name for kind in KINDS for name in kind.files)}


def sole_use_of_output(args: TrainingArguments) -> AbstractContextManager[None]:
    """Creates the output folder, and keeps other runs out of it within the block.

    All processes of a run have to call this. See `output_folder`, also for errors.
    """
    return output_folder(args.output_dir, args.process_index, args.world_size, LEFT_FOLDERS)


def check_sources_kept(args: TrainingArguments, sources: Mapping[str, str | None]) -> None:
    """Refuses runs that would overwrite the weights that they start from.

    An evaluation writes only results. It may write them next to adapters and into the folder of a
    trained run, but not into the folder of any other model, such as a base or the output of
    utils/convert.py. A run that resumes is not checked.

    Call it before `find_checkpoint`, whose error message suggests --overwrite_output_dir.

    Args:
        args: the run's settings.
        sources: where weights are read from (a path, a name on the hub or None), by flag name.

    Raises:
        ValueError: a source is the output folder, a file that is saved there, or a checkpoint in
            it; or, without training, the output folder is that of a model that no run has written.
    """
    if not args.do_train:
        _check_model_kept(args, sources)
        return
    output = Path(args.output_dir).resolve()
    checkpoints = list_checkpoints(output)
    if checkpoints and not args.overwrite_output_dir:
        return
    for flag, source in sources.items():
        if not source or not os.path.exists(source):
            continue  # not given, or a name on the hub
        path = Path(source).resolve()
        is_saved = path.parent == output and path.name in _WEIGHT_FILES
        if path == output or is_saved or any(path.is_relative_to(each) for each in checkpoints):
            raise ValueError(
                f"--{flag} {source}: training would overwrite it, as it is in --output_dir "
                f"{args.output_dir}; give another --output_dir"
            )


def _check_model_kept(args: TrainingArguments, sources: Mapping[str, str | None]) -> None:
    model, output = sources.get("model_name_or_path"), Path(args.output_dir)
    if not model or not (os.path.isdir(model) and output.is_dir()):
        return  # not given, or a name on the hub
    is_of_a_run = (output / TRAINING_ARGS_NAME).is_file() or list_checkpoints(output)
    if os.path.samefile(model, output) and not is_of_a_run:
        raise ValueError(
            f"--model_name_or_path {model}: results would be written among its files, as it is "
            "--output_dir; give another --output_dir"
        )


def find_checkpoint(args: TrainingArguments) -> str | None:
    """Returns the checkpoint to resume from, the last one in the output folder, or None.

    All processes of a run have to call this. When a launcher restarts a run, it repeats the first
    attempt's command, so --overwrite_output_dir then applies only to older checkpoints.

    Raises:
        ValueError: training would write into a folder that is not empty but has no checkpoint.
    """
    folder = Path(args.output_dir)
    if not args.do_train:
        return None
    args.launch = find_launch(folder, args.world_size)
    if args.launch.is_restart:
        return get_last_checkpoint(folder, but=outdated_checkpoints(args))
    checkpoint = get_last_checkpoint(folder)
    if args.overwrite_output_dir:
        if checkpoint:
            logger.warning(
                "this run starts from the beginning; the checkpoints in %s are replaced at the "
                "first save: to resume from them, stop it now and add --overwrite_output_dir False",
                folder,
            )
        return None
    files = folder.iterdir() if folder.exists() else ()
    if checkpoint is None and any(not path.name.startswith(".") for path in files):
        raise ValueError(
            f"--output_dir {folder} is not empty and holds no checkpoint to resume from: "
            "give another folder, or --overwrite_output_dir"
        )
    return checkpoint
