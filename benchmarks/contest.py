"""Runs the benchmarks' contestants in turns, and prints their results as a table.

A script defines a `Benchmark` with its flags, and a function that returns the contestants and the
batches of each. `main` does the rest. Each contestant runs in a fresh process:
``workers/NAME_ours.py`` in this environment, ``workers/NAME_peers.py`` in the peers' environment,
or ``workers/NAME_loralib.py`` in the peers' environment with this project's `loralib`. They take
turns on the same batches, in an order that rotates from round to round, so that a busy machine
slows all of them.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from chart import Bar, draw
from tqdm import tqdm

from loralib.io.command_line import ArgumentParser, summary
from loralib.io.pictures import check_can_save, save_figure

ROOT = Path(__file__).resolve().parent
# A folder whose modules import each other by plain name.
NLG = ROOT.parent / "NLG" / "src"
# The flags in /proc/cpuinfo that affect how fast a CPU multiplies.
CPU_FLAGS = ("amx_bf16", "amx_fp16", "avx512_bf16", "avx512f", "avx2", "asimd", "bf16", "i8mm")


@dataclass(frozen=True)
class Contestant:
    """One row of the table. Its fields go into the worker's plan; benchmarks add their own.

    Args:
        name: the row's name.
        worker: "ours" or "peers", or "loralib" for this project's layers in the peers' environment.
        weights: the dtype in which (frozen) weights are held.
        autocast: the dtype of the products, if it differs.
    """

    name: str
    worker: str
    weights: str = "float32"
    autocast: str | None = None

    @property
    def dtype(self) -> str:
        """The dtype of most products."""
        return self.autocast or self.weights

    @property
    def precision(self) -> str:
        """The dtype, and how it is chosen."""
        means = [] if self.weights == "float32" else ["weights"]
        means += ["autocast"] if self.autocast else []
        return f"{self.dtype} {' + '.join(means)}".strip()

    @property
    def label(self) -> str:
        """The contestant's name and precision."""
        return f"{self.name}, {self.precision}"


# For each contestant and round: what its worker wrote, the timed batches, and the machine's rate.
Results = dict[Contestant, list[dict]]


@dataclass(frozen=True)
class Columns:
    """The columns of a table that are computed from the batches.

    Args:
        time: the title of the column of times.
        unit: how many units of that column make a second.
        per: batch -> what its seconds are divided by.
        gflop: contestant, batch -> billions of multiplications and additions.
        counts: columns of sums over all timed batches: title -> (contestant, batch -> number).
    """

    time: str
    unit: float
    per: Callable[[Any], float]
    gflop: Callable[[Contestant, Any], float]
    counts: Mapping[str, Callable[[Contestant, Any], int]] = field(default_factory=dict)


# A contestant, and the number of the round -> the plan of its worker (workers/timing.py).
PlanOf = Callable[[Contestant, int], dict]

# The products with weights in a layer: (rows, in, out, number of such products).
Products = Sequence[tuple[int, int, int, int]]
# The machine's speed at these products in GFLOP/s, before and after each run, by dtype.
Rates = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Measurement:
    """The contestants of a benchmark, what each runs, and the columns of the table.

    Args:
        contestants: all contestants; the peers' are left out without `--peers_python`.
        baseline_of: contestant -> the contestant that its times are divided by.
        plan_of: contestant, round -> what it runs.
        columns: the columns of the table.
        products: the products that are most of a step's arithmetic. If there are any, the table
            shows each contestant's speed as a share of the machine's speed at these.
    """

    contestants: Sequence[Contestant]
    baseline_of: Callable[[Any], Contestant]
    plan_of: PlanOf
    columns: Columns
    products: Products = ()


@dataclass(frozen=True)
class CountFlag:
    """A flag of one benchmark, an integer from 1.

    Args:
        names: the flag's names, such as ``--steps``.
        default: its default.
        help: what it counts.
    """

    names: tuple[str, ...]
    default: int
    help: str


