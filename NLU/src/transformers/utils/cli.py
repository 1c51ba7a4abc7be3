"""What the scripts share: logging, errors as one line, and checks of what they are given."""

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
from loralib.training import launched, process
from loralib.training.launch import find_launch
from loralib.training.output import output_folder

from ..adapter_kinds import KINDS, fitting_flag, path_flag, without
from ..configuration_utils import MissingLoraError, PretrainedConfig
from ..file_utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from ..models.auto.tokenization_auto import AutoTokenizer
from ..tokenization_utils_base import PreTrainedTokenizerBase
from ..trainer_checkpoint import LEFT_FOLDERS, TRAINING_ARGS_NAME, outdated_checkpoints
from ..trainer_utils import get_last_checkpoint, list_checkpoints
from ..training_args import TrainingArguments

logger = logging.getLogger(__name__)

# Files of weights that a run may be started from, and that it saves or removes.
_WEIGHT_FILES = {WEIGHTS_NAME, SAFE_WEIGHTS_NAME, *(name for kind in KINDS for name in kind.files)}

# Tokens that texts are cut to by default.
DEFAULT_LENGTH = 128


def set_up_logging(level: str | None = None) -> None:
    """Shows messages on the console, see `process.set_up_logging`.

    Args:
        level: --log_level; None for info.
    """
    process.set_up_logging(level or "info")
    # For a file that it cannot read, its log only repeats the error that it raises.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)


def set_up_datasets(cache_dir: str | None = None) -> None:
    """Turns off the progress bars of datasets, except the main process's on a terminal.

    Its messages are shown as the project's are, once. Where its cache cannot be written to, as in
    a container whose user has no home folder, tables are kept in a temporary folder.

    It imports that library, so it is called after the command line has been checked.

    Args:
        cache_dir: the folder that the script gives it for a cache, if it does.

    Raises:
        OSError: `cache_dir` cannot be written to.
    """
    with process.without_collector():
        import datasets

    # Messages go to the root logger's handlers; the libraries' own would show them a second time.
    for library in ("datasets", "huggingface_hub"):
        logging.getLogger(library).handlers.clear()
    if launched.rank() != 0 or not is_terminal(sys.stderr):
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
    """Whether there is such a folder, or it can be made, and takes files."""
    folder = os.path.expanduser(folder)
    if folder.startswith("~"):  # nobody knows the user's home folder
        return False
    try:
        os.makedirs(folder, exist_ok=True)
        check_folder_writable(folder)
    except OSError:
        return False
    return True


@functools.cache
def _temporary_cache() -> Path:
    """A folder that goes when the process ends."""
    folder = tempfile.mkdtemp(prefix="datasets-")
    # Windows removes no file that is mapped, as tables are.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def sole_use_of_output(args: TrainingArguments) -> AbstractContextManager[None]:
    """Makes the output folder, and keeps other runs out of it within the block.

    See `output_folder`, and what it raises. To be called by all processes of a run.

    Raises:
        NotADirectoryError: the output folder is a file.
    """
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"--output_dir {folder} is a file")
    return output_folder(folder, args.process_index, args.world_size, LEFT_FOLDERS)


def check_sources_kept(args: TrainingArguments, sources: Mapping[str, str | None]) -> None:
    """Refuses to begin a training that would write over what it starts from.

    An evaluation, which writes results alone, may put them beside adapters and into the folder of a
    run's model, not among the files of another one: a base, or what utils/convert.py has merged.
    To be called before `find_checkpoint`, whose error proposes to overwrite a folder. A run that
    resumes has begun already.

    Args:
        args: say whether there is training, and where it writes.
        sources: where weights are read from, by the flag's name: paths, names on the hub or None.

    Raises:
        ValueError: one is the output folder, a file that is saved there, or a checkpoint in it; or,
            without training, the model is the output folder.
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
    """The checkpoint to resume from: the last one in the output folder, which must be ours.

    A launcher gives every attempt the first one's command: --overwrite_output_dir is for that one.
    To be called by all processes of a run.

    Raises:
        ValueError: training would write into a folder that holds something, but no checkpoint.
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
                "this run starts from its beginning; the checkpoints in %s are replaced at the "
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
    """Refuses texts that are longer than the model has positions for.

    Raises:
        ValueError: they are, or there is not even one token in them.
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
    """The number of tokens that texts are cut to: --max_seq_length, or what fits the model.

    Args:
        given: the flag; None where it was not given.
        config: the model's settings.
        tokenizer: its tokenizer.
        is_pair: there are pairs of texts.
        usual: the length where the flag was not given and the model takes so many.

    Raises:
        ValueError: the model has fewer positions, or special tokens leave no room in them.
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
    """Refuses rows that have no room for a text, or for each of a pair.

    Args:
        length: --max_seq_length.
        tokenizer: what makes the rows.
        is_pair: there are pairs of texts.

    Raises:
        ValueError: special tokens leave less than two tokens for each.
    """
    special = tokenizer.num_special_tokens_to_add(is_pair)
    # The first token of a text can be no more than the space before it.
    needed = special + 2 * (1 + is_pair)
    if length < needed:
        what = "a pair of texts" if is_pair else "a text"
        raise ValueError(
            f"--max_seq_length {length}: {what} needs at least {needed} tokens, of which {special} "
            "are special ones"
        )


