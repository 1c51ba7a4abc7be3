"""Runs one of the release's recipes: prints the command of a section of recipes.ini, and runs it.

    python recipe.py roberta_base_rte [--small BASE DATA] [--print] [flags of run_glue.py]

Each script in this folder runs the recipe of its own name: `bash roberta_base_rte.sh`.
"""

import argparse
import configparser
import importlib.util
import itertools
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TABLE = HERE / "recipes.ini"
SCRIPT = HERE.parent / "examples" / "text-classification" / "run_glue.py"

USAGE = """\
environment variables:
  NPROC             number of processes, one a GPU, or on the CPU where there is none ({nproc})
  MNLI_CHECKPOINT   file of LoRA weights that MRPC, RTE and STS-B start from ({start})
  MASTER_PORT       port over which the processes find each other (29500)

Flags of run_glue.py follow the recipe's own, and override them: another
--learning_rate, --data_dir for GLUE's files in a folder instead of the hub, --output_dir,
--overwrite_output_dir False to resume a run that was stopped; --estimate only says what the
recipe would take. For all of them:
  python {script} --help
"""


@dataclass(frozen=True)
class Recipe:
    """One section of recipes.ini.

    Args:
        name: the name of the section, and of the shell script without ``.sh``.
        nproc: the number of processes, one per GPU.
        flags: run_glue.py's flags by name, without the dashes; None for a flag without a value.
        after: the name of the recipe whose LoRA weights this one starts from.
    """

    name: str
    nproc: int
    flags: Mapping[str, str | None]
    after: str | None = None

    @property
    def script(self) -> Path:
        """The shell script that runs it."""
        return HERE / f"{self.name}.sh"

    @property
    def output_dir(self) -> str:
        """The default output folder, relative to the current folder."""
        return f"output/{self.name}"

    def arguments(self, extra: Sequence[str] = ()) -> list[str]:
        """Returns run_glue.py's arguments, with `extra` flags after the recipe's own."""
        flags = {**self.flags, "output_dir": self.flags.get("output_dir", self.output_dir)}
        own = []
        for name, value in flags.items():
            own += [f"--{name}"] if value is None else [f"--{name}", value]
        return [*own, *extra]

    def estimate(self, nproc: int, extra: Sequence[str] = ()) -> list[str]:
        """Returns the command that estimates, in one process, the recipe on `nproc` devices."""
        return [
            "python",
            _shown(SCRIPT),
            *self.arguments(["--estimate_devices", str(nproc), *extra]),
        ]

    def command(self, nproc: int, extra: Sequence[str] = (), port: str | None = None) -> list[str]:
        """Returns the full command, beginning with ``python``, for the current folder."""
        launcher = ["-m", "torch.distributed.launch", f"--nproc_per_node={nproc}"]
        launcher += [f"--master_port={port}"] if port else []
        return ["python", *launcher, _shown(SCRIPT), *self.arguments(extra)]


def _shown(path: Path) -> str:
    """Returns the shorter of a path's relative and absolute forms."""
    return min(os.path.relpath(path), str(path), key=len)


# ---- the table ----


def _read_table() -> configparser.ConfigParser:
    table = configparser.ConfigParser(
        delimiters=("=",), inline_comment_prefixes=("#",), allow_no_value=True, interpolation=None
    )
    table.optionxform = str
    table.read_string(TABLE.read_text(encoding="utf-8"), str(TABLE))
    return table


def _settings(table: configparser.ConfigParser, section: str) -> dict[str, str | None]:
    """Returns a section's settings, which override those of the section named by ``like``."""
    own = dict(table[section])
    like = own.pop("like", None)
    return {**_settings(table, like), **own} if like else own


def read_recipes() -> dict[str, Recipe]:
    """Reads all recipes by name, in the order of recipes.ini."""
    table = _read_table()
    recipes = {}
    for name in table.sections():
        if "like" in table[name]:
            flags = _settings(table, name)
            nproc, after = int(flags.pop("nproc")), flags.pop("after", None)
            recipes[name] = Recipe(name, nproc, flags, after)
    return recipes


def read_environment() -> dict[str, str]:
    """Reads the environment variables that every recipe sets."""
    return dict(_read_table()["environment"])


def small(recipe: Recipe, base: str, data: str) -> Recipe:
    """Returns the recipe as a trial of a few steps, in one process, with its own output folder.

    Settings that do not concern size are kept, except for fp16 on machines without a GPU.

    Args:
        recipe: the recipe.
        base: the folder of a small model of the recipe's family.
        data: the folder of GLUE's TSV files.
    """
    swapped = {**_read_table()["small"], "model_name_or_path": base, "data_dir": data}
    swapped["output_dir"] = f"{recipe.output_dir}_small"
    if "fp16" in recipe.flags and gpu_count() == 0:
        swapped["fp16"] = "False"
    return replace(recipe, nproc=1, flags={**recipe.flags, **swapped})