STEPS = CountFlag(("--steps",), 6, "timed steps per turn")


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    Args:
        name: the name of the script, with which the names of its workers begin.
        description: the script's docstring; None with ``python -OO``.
        data_help: the help of `--data_dir`.
        rounds: the default number of rounds.
        flags: the flags that only this benchmark has.
        measure: the parsed flags -> the measurement.
        needs_peers: whether all contestants need the peers' environment.
    """

    name: str
    description: str | None
    data_help: str
    rounds: int
    flags: Sequence[CountFlag]
    measure: Callable[[argparse.Namespace], Measurement]
    needs_peers: bool = False


def by_dtype(baselines: Mapping[str, Contestant]) -> Callable[[Contestant], Contestant]:
    """Returns a `Measurement.baseline_of` that has one baseline for each dtype."""
    return lambda contestant: baselines[contestant.dtype]


def half_dtypes(device: str) -> list[str]:
    """Returns the half precisions that are measured on `device`."""
    return ["bfloat16"] if device == "cpu" else ["bfloat16", "float16"]


def has_dtype(device: str, dtype: str) -> bool:
    """Returns whether a dtype is measured: not if a GPU emulates it, as T4 and V100 do."""
    if (device, dtype) != ("cuda", "bfloat16"):
        return True
    return torch.cuda.is_bf16_supported(including_emulation=False)


# ------------------------------------------------------------------------------------------------
# Running
# ------------------------------------------------------------------------------------------------


def main(benchmark: Benchmark, argv: list[str] | None = None) -> int:
    """Parses the flags, measures all contestants and prints; returns 1 if a contestant failed."""
    args = parse(benchmark, argv)
    return compete(benchmark.name, benchmark.measure(args), args)


def compete(name: str, measurement: Measurement, args: argparse.Namespace) -> int:
    """Measures all contestants, and prints the table and the machine.

    Args:
        name: the benchmark's name.
        measurement: the contestants and what they run.
        args: the flags of `parse`.

    Returns:
        The exit status: 1 if a contestant failed.

    Raises:
        SystemExit: no contestant matches ``--only``.
    """
    load = os.getloadavg()[0]
    takes_part = [one for one in measurement.contestants if has_dtype(args.device, one.dtype)]
    chosen = [one for one in takes_part if args.only in one.label]
    if not chosen:
        known = "; ".join(one.label for one in takes_part)
        sys.exit(f"--only {args.only} matches no contestant; known: {known}")
    wanted = {*chosen, *map(measurement.baseline_of, chosen)}
    runners = [
        one for one in takes_part if one in wanted and (one.worker == "ours" or args.peers_python)
    ]
    results, rates, failed = take_turns(name, runners, measurement, args)
    rows = rows_of(results, measurement)
    about = machine(results, load, args.quick)
    print(table(rows, measurement.columns), about, sep="\n\n")
    for dtype, found in rates.items():
        print(f"- the machine at the step's products, {dtype}: {median(found):,.0f} GFLOP/s")
    for what, why in failed.items():
        print(f"- failed: {what}: {why}")
    if args.json:
        records = [{**asdict(one), "runs": runs} for one, runs in results.items()]
        args.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    if args.plot and not rows:
        print(f"- not drawn: {args.plot}: the table has no rows")
    elif args.plot:
        bars = [row.bar(measurement.columns) for row in rows]
        footer = re.sub("^- ", "", about, flags=re.MULTILINE)
        save_figure(draw(f"benchmarks/{name}.py", bars, footer), args.plot, dpi=110)
    return 1 if failed else 0


def take_turns(
    name: str, runners: Sequence[Contestant], measurement: Measurement, args: argparse.Namespace
) -> tuple[Results, Rates, dict[str, str]]:
    """Runs every contestant once per round.

    Args:
        name: the benchmark's name.
        runners: the contestants.
        measurement: what each of them runs.
        args: the flags of `parse`.

    Returns:
        The results of the contestants that never failed, the machine's rates that could be
        measured, and the errors by the label of what failed.
    """
    results, failed = {contestant: [] for contestant in runners}, {}
    rates = {one.dtype: [] for one in runners} if measurement.products else {}
    progress = tqdm([(a, b) for a in range(args.rounds) for b in range(len(runners))], unit="run")

    def note_rate(dtype: str) -> None:
        if dtype not in rates:
            return
        progress.set_postfix_str(f"products, {dtype}")
        try:
            rates[dtype].append(matrix_rate(dtype, measurement.products, args))
        except RuntimeError as error:
            failed[f"products, {dtype}"] = str(error)
            del rates[dtype]

    for number, turn in progress:
        contestant = runners[(number + turn) % len(runners)]
        if contestant not in results:
            continue
        plan = {"seed": 0, "threads": args.threads, "device": args.device}
        plan |= {**asdict(contestant), **measurement.plan_of(contestant, number)}
        python = sys.executable if contestant.worker == "ours" else args.peers_python
        note_rate(contestant.dtype)
        progress.set_postfix_str(contestant.label)
        try:
            run = run_worker(python, f"{name}_{contestant.worker}", plan)
        except RuntimeError as error:
            failed[contestant.label] = str(error)
            del results[contestant]
            continue
        note_rate(contestant.dtype)
        around = rates.get(contestant.dtype, ())[-2:]
        run |= {
            "batches": plan["batches"][plan["warmup"] :],
            # A shared machine may be faster or slower a minute later.
            "rate": fmean(around) if around else None,
        }
        results[contestant].append(run)
    return results, rates, failed


def matrix_rate(dtype: str, products: Products, args: argparse.Namespace) -> float:
    """Measures the machine's GFLOP/s at these products, with loralib's fastest way for each."""
    plan = {"worker": "ours", "seed": 0, "threads": args.threads, "device": args.device}
    plan |= {"dtype": dtype, "products": products}
    return run_worker(sys.executable, "matrix_rate_ours", plan)["gflops"]


def run_worker(python: str, name: str, plan: dict) -> dict:
    """Runs a worker, on at most one GPU, and returns what it wrote.

    Raises:
        RuntimeError: the worker failed; the message says how.
    """
    environment = dict(os.environ)
    given_path = environment.pop("PYTHONPATH", None)
    # Peers get no PYTHONPATH, because it may contain this project's transformers.
    if plan["worker"] == "ours":
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(NLG), given_path]))
    elif plan["worker"] == "loralib":
        environment["PYTHONPATH"] = str(ROOT.parent)
    if plan["threads"]:
        environment["OMP_NUM_THREADS"] = str(plan["threads"])
    if plan["device"] == "cuda":
        # Upstream's Trainer would divide each batch among all GPUs that it sees.
        seen = environment.get("CUDA_VISIBLE_DEVICES", "0")
        environment["CUDA_VISIBLE_DEVICES"] = seen.split(",")[0]
    with tempfile.TemporaryDirectory() as folder:
        given, written = Path(folder, "plan.json"), Path(folder, "result.json")
        given.write_text(json.dumps(plan), encoding="utf-8")
        command = [python, ROOT / "workers" / f"{name}.py", given, written]
        text = {"encoding": "utf-8", "errors": "replace"}
        done = subprocess.run(command, env=environment, capture_output=True, **text)
        if done.returncode == 0:
            return json.loads(written.read_text(encoding="utf-8"))
    if done.returncode < 0:
        raise RuntimeError(f"killed by signal {-done.returncode}")
    raise RuntimeError((done.stderr.strip() or f"exit status {done.returncode}").split("\n")[-1])


# ------------------------------------------------------------------------------------------------
# What is printed
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A contestant's results over all rounds.

    Args:
        contestant: the contestant.
        baseline: the contestant that its times are divided by.
        time: the median time, in the columns' unit.
        times_ours: the median quotient of both times, over the batches that both have run.
        counts: the sums of `Columns.counts`.
        gflops: the median GFLOP/s.
        share: the median over runs of its share of the machine's rate; None if a rate is unknown.
        peak_gib: the largest peak of all rounds.
    """

    contestant: Contestant
    baseline: Contestant
    time: float
    times_ours: float
    counts: Sequence[int]
    gflops: float
    share: float | None
    peak_gib: float

    def cells(self, shares: bool) -> list[str]:
        """Returns the row's cells in the table, with a column of shares or without."""
        return [
            self.contestant.name,
            self.contestant.precision,
            f"{self.time:.4g}",
            _quotient(self.times_ours),
            *(f"{count:,}" for count in self.counts),
            f"{self.gflops:,.0f}",
            *(["-" if self.share is None else f"{self.share:.0%}"] if shares else []),
            f"{self.peak_gib:.2f}",
        ]

    def bar(self, columns: Columns) -> Bar:
        """Returns the row's bar in the chart."""
        one = self.contestant
        return Bar(
            label=one.label,
            value=self.times_ours,
            says=f"{_quotient(self.times_ours)} ({self.time:.4g} {columns.time})",
            is_ours=one.worker != "peers",
            group=self.baseline,
        )


