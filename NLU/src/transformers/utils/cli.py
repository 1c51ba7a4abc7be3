"""Helpers of the scripts: logging, one-line errors, and checks of folders and lengths."""

import atexit
import functools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from loralib.adapters.adapter import LORA
from loralib.errors import (
    AdapterAsModelError,
    AlphaError,
    CheckpointError,
    FullModelError,
    MissingLayersError,
    MissingPartError,
    ModelAsAdapterError,
    NeedsMergingError,
    SettingsError,
    WayOut,
    WrongBaseError,
    adding_ways_out,
)
from loralib.io.atomic import check_folder_writable
from loralib.io.console import is_terminal
from loralib.training import launcher_env, process
from loralib.training.output import output_folder
from loralib.training.restarts import find_launch

from ..adaptation_settings import MissingLoraError
from ..adapter_kinds import KINDS, fitting_flag, path_flag, without
from ..configuration_utils import PretrainedConfig
from ..file_utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from ..models.auto.tokenization_auto import AutoTokenizer
from ..tokenization_utils_base import PreTrainedTokenizerBase
from ..trainer_checkpoint import LEFT_FOLDERS, TRAINING_ARGS_NAME, outdated_checkpoints
from ..trainer_utils import get_last_checkpoint, list_checkpoints
from ..training_args import TrainingArguments

logger = logging.getLogger(__name__)

# Weight files that a run may start from, and that it writes or deletes.
_WEIGHT_FILES = {WEIGHTS_NAME, SAFE_WEIGHTS_NAME, *(name for kind in KINDS for name in kind.files)}

# The number of tokens to which texts are truncated by default.
DEFAULT_LENGTH = 128


def set_up_logging(level: str | None = None) -> None:
    """Shows messages on the console; see `process.set_up_logging`.

    Args:
        level: the value of --log_level; None for info.
    """
    process.set_up_logging(level or "info")
    # When `datasets` cannot read a file, it logs the same error that it raises.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)


def set_up_datasets(cache_dir: str | None = None) -> None:
    """Sets up the `datasets` library: its progress bars, its messages and its cache.

    Progress bars are shown only by the main process on a terminal. Messages are shown once, in the
    project's format. If the default cache is not writable, as in a container whose user has no home
    folder, a temporary folder is used.

    Call it after the command line has been checked, because it imports the library.

    Args:
        cache_dir: the cache folder that the user has given, if any.

    Raises:
        OSError: `cache_dir` cannot be written to.
    """
    with process.without_collector():
        import datasets

    # The root logger's handlers show the messages, and the libraries' own would repeat them.
    for library in ("datasets", "huggingface_hub"):
        logging.getLogger(library).handlers.clear()
    if launcher_env.rank() != 0 or not is_terminal(sys.stderr):
        datasets.disable_progress_bars()
    if cache_dir is not None:
        if not _can_be_written_to(cache_dir):
            raise OSError(f"--cache_dir {cache_dir}: cannot be written to; give another folder")
    elif not _can_be_written_to(datasets.config.HF_DATASETS_CACHE):
        logger.warning(
            "%s: cannot be written to, so data is kept in a temporary folder, and the next run "
            "reads it again: set HF_HOME to a folder of your own",
            datasets.config.HF_DATASETS_CACHE,
        )
        datasets.config.HF_DATASETS_CACHE = _temporary_cache()


def _can_be_written_to(folder: str | os.PathLike) -> bool:
    """Returns whether files can be written to a folder, which is created if missing."""
    folder = os.path.expanduser(folder)
    if folder.startswith("~"):  # the user's home folder is unknown
        return False
    try:
        os.makedirs(folder, exist_ok=True)
        check_folder_writable(folder)
    except OSError:
        return False
    return True


@functools.cache
def _temporary_cache() -> Path:
    """Creates a folder that is deleted when the process ends."""
    folder = tempfile.mkdtemp(prefix="datasets-")
    # Errors are ignored, because Windows cannot delete memory-mapped files, such as tables.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def sole_use_of_output(args: TrainingArguments) -> AbstractContextManager[None]:
    """Creates the output folder, and keeps other runs out of it within the block.

    All processes of a run have to call this. See `output_folder`, also for further errors.

    Raises:
        NotADirectoryError: the output folder is a file.
    """
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"--output_dir {folder} is a file")
    return output_folder(folder, args.process_index, args.world_size, LEFT_FOLDERS)


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
        path = Path(source or "").resolve()
        if not source or not path.exists():
            continue  # not given, or a name on the hub
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


def check_length(config: PretrainedConfig, max_seq_length: int) -> None:
    """Refuses a --max_seq_length below 1 or beyond the model's positions.

    Raises:
        ValueError: the length is out of that range.
    """
    longest = config.longest_sequence
    if max_seq_length < 1 or (longest is not None and max_seq_length > longest):
        positions = "" if longest is None else f": the model has {longest} positions"
        raise ValueError(f"--max_seq_length {max_seq_length}{positions}")


def choose_length(
    given: int | None,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    is_pair: bool,
    usual: int = DEFAULT_LENGTH,
) -> int:
    """Returns the number of tokens to which texts are truncated.

    That is --max_seq_length or, if it is not given, `usual`, reduced to the model's positions.

    Args:
        given: the value of --max_seq_length, or None.
        config: the model's settings.
        tokenizer: its tokenizer.
        is_pair: whether there are pairs of texts.
        usual: the default length.

    Raises:
        ValueError: the model has fewer positions, or special tokens leave too little room.
    """
    if given is None:
        length = min(usual, config.longest_sequence or usual)
        if length < usual:
            logger.info("the model has %d positions: longer texts are cut to that", length)
    else:
        check_length(config, length := given)
    check_room(length, tokenizer, is_pair)
    return length