def cut_rows(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Sequence[Any]],
    masks: Sequence[Sequence[int]],
    length: int,
    **how: Any,
) -> list[bool]:
    """Whether each row's texts were longer than what was kept of them.

    Args:
        tokenizer: what made the rows.
        texts: one list of texts, or two of as many: the first and the second of each pair.
        masks: each row's attention mask, 1 for a token and 0 for padding.
        length: the most tokens that a row has.
        how: how the rows were made, beyond that, such as ``is_split_into_words=True``.
    """
    # A row that is not full was not cut. The others are encoded again with room for one more token:
    # those that were cut fill it.
    full = [row for row, mask in enumerate(masks) if sum(mask) >= length]
    was_cut = [False] * len(masks)
    if full:
        known = tokenizer.model_max_length
        tokenizer.model_max_length = max(known, length + 1)  # silences the warning of its length
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


def report_cut(cut: Mapping[str, tuple[int, int]], length: int) -> None:
    """Says how many texts were cut, in one line for all sets; nothing where none was.

    Args:
        cut: how many rows were cut, of how many, by the set's name.
        length: the most tokens that a row has.
    """
    said = [f"{rows} of {total} in {name}" for name, (rows, total) in cut.items() if rows]
    if said and launched.rank() == 0:
        logger.warning("texts were cut to %d tokens: %s", length, ", ".join(said))


def load_tokenizer(
    name: str, config: PretrainedConfig, of_words: bool = False, **settings: Any
) -> PreTrainedTokenizerBase:
    """A model's tokenizer.

    Args:
        name: the tokenizer's folder, or its name on the hub.
        config: the model's settings.
        of_words: it is to take texts as lists of words.
        settings: where to look for it, and its own settings, over those in its files.

    Raises:
        ValueError: it has tokens that the model does not have.
    """
    tokenizer = AutoTokenizer.from_pretrained(name, config=config, **settings)
    if of_words and not getattr(tokenizer, "add_prefix_space", True):
        # Else each word would be taken for a text's first.
        settings["add_prefix_space"] = True
        tokenizer = AutoTokenizer.from_pretrained(name, config=config, **settings)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {config.vocab_size}: "
            "they do not belong together"
        )
    return tokenizer


def _model_of(source: str) -> str:
    """What --model_name_or_path takes: a folder, also where one of its files is named."""
    return str(Path(source).parent) if os.path.isfile(source) else source


# What the scripts' users can do about the library's errors.
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
        f"{' and '.join(f'--{name}' for name in error.names)}; or --lora_path, whose file says so"
    ),
    MissingPartError: lambda error: path_flag(error.switch),
    NeedsMergingError: "utils/convert.py --to merged",
    SettingsError: fitting_flag,
}


def run_script(
    main: Callable[[], None], ways_out: Mapping[type[CheckpointError], WayOut] | None = None
) -> None:
    """Runs a script's `main`, as `process.run` does; errors are printed clear of progress bars.

    Errors of the library get the flags that resolve them.

    Args:
        main: the script.
        ways_out: those of its own, in place of `WAYS_OUT`'s.
    """
    with_ways_out = adding_ways_out({**WAYS_OUT, **(ways_out or {})})(main)
    process.run(with_ways_out, timeout="--ddp_timeout")