def rows_of(results: Results, measurement: Measurement) -> list[Row]:
    """Returns a row for each contestant whose baseline did not fail."""
    rows = []
    for one, runs in results.items():
        baseline = measurement.baseline_of(one)
        if baseline in results:
            rows.append(_row(one, runs, baseline, results[baseline], measurement.columns))
    return rows


def _row(
    contestant: Contestant,
    runs: list[dict],
    baseline: Contestant,
    baseline_runs: list[dict],
    columns: Columns,
) -> Row:
    steps = [step for run in runs for step in zip(run["batches"], run["seconds"], strict=True)]
    quotients = [  # on the batches that both have run
        own / other
        for run, base in zip(runs, baseline_runs, strict=True)
        for own, other in zip(_times(run, columns), _times(base, columns), strict=False)
    ]
    gflops_of = [
        [
            columns.gflop(contestant, batch) / seconds
            for batch, seconds in zip(run["batches"], run["seconds"], strict=True)
        ]
        for run in runs
    ]
    shares = [
        median(gflops) / run["rate"] if run["rate"] else None
        for gflops, run in zip(gflops_of, runs, strict=True)
    ]
    return Row(
        contestant,
        baseline,
        time=median(time for run in runs for time in _times(run, columns)),
        times_ours=median(quotients),
        counts=[
            sum(count(contestant, batch) for batch, _ in steps) for count in columns.counts.values()
        ],
        gflops=median(gflops for of_run in gflops_of for gflops in of_run),
        share=None if None in shares else median(shares),
        peak_gib=max(run["peak_bytes"] for run in runs) / 2**30,
    )


