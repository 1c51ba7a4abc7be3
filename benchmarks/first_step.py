"""Measures how long training scripts take from start to the end of their first step, on a CPU.

    python benchmarks/first_step.py --data_dir GLUE --vocab VOCAB

The models have RoBERTa-base's and GPT-2 small's shapes and LoRA, and random weights that are read
from disk. run_glue.py trains on SST-2, once with new texts and once when their tokens are cached.
gpt2_ft.py trains on as many rows as E2E has. Every run is a fresh process, ended after its first
step. The first round is not counted. Prints Markdown; README.md says how to read it.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import contest
import gpt2_e2e
import roberta_step
import torch
from tqdm import tqdm
from vocab import vocab_files

import loralib
from loralib.io.command_line import ArgumentParser, summary

RUN_GLUE = contest.ROOT.parent / "examples" / "text-classification" / "run_glue.py"
GPT2_FT = contest.NLG / "gpt2_ft.py"
# What both scripts log after their first step.
FIRST_STEP = re.compile(r"\bstep 1 of \d+")
# Rows of SST-2's training set, and of E2E's.
TEXTS, ROWS = 67_349, 42_001
LORA_OF_ROBERTA = ("--apply_lora", "--lora_r", "8", "--lora_alpha", "16")


@dataclass(frozen=True)
class Start:
    """A command that is timed.

    Args:
        label: the name of its row in the table.
        command: the arguments of the interpreter.
        is_new: whether the cache of its texts' tokens is removed before.
    """

    label: str
    command: Sequence[str]
    is_new: bool = False


def main(argv: list[str] | None = None) -> int:
    """Parses the flags, measures and prints."""
    args, load = parse(argv), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        starts = prepare(Path(folder), args)
        seconds: dict[str, list[float]] = {start.label: [] for start in starts}
        turns = [(number, start) for number in range(1 + args.rounds) for start in starts]
        for number, start in tqdm(turns, unit="run"):
            found = seconds_of(start, Path(folder, "cache"))
            if number > 0:  # in round 0, files are not yet in the page cache
                seconds[start.label].append(found)
    measured_on = {contest.Contestant("this project", "ours"): [about()]}
    print(table(seconds), contest.machine(measured_on, load, args.quick), sep="\n\n")
    return 0


def about() -> dict:
    """Returns versions, threads and GPU, as a worker's result has them."""
    versions = {"this project": loralib.__version__, "torch": torch.__version__}
    return {"versions": versions, "threads": torch.get_num_threads(), "gpu": None}


def table(seconds: dict[str, list[float]]) -> str:
    """Returns the Markdown table: each command's median, least and most seconds."""
    lines = ["| from its start to the end of the first step | s | least | most |"]
    lines += ["|---|---:|---:|---:|"]
    for label, found in seconds.items():
        numbers = (median(found), min(found), max(found))
        lines.append(f"| {label} | {' | '.join(f'{number:.2f}' for number in numbers)} |")
    return "\n".join(lines)