# ---- checks before anything starts ----


def gpu_count() -> int:
    """Returns the number of visible GPUs."""
    import torch  # imported here, because it takes seconds and not every call needs it

    return torch.cuda.device_count()


def _given(arguments: Sequence[str], name: str) -> str | None:
    """Returns a flag's value, the last one if given several times, or None if not given."""
    value = None
    for word, following in itertools.pairwise([*arguments, ""]):
        if word == name:
            value = following
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


def _without(arguments: Sequence[str], name: str) -> list[str]:
    """Returns arguments without a flag and its value, if it has one."""
    kept: list[str] = []
    is_left_out = False
    for word in arguments:
        if word.startswith("--"):
            is_left_out = word.partition("=")[0] == name
        if not is_left_out:
            kept.append(word)
    return kept


def check_flags(recipe: Recipe, extra: Sequence[str]) -> None:
    """Checks that run_glue.py accepts the recipe's flags together with the added ones.

    Checked here because an error in the launcher's processes would be lost in the launcher's long
    report of their exit.

    Raises:
        SystemExit: a flag is not accepted; the error has been printed.
        OSError, ValueError: see `_check_files`.
    """
    sys.path.append(str(SCRIPT.parent))
    script = importlib.import_module(SCRIPT.stem)  # takes seconds
    from transformers.fine_tuning.script import parser_of

    parser = parser_of(script.FLAGS, script.__doc__)
    parser.prog = recipe.script.name
    # The launcher adds it, too. Without it, the shell's environment could define the processes.
    given = ["--local_rank", "0", *recipe.arguments(extra)]
    model_args, data_args, args, _ = parser.parse_args_into_dataclasses(
        given, args_filename=str(SCRIPT.with_suffix(".args"))
    )
    settings = model_args.config_name or model_args.model_name_or_path
    _check_files(settings, data_args, script.splits_of, args)


def _check_files(
    settings: str, data_args: Any, splits_of: Callable[..., list[str]], args: Any
) -> None:
    """Checks that local files of the model and of GLUE exist, and that the texts' length fits.

    Anything on the hub is left to run_glue.py.

    Args:
        settings: the folder or name of the model's settings.
        data_args: run_glue.py's flags for the data.
        splits_of: its function that returns the splits that a run uses.
        args: its flags for training.

    Raises:
        OSError: a folder or a file does not exist.
        ValueError: the model is neither RoBERTa nor DeBERTa, or has too few positions.
    """
    from loralib.io.hub import is_a_path
    from transformers import AutoConfig
    from transformers.data.processors.glue import glue_file, glue_task
    from transformers.fine_tuning.lengths import check_length

    if is_a_path(settings) or os.path.isdir(settings):
        check_length(AutoConfig.from_pretrained(settings), data_args.max_seq_length)
    if data_args.data_dir is not None and data_args.task_name is not None:
        task = glue_task(data_args.task_name)
        for split in splits_of(task, args):
            glue_file(task, data_args.data_dir, split)


def check_environment() -> None:
    """Checks that this Python has the packages that a run needs.

    Raises:
        OSError: a package is missing, for instance because the environment is not activated.
    """
    for package in ("torch", "loralib", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise OSError(
                f"{sys.executable} has no {package}: activate the environment first, as by "
                "`source .venv/bin/activate` (docs/installing.md makes it)"
            )


def check_small(folders: Sequence[str]) -> None:
    """Checks that the folders of --small exist.

    Raises:
        FileNotFoundError: a folder does not exist.
    """
    for folder in folders:
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"--small {folder}: no such folder")


def check_start(recipe: Recipe, extra: Sequence[str]) -> None:
    """Checks that the LoRA weights from which the recipe starts exist and fit its model.

    Raises:
        FileNotFoundError: they do not exist; the message says which recipe makes them.
        ValueError: the file holds a full model, or is for a model of another size.
    """
    path = _given(recipe.arguments(extra), "--lora_path")
    if path is None:
        return
    path = os.path.expanduser(path)  # as run_glue.py's parser reads --lora_path=~/file
    if os.path.exists(path):
        if recipe.after is not None:
            tensors = _adapter_tensors(recipe, path)
            flag = "--lora_path" if _given(extra, "--lora_path") else "MNLI_CHECKPOINT"
            base = _given(recipe.arguments(extra), "--model_name_or_path")
            _check_size(flag, path, tensors, os.path.expanduser(base))
        return
    if recipe.after is None or _given(extra, "--lora_path") is not None:
        raise FileNotFoundError(f"--lora_path {path}: no such file")
    first = read_recipes()[recipe.after]
    made = f"{first.output_dir}/pytorch_model_lora.bin"
    raise FileNotFoundError(
        f"{path}: no such file; {first.script.name} makes it as {made}: run that, then "
        f"MNLI_CHECKPOINT={made} bash {_shown(recipe.script)}"
    )