def table(rows: Sequence[Row], columns: Columns) -> str:
    """Returns the Markdown table."""
    titles = ["contestant", "precision", columns.time, "times ours", *columns.counts]
    shares = any(row.share is not None for row in rows)
    titles += ["GFLOP/s", *(["of the machine's"] if shares else []), "peak GiB"]
    rule = f"|---|---|{'---:|' * (len(titles) - 2)}"
    return "\n".join([_line(titles), rule, *(_line(row.cells(shares)) for row in rows)])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _quotient(value: float) -> str:
    """Formats with two decimals, or two significant digits below 0.1."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _times(run: dict, columns: Columns) -> list[float]:
    return [
        columns.unit * seconds / columns.per(batch)
        for batch, seconds in zip(run["batches"], run["seconds"], strict=True)
    ]


def machine(results: Results, load: float, is_quick: bool) -> str:
    """Returns the machine and the versions of packages as a Markdown list.

    Args:
        results: the results of all contestants.
        load: the system's load before the run.
        is_quick: whether it was a trial in a tiny shape, whose figures mean nothing.
    """
    info = Path("/proc/cpuinfo")
    known = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    about = dict(re.findall(r"^(.+?)\s*: (.+)$", known, re.M))
    says = about.get("flags", about.get("Features", "")).split()
    flags = ", ".join(flag for flag in CPU_FLAGS if flag in says) or "no known flags"
    runs = [run for of_one in results.values() for run in of_one]
    threads, gpus = {str(run["threads"]) for run in runs}, {run["gpu"] for run in runs}
    versions = {f"{name} {version}" for run in runs for name, version in run["versions"].items()}
    return (
        f"- CPU: {about.get('model name', platform.machine())} ({flags}), {os.cpu_count()} cores, "
        f"{'/'.join(threads)} threads, load before the run {load:.1f}; "
        f"GPU: {', '.join(gpu or 'none' for gpu in gpus)}\n"
        f"- Python {platform.python_version()}, {', '.join(sorted(versions))}"
        + ("\n- --quick: a tiny shape, whose figures mean nothing" if is_quick else "")
    )


# ------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------


def parse(benchmark: Benchmark, argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line; ends the process if flags do not fit."""
    parser = ArgumentParser(description=summary(benchmark.description))
    add, rounds = parser.add_argument, benchmark.rounds
    alone = "needed here" if benchmark.needs_peers else "default: this project alone"
    add("--peers_python", help=f"Python with requirements-peers.txt ({alone})")
    add("--data_dir", type=Path, help=benchmark.data_help)
    add("--vocab", type=Path, help="folder of a byte-level BPE; goes with --data_dir")
    add("--rounds", type=positive, default=rounds, help="turns per contestant (%(default)s)")
    add("--threads", type=positive, help="CPU threads (default: PyTorch's)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where to compute (%(default)s)")
    add("--quick", action="store_true", help="a tiny shape, to check that the script works")
    add(
        "--only",
        metavar="TEXT",
        default="",
        help="only contestants with TEXT in name or precision, and what they are compared with",
    )
    add("--json", type=Path, metavar="OUT", help="also write every timed batch's seconds to OUT")
    add("--plot", type=Path, metavar="FILE", help="also draw the table (.png, .svg, .pdf)")
    for flag in benchmark.flags:
        add(*flag.names, type=positive, default=flag.default, help=f"{flag.help} (%(default)s)")
    args = parser.parse_args(argv)
    if (args.data_dir is None) != (args.vocab is None):
        parser.error("give both --data_dir and --vocab, or neither")
    if benchmark.needs_peers and not args.peers_python:
        parser.error("--peers_python is needed: all models here are upstream's")
    if args.peers_python and not shutil.which(args.peers_python):
        parser.error(f"--peers_python: {args.peers_python} is not a program")
    # Outputs are checked now, not after hours of measuring.
    if args.json and not args.json.parent.is_dir():
        parser.error(f"--json: {args.json}: there is no folder {args.json.parent}")
    if args.plot:
        try:
            check_can_save(args.plot)
        except (OSError, ValueError) as error:
            parser.error(f"--plot: {error}")
    return args


def positive(text: str) -> int:
    """Returns the value of a flag that is an integer from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number