def seconds_of(start: Start, cache: Path) -> float:
    """Times a command until it logs its first step, and then ends it.

    Args:
        start: the command.
        cache: a folder for its caches, one of which is that of texts' tokens.

    Raises:
        SystemExit: the command ended before its first step.
    """
    tokens = cache / "tokens"
    if start.is_new:
        shutil.rmtree(tokens, ignore_errors=True)
    folders = {"XDG_CACHE_HOME": str(cache), "HF_HOME": str(tokens)}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = inherited | folders | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    said = []
    begun = time.perf_counter()
    with ended(
        subprocess.Popen(
            [sys.executable, *start.command],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    ) as process:
        for line in process.stderr:
            if FIRST_STEP.search(line):
                return time.perf_counter() - begun
            said.append(line)
    sys.exit(f"{start.label} failed: {''.join(said[-1:]).strip()}")


@contextmanager
def ended(process: subprocess.Popen):
    """Kills a process after the block, whatever it is doing."""
    with process:
        try:
            yield process
        finally:
            process.kill()


# ------------------------------------------------------------------------------------------------
# What is run
# ------------------------------------------------------------------------------------------------


def prepare(folder: Path, args: argparse.Namespace) -> list[Start]:
    """Writes models and data into a folder; returns the commands to time."""
    base, gpt2, rows = folder / "base", folder / "gpt2.pt", folder / "rows.jsonl"
    glue = args.data_dir or folder / "glue"
    if args.data_dir is None:
        write_texts(glue / "SST-2", 400 if args.quick else TEXTS)
    write_vocabulary(base, args.vocab, glue)
    write_models(base, gpt2, args.quick)
    write_rows(rows, 400 if args.quick else ROWS)
    of_glue = [
        *(str(RUN_GLUE), "--model_name_or_path", str(base), "--task_name", "sst2"),
        *("--data_dir", str(glue), "--output_dir", str(folder / "sst2"), "--overwrite_output_dir"),
        *("--do_train", "--max_steps", "1", "--logging_steps", "1", "--max_seq_length", "128"),
        *("--per_device_train_batch_size", "16", "--report_to", "none", "--disable_tqdm"),
        *LORA_OF_ROBERTA,
    ]
    of_gpt2 = [
        *(str(GPT2_FT), "--platform", "local"),
        *("--train_data", str(rows), "--valid_data", str(rows)),
        *("--model_card", "gpt2.xs" if args.quick else "gpt2.sm", "--init_checkpoint", str(gpt2)),
        *("--lora_dim", "4", "--lora_alpha", "32", "--train_batch_size", "8", "--max_step", "1"),
        *("--log_interval", "1", "--report_to", "none", "--work_dir", str(folder / "e2e")),
    ]
    starts = [Start("importing PyTorch, to compare", ["-c", IMPORT_ALONE])]
    for flags in ([], ["--bf16"]):
        ending = " ".join(["", *flags])
        starts += [
            Start(f"run_glue.py{ending}, texts that are new", [*of_glue, *flags], is_new=True),
            Start(f"run_glue.py{ending}, again", [*of_glue, *flags]),
            Start(f"gpt2_ft.py{ending}", [*of_gpt2, *flags]),
        ]
    return starts


IMPORT_ALONE = "import sys, torch; print('step 1 of 1', file=sys.stderr)"


def write_texts(folder: Path, count: int) -> None:
    """Writes a task of random words in the format of SST-2."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(4000)]
    folder.mkdir(parents=True)
    for name, size in (("train.tsv", count), ("dev.tsv", 100)):
        with (folder / name).open("w", encoding="utf-8") as file:
            print("sentence", "label", sep="\t", file=file)
            for number in range(size):
                text = " ".join(chance.choices(words, k=chance.randint(2, 20)))
                print(text, number % 2, sep="\t", file=file)


def write_vocabulary(folder: Path, vocab: Path | None, glue: Path) -> None:
    """Writes a byte-level BPE as RoBERTa's files: the given one, or one trained on the texts."""
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir()
    if vocab is not None:
        for source, name in zip(vocab_files(vocab), ("vocab.json", "merges.txt"), strict=True):
            shutil.copy(source, folder / name)
        return
    tokenizer = ByteLevelBPETokenizer()
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    train = glue / "SST-2" / "train.tsv"
    tokenizer.train([str(train)], vocab_size=5000, special_tokens=specials, show_progress=False)
    tokenizer.save_model(str(folder))


def write_models(base: Path, gpt2: Path, quick: bool) -> None:
    """Writes random weights of RoBERTa-base to a folder, and of GPT-2 small to a file."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    sys.path.insert(0, str(contest.NLG))
    from model import GPT2LMModel, config_of

    shape = roberta_step.QUICK if quick else roberta_step.ROBERTA_BASE
    RobertaForMaskedLM(RobertaConfig(**shape)).save_pretrained(base)
    torch.save(GPT2LMModel(config_of("gpt2.xs" if quick else "gpt2.sm")).state_dict(), gpt2)


def write_rows(path: Path, count: int) -> None:
    """Writes random rows as long as E2E's, in the format of gpt2_encode.py."""
    chance = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            lengths = chance.choice(gpt2_e2e.ROWS)
            ids = ([chance.randrange(gpt2_e2e.END_OF_TEXT) for _ in range(n)] for n in lengths)
            print(json.dumps(dict(zip(("context", "completion"), ids, strict=True))), file=file)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line; ends the process if flags do not fit."""
    parser = ArgumentParser(description=summary(__doc__))
    add = parser.add_argument
    add("--data_dir", type=Path, help="a folder of GLUE with SST-2 (default: random words)")
    add("--vocab", type=Path, help="folder of a byte-level BPE; goes with --data_dir")
    add("--rounds", type=contest.positive, default=5, help="how often each is timed (%(default)s)")
    add("--quick", action="store_true", help="tiny models and sets, to check that the script works")
    args = parser.parse_args(argv)
    if (args.data_dir is None) != (args.vocab is None):
        parser.error("give both --data_dir and --vocab, or neither")
    if args.data_dir and not (args.data_dir / "SST-2" / "train.tsv").is_file():
        parser.error(f"{args.data_dir} has no SST-2/train.tsv: --data_dir takes a folder of GLUE")
    return args


if __name__ == "__main__":
    sys.exit(main())