def _adapter_tensors(recipe: Recipe, path: str) -> Mapping[str, Any]:
    """Reads the tensors of LoRA weights; returns {} on errors that run_glue.py reports as well.

    Full models are refused here, because run_glue.py's advice does not apply to a recipe.

    Raises:
        ValueError: the file holds a full model; the message says how to get LoRA weights.
    """
    from loralib.adapters.formats import read_adapter  # takes seconds
    from loralib.errors import CheckpointError, FullModelError, ModelAsAdapterError

    first = read_recipes()[recipe.after]
    try:
        return read_adapter(path).tensors
    except ModelAsAdapterError as error:
        raise ValueError(
            f"{path}: is a model without LoRA, but the recipe starts from LoRA weights: "
            f"{first.script.name} makes them as {first.output_dir}/pytorch_model_lora.bin"
        ) from error
    except FullModelError as error:
        split = f"{_shown(HERE.parent / 'utils' / 'split_lora.py')} {shlex.quote(path)}"
        raise ValueError(
            f"{path}: holds a full model: python {split} mnli_lora.bin takes its LoRA weights out; "
            f"then MNLI_CHECKPOINT=mnli_lora.bin bash {_shown(recipe.script)}"
        ) from error
    except CheckpointError:
        return {}  # run_glue.py reports the error and what to do


def _check_size(flag: str, path: str, tensors: Mapping[str, Any], base: str) -> None:
    """Refuses LoRA weights for a model of another size, if the base is a folder.

    run_glue.py would list the tensors that do not fit, without naming MNLI_CHECKPOINT.

    Args:
        flag: the flag or variable that names the weights.
        path, tensors: the weights.
        base: the model's folder or name.

    Raises:
        ValueError: the weights have more layers than the model, or another width.
    """
    from loralib.module_names import layer_of
    from transformers import AutoConfig

    lora = {name: tensor for name, tensor in tensors.items() if ".lora_" in name}
    if not lora or not os.path.isdir(base):
        return
    config = AutoConfig.from_pretrained(base)
    layers = 1 + max(layer_of(name) or 0 for name in lora)
    # Feed-forward layers have other widths.
    widths = {
        t.shape[-1] for name, t in lora.items() if name.endswith("attention.self.query.lora_A")
    }
    width = max(widths, default=config.hidden_size)
    if layers > config.num_hidden_layers or width != config.hidden_size:
        raise ValueError(
            f"{flag} {path}: is for a model with {layers} layers of width {width}, but {base} has "
            f"{config.num_hidden_layers} of width {config.hidden_size}: give LoRA weights of this "
            "base"
        )


def fitted(recipe: Recipe, gpus: int) -> tuple[int, list[str]]:
    """Returns the processes and extra flags that keep the recipe's batch size on fewer GPUs."""
    # The largest number of processes, at most one per GPU, that divides the recipe's.
    fewer = max(n for n in range(1, max(gpus, 1) + 1) if recipe.nproc % n == 0)
    flags = []
    if fewer < recipe.nproc:
        flags += ["--gradient_accumulation_steps", str(recipe.nproc // fewer)]
    if gpus == 0 and "fp16" in recipe.flags:
        flags += ["--fp16", "False", "--bf16"]
    return fewer, flags


def check_gpus(recipe: Recipe, extra: Sequence[str]) -> None:
    """Checks that each of the recipe's processes has a GPU; a single process needs none.

    Raises:
        ValueError: there are too few GPUs; the message has an equivalent command for them.
    """
    if recipe.nproc == 1 or recipe.nproc <= (gpus := gpu_count()):
        return
    fewer, flags = fitted(recipe, gpus)
    if gpus == 0:
        extra = _without(extra, "--cuda_graphs")
    raise ValueError(
        f"the recipe takes {recipe.nproc} GPUs, but this machine has {gpus}; for the same batches: "
        f"NPROC={fewer} bash {_shown(recipe.script)} {shlex.join([*extra, *flags])}"
    )


def batch_note(recipe: Recipe, nproc: int, extra: Sequence[str]) -> str | None:
    """Returns a note if an update has another number of examples than in the recipe, else None."""

    def examples(arguments: Sequence[str], processes: int) -> int:
        batch = _given(arguments, "--per_device_train_batch_size")
        batches = _given(arguments, "--gradient_accumulation_steps")
        return int(batch) * int(batches or 1) * processes

    release = examples(recipe.arguments(), recipe.nproc)
    try:
        here = examples(recipe.arguments(extra), nproc)
    except ValueError:
        return None  # run_glue.py reports what is wrong with the flag
    if here == release:
        return None
    return f"each update uses {here} examples here, but {release} in the release"


# ---- the program ----


def about(recipe: Recipe) -> str:
    """Returns the recipe's description, which is the comment at the top of its shell script."""
    lines = recipe.script.read_text(encoding="utf-8").splitlines()[1:]
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))