def check_room(length: int, tokenizer: PreTrainedTokenizerBase, is_pair: bool) -> None:
    """Refuses a length that leaves no room for a text, or for both texts of a pair.

    Args:
        length: the number of tokens in a row.
        tokenizer: the tokenizer, which adds special tokens.
        is_pair: whether there are pairs of texts.

    Raises:
        ValueError: special tokens leave less than two tokens for each text.
    """
    special = tokenizer.num_special_tokens_to_add(is_pair)
    # Two tokens for each text, because the first one may be only the space before it.
    needed = special + 2 * (1 + is_pair)
    if length < needed:
        what = "a pair of texts" if is_pair else "a text"
        raise ValueError(
            f"--max_seq_length {length}: {what} needs at least {needed} tokens, of which {special} "
            "are special ones"
        )


def truncated_rows(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Sequence[Any]],
    masks: Sequence[Sequence[int]],
    length: int,
    **how: Any,
) -> list[bool]:
    """Returns for each row whether its texts were truncated.

    Args:
        tokenizer: the tokenizer that made the rows.
        texts: one list of texts, or two lists with the first and second text of each pair.
        masks: each row's attention mask, 1 for a token and 0 for padding.
        length: the maximum number of tokens in a row.
        how: further arguments with which the rows were made, such as ``is_split_into_words=True``.
    """
    # A row that is not full was not truncated. Full rows are encoded again with room for one more
    # token, which those that were truncated fill.
    full = [row for row, mask in enumerate(masks) if sum(mask) >= length]
    was_cut = [False] * len(masks)
    if full:
        known = tokenizer.model_max_length
        tokenizer.model_max_length = max(known, length + 1)  # avoids a warning about the length
        try:
            longer = tokenizer(
                *([column[row] for row in full] for column in texts),
                truncation=True,
                max_length=length + 1,
                **how,
            )
        finally:
            tokenizer.model_max_length = known
        for row, ids in zip(full, longer["input_ids"], strict=True):
            was_cut[row] = len(ids) > length
    return was_cut


def report_truncation(cut: Mapping[str, tuple[int, int]], length: int) -> None:
    """Logs in one line how many texts of each set were truncated, if any.

    Args:
        cut: for each set, by name, how many rows were truncated and how many it has.
        length: the maximum number of tokens in a row.
    """
    said = [f"{rows} of {total} in {name}" for name, (rows, total) in cut.items() if rows]
    if said and launcher_env.rank() == 0:
        logger.warning("texts were cut to %d tokens: %s", length, ", ".join(said))


def load_tokenizer(
    name: str, config: PretrainedConfig, of_words: bool = False, **settings: Any
) -> PreTrainedTokenizerBase:
    """Loads a model's tokenizer.

    Args:
        name: the tokenizer's folder, or its name on the hub.
        config: the model's settings.
        of_words: whether texts will be given as lists of words.
        settings: further arguments of `from_pretrained`, such as where to look for it, and settings
            that override those in its files.

    Raises:
        ValueError: it has tokens that the model does not have.
    """
    tokenizer = AutoTokenizer.from_pretrained(name, config=config, **settings)
    if of_words and not getattr(tokenizer, "add_prefix_space", True):
        # Otherwise, each word would be tokenized as the first word of a text.
        settings["add_prefix_space"] = True
        tokenizer = AutoTokenizer.from_pretrained(name, config=config, **settings)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {config.vocab_size}: "
            "they do not belong together"
        )
    return tokenizer


def _model_of(source: str) -> str:
    """Returns the value of --model_name_or_path for a source: for a file, the folder it is in."""
    return str(Path(source).parent) if os.path.isfile(source) else source


# Errors of the library -> the flags or scripts that resolve them.
WAYS_OUT: dict[type[CheckpointError], WayOut] = {
    AdapterAsModelError: lambda error: f"--apply_lora --lora_path {error.source}",
    AlphaError: "--lora_alpha",
    WrongBaseError: "--model_name_or_path",
    ModelAsAdapterError: lambda error: (
        f"--model_name_or_path {_model_of(error.source)}, and {without(LORA)}"
    ),
    FullModelError: lambda error: (
        "utils/split_lora.py takes the adapter out, or give it as --model_name_or_path "
        f"{_model_of(error.source)}"
    ),
    MissingLayersError: lambda error: f"--{error.switch}",
    MissingLoraError: lambda error: (
        f"{' and '.join(f'--{name}' for name in error.names)}, or --lora_path with an adapter"
    ),
    MissingPartError: lambda error: path_flag(error.switch),
    NeedsMergingError: "utils/convert.py --to merged",
    SettingsError: fitting_flag,
}


def run_script(
    main: Callable[[], None], ways_out: Mapping[type[CheckpointError], WayOut] | None = None
) -> None:
    """Runs a script's `main` with `process.run`, and adds to the library's errors what to do.

    Args:
        main: the script's main function.
        ways_out: the script's own entries, which override those of `WAYS_OUT`.
    """
    with_ways_out = adding_ways_out({**WAYS_OUT, **(ways_out or {})})(main)
    process.run(with_ways_out, timeout="--ddp_timeout")
