"""Helpers of the scripts: logging, the `datasets` library, tokenizers, and one-line errors."""

import atexit
import functools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

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
from loralib.io.console import is_terminal
from loralib.training import launcher_env, process

from ..adaptation_settings import MissingLoraError
from ..adapter_kinds import fitting_flag, path_flag, without
from ..configuration_utils import PretrainedConfig
from ..models.auto.tokenization_auto import AutoTokenizer
from ..tokenization_utils_base import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def set_up_logging(level: str | None = None) -> None:
    """Shows messages on the console; see `process.set_up_logging`.

    Args:
        level: the value of --log_level; None for info.
    """
    process.set_up_logging(level or "info")
    # When `datasets` cannot read a file, it logs the same error that it raises.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)


def set_up_datasets(cache_dir: str | None) -> None:
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
            "reads it again: set %s to a folder of your own",
            datasets.config.HF_DATASETS_CACHE,
            # It takes precedence over HF_HOME, and clusters set it.
            "HF_DATASETS_CACHE" if os.environ.get("HF_DATASETS_CACHE") else "HF_HOME",
        )
        datasets.config.HF_DATASETS_CACHE = _temporary_cache()


_ROOM = 2**20  # bytes that a cache has to have room for; large data takes more


def _can_be_written_to(folder: str | os.PathLike) -> bool:
    """Returns whether files can be written to and locked in a folder, which is created if missing.

    It tries that: the disk or a quota may be full, and some network file systems have no locks.
    """
    folder = os.path.expanduser(folder)
    if folder.startswith("~"):  # the user's home folder is unknown
        return False
    try:
        os.makedirs(folder, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=folder) as scratch,
            # Without a timeout, older versions of filelock wait for locks that there are not.
            FileLock(Path(scratch, "lock"), timeout=0),
        ):
            Path(scratch, "file").write_bytes(bytes(_ROOM))
    except (OSError, NotImplementedError):  # the latter is from older versions of filelock
        return False
    return True


@functools.cache
def _temporary_cache() -> Path:
    """Creates a folder that is deleted when the process ends."""
    folder = tempfile.mkdtemp(prefix="datasets-")
    # Errors are ignored, because Windows cannot delete memory-mapped files, such as tables.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


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
    last = max(tokenizer.get_vocab().values())
    if last >= config.vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {last}, the model has {config.vocab_size} tokens: "
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