def written_out(environment: Mapping[str, str], command: Sequence[str]) -> str:
    """Formats a command for the shell, with one flag per line."""
    lines = [" ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())]
    end = command.index(_shown(SCRIPT)) + 1
    lines.append(shlex.join(command[:end]))
    for word in command[end:]:
        if word.startswith("--"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n    ".join(lines)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses this program's arguments; returns them, and those to pass on to run_glue.py."""
    recipes = read_recipes()
    parser = argparse.ArgumentParser(
        prog="recipe.py",
        usage="%(prog)s RECIPE [--small BASE DATA] [--print] [flags]",
        description=textwrap.fill(
            "Run one of the release's recipes, the sections of recipes.ini. RECIPE --help "
            f"describes one of them: {', '.join(recipes)}."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", choices=recipes, metavar="RECIPE", help=argparse.SUPPRESS)
    parser.add_argument(
        "--small",
        nargs=2,
        metavar=("BASE", "DATA"),
        help="a trial: a few steps from a small base of the same family (a folder), on GLUE's "
        "files in a folder, in one process unless NPROC says otherwise",
    )
    parser.add_argument("--print", action="store_true", help="show the command, do not run it")
    if argv and argv[0] in recipes:
        recipe = recipes[argv[0]]
        parser.prog = recipe.script.name
        parser.usage = f"bash {_shown(recipe.script)} [--small BASE DATA] [--print] [flags]"
        parser.description = about(recipe)
        parser.epilog = USAGE.format(
            nproc=recipe.nproc,
            start=recipe.flags.get("lora_path", "not used by this recipe"),
            script=_shown(SCRIPT),
        )
    return parser.parse_known_args(argv)


def chosen(args: argparse.Namespace) -> Recipe:
    """Returns the chosen recipe, with MNLI_CHECKPOINT and --small applied."""
    recipe = read_recipes()[args.recipe]
    checkpoint = os.environ.get("MNLI_CHECKPOINT")
    if recipe.after and checkpoint:
        recipe = replace(recipe, flags={**recipe.flags, "lora_path": checkpoint})
    return small(recipe, *args.small) if args.small else recipe


def processes(recipe: Recipe) -> int:
    """Returns the number of processes, from NPROC (a number or a word of PyTorch's launcher).

    Raises:
        ValueError: NPROC is neither, or there are no such devices.
    """
    # Empty counts as unset, as in a shell's ${NPROC:-8}.
    nproc = os.environ.get("NPROC") or str(recipe.nproc)
    if nproc in ("auto", "cpu", "gpu", "xpu"):
        from torch.distributed.run import determine_local_world_size  # takes seconds

        try:
            return int(determine_local_world_size(nproc))
        except ValueError as error:
            raise ValueError(f"NPROC={nproc}: this machine has none") from error
    if not re.fullmatch(r"\s*\+?0*[1-9][0-9]*\s*", nproc):
        raise ValueError(f"NPROC={nproc}: must be a number of processes, at least 1")
    return int(nproc)


def main(argv: Sequence[str] | None = None) -> None:
    """Checks what a recipe needs, prints its command, and replaces this process with it."""
    args, extra = parse(sys.argv[1:] if argv is None else argv)
    try:
        estimated = "--estimate" in extra
        is_run = not args.print and not estimated
        # Checks first what the user gave, and then what is needed besides.
        if is_run or estimated:
            check_environment()
        if is_run:
            check_small(args.small or ())
        recipe = chosen(args)
        if is_run and (extra or args.small):
            check_flags(recipe, extra)
        if is_run:
            check_start(recipe, extra)
        nproc = processes(recipe)
        if is_run and not os.environ.get("NPROC"):
            check_gpus(recipe, extra)
    except (OSError, ValueError) as error:
        sys.exit(f"{args.recipe}.sh: error: {error}")
    environment = read_environment()
    if estimated:
        command = recipe.estimate(nproc, extra)
    else:
        command = recipe.command(nproc, extra, os.environ.get("MASTER_PORT"))
    print(written_out(environment, command), flush=True)
    if args.print:
        return
    note = None if args.small else batch_note(recipe, nproc, extra)
    if note:
        print(f"{args.recipe}.sh: {note}", file=sys.stderr, flush=True)
    os.execve(sys.executable, [sys.executable, *command[1:]], {**os.environ, **environment})


if __name__ == "__main__":
    try:
        from loralib.training.process import run
    except ModuleNotFoundError:  # see `check_environment`
        main()
    else:
        run(main)
