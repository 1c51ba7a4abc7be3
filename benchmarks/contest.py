"""What the benchmarks share: the command line, contestants that take turns, and the table.

A benchmark is a `Benchmark`: its flags, and a function that says who runs what on which batches;
`main` does the rest. Each contestant runs in a fresh process, ``workers/NAME_ours.py`` in this
environment, ``workers/NAME_peers.py`` in that of the peers or ``workers/NAME_loralib.py``, which
has this project's `loralib` besides. They take turns, in an order that rotates from round to round,
on the same batches, so that a busy machine slows all.
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

from loralib.io.command_line import ArgumentParser
from loralib.io.pictures import check_can_save, save_figure

ROOT = Path(__file__).resolve().parent
# Its modules import each other by plain name.
NLG = ROOT.parent / "NLG" / "src"
# What a CPU says of itself that decides how fast it multiplies.
CPU_FLAGS = ("amx_bf16", "amx_fp16", "avx512_bf16", "avx512f", "avx2", "asimd", "bf16", "i8mm")


@dataclass(frozen=True)
class Contestant:
    """One row of the table. The fields go into the worker's plan; benchmarks add theirs.

    Args:
        name: what the row is called.
        worker: "ours" or "peers"; or "loralib", this project's layers in the peers' environment.
        weights: dtype that (frozen) weights are held in.
        autocast: dtype of the products, where it is another.
    """

    name: str
    worker: str
    weights: str = "float32"
    autocast: str | None = None

    @property
    def dtype(self) -> str:
        """What most products are computed in."""
        return self.autocast or self.weights

    @property
    def precision(self) -> str:
        """The dtype, and how it is chosen."""
        means = [] if self.weights == "float32" else ["weights"]
        means += ["autocast"] if self.autocast else []
        return f"{self.dtype} {' + '.join(means)}".strip()

    @property
    def label(self) -> str:
        """Its name and precision."""
        return f"{self.name}, {self.precision}"


# Of each contestant and round: what its worker wrote, the timed batches, and the machine's rate.
Results = dict[Contestant, list[dict]]


@dataclass(frozen=True)
class Columns:
    """What a table says of the batches.

    Args:
        time: the title of the time's column.
        unit: how many of its units make a second.
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

# Of a layer: (rows, in, out) of a product with a weight, and how many there are.
Products = Sequence[tuple[int, int, int, int]]
# How fast the machine multiplied, in GFLOP/s, before and after each run, by dtype.
Rates = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Measurement:
    """Who runs what.

    Args:
        contestants: all that take part; those of the peers are left out without `--peers_python`.
        baseline_of: the contestant that another one's times are divided by.
        plan_of: what each of them runs.
        columns: of the table.
        products: what most of a step's arithmetic is; the table then says what share of the
            machine's rate at these a contestant has. Empty, it does not.
    """

    contestants: Sequence[Contestant]
    baseline_of: Callable[[Any], Contestant]
    plan_of: PlanOf
    columns: Columns
    products: Products = ()


@dataclass(frozen=True)
class CountFlag:
    """A flag of a benchmark's own, an integer from 1.

    Args:
        names: such as ``--steps``.
        default: its value.
        help: what it counts.
    """

    names: tuple[str, ...]
    default: int
    help: str


STEPS = CountFlag(("--steps",), 6, "timed steps a turn")


@dataclass(frozen=True)
class Benchmark:
    """What sets a benchmark apart.

    Args:
        name: the script's and its workers'.
        description: the script's docstring.
        data_help: what `--data_dir` is.
        rounds: how many there are by default.
        flags: of its own.
        measure: the parsed flags -> who runs what.
        needs_peers: whether nobody can run without the peers' environment.
    """

    name: str
    description: str
    data_help: str
    rounds: int
    flags: Sequence[CountFlag]
    measure: Callable[[argparse.Namespace], Measurement]
    needs_peers: bool = False


def by_dtype(baselines: Mapping[str, Contestant]) -> Callable[[Contestant], Contestant]:
    """The `Measurement.baseline_of` by which contestants of one dtype have one baseline."""
    return lambda contestant: baselines[contestant.dtype]


def half_dtypes(device: str) -> list[str]:
    """The half precisions that are measured on `device`."""
    return ["bfloat16"] if device == "cpu" else ["bfloat16", "float16"]


def has_dtype(device: str, dtype: str) -> bool:
    """Whether products of a dtype are measured: not where a GPU emulates it, as T4 and V100 do."""
    if (device, dtype) != ("cuda", "bfloat16"):
        return True
    return torch.cuda.is_bf16_supported(including_emulation=False)


# ------------------------------------------------------------------------------------------------
# Running
# ------------------------------------------------------------------------------------------------


def main(benchmark: Benchmark, argv: list[str] | None = None) -> int:
    """Parses the flags, measures all contestants and prints; 1 where a contestant failed."""
    args = parse(benchmark, argv)
    return compete(benchmark.name, benchmark.measure(args), args)


def compete(name: str, measurement: Measurement, args: argparse.Namespace) -> int:
    """Measures all contestants, prints the table and what it was measured on.

    Args:
        name: the benchmark's.
        measurement: who runs what.
        args: the flags of `parse`.

    Returns:
        The exit status: 1 where a contestant failed.

    Raises:
        SystemExit: ``--only`` names nobody.
    """
    load = os.getloadavg()[0]
    takes_part = [one for one in measurement.contestants if has_dtype(args.device, one.dtype)]
    chosen = [one for one in takes_part if args.only in one.label]
    if not chosen:
        known = "; ".join(one.label for one in takes_part)
        sys.exit(f"--only {args.only}: no contestant is called so, of {known}")
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
    """Runs every contestant once a round.

    Args:
        name: the benchmark's.
        runners: the contestants.
        measurement: what each of them runs.
        args: the flags of `parse`.

    Returns:
        The results of those that ran to the end, the machine's rates where they could be measured,
        and what failed, by label, and why.
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
            # A machine that others use as well may be faster or slower a minute later.
            "rate": fmean(around) if around else None,
        }
        results[contestant].append(run)
    return results, rates, failed


def matrix_rate(dtype: str, products: Products, args: argparse.Namespace) -> float:
    """GFLOP/s at these products, now, in the best way that this project has for each."""
    plan = {"worker": "ours", "seed": 0, "threads": args.threads, "device": args.device}
    plan |= {"dtype": dtype, "products": products}
    return run_worker(sys.executable, "matrix_rate_ours", plan)["gflops"]


def run_worker(python: str, name: str, plan: dict) -> dict:
    """What the worker wrote. Raises RuntimeError, which says how, where it failed."""
    environment = dict(os.environ)
    given_path = environment.pop("PYTHONPATH", None)
    if plan["worker"] == "ours":  # for peers it may lead to this project's transformers
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(NLG), given_path]))
    elif plan["worker"] == "loralib":
        environment["PYTHONPATH"] = str(ROOT.parent)
    if plan["threads"]:
        environment["OMP_NUM_THREADS"] = str(plan["threads"])
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
    """What is known of a contestant in the end.

    Args:
        contestant: who.
        baseline: whose times its own are divided by.
        time: the median, in the columns' unit.
        times_ours: the median of the quotients of the batches that both have run.
        counts: the sums of the columns that count.
        gflops: the median.
        share: the median of its runs' parts of the machine's rate; None where one is not known.
        peak_gib: the most of all rounds.
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
        """Those of the table, which has a column of shares or not."""
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
        """That of the chart."""
        one = self.contestant
        return Bar(
            label=one.label,
            value=self.times_ours,
            says=f"{_quotient(self.times_ours)} ({self.time:.4g} {columns.time})",
            is_ours=one.worker != "peers",
            group=self.baseline,
        )


def rows_of(results: Results, measurement: Measurement) -> list[Row]:
    """A row for each contestant whose baseline ran to the end."""
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
    """The Markdown table."""
    titles = ["contestant", "precision", columns.time, "times ours", *columns.counts]
    shares = any(row.share is not None for row in rows)
    titles += ["GFLOP/s", *(["of the machine's"] if shares else []), "peak GiB"]
    rule = f"|---|---|{'---:|' * (len(titles) - 2)}"
    return "\n".join([_line(titles), rule, *(_line(row.cells(shares)) for row in rows)])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _quotient(value: float) -> str:
    """Two decimals, or as many as it takes to tell a small one from zero."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _times(run: dict, columns: Columns) -> list[float]:
    return [
        columns.unit * seconds / columns.per(batch)
        for batch, seconds in zip(run["batches"], run["seconds"], strict=True)
    ]


def machine(results: Results, load: float, is_quick: bool) -> str:
    """What was measured on, and with which versions, as a Markdown list.

    Args:
        results: of all contestants.
        load: the system's, before the run.
        is_quick: it was a trial in a tiny shape, whose figures mean nothing.
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
    """The command line; ends the process where flags do not fit."""
    parser = ArgumentParser(description=benchmark.description.split("\n")[0])
    add, rounds = parser.add_argument, benchmark.rounds
    add("--peers_python", help="Python with requirements-peers.txt; without: this project alone")
    add("--data_dir", type=Path, help=benchmark.data_help)
    add("--vocab", type=Path, help="folder of a byte-level BPE; goes with --data_dir")
    add("--rounds", type=positive, default=rounds, help="turns per contestant (%(default)s)")
    add("--threads", type=positive, help="CPU threads; without: as many as torch takes")
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
        parser.error("--data_dir and --vocab go together")
    if benchmark.needs_peers and not args.peers_python:
        parser.error("--peers_python is needed: all models here are upstream's")
    if args.peers_python and not shutil.which(args.peers_python):
        parser.error(f"--peers_python: {args.peers_python} is not a program")
    if args.plot:
        try:  # before hours of measuring
            check_can_save(args.plot)
        except (OSError, ValueError) as error:
            parser.error(f"--plot: {error}")
    return args


def positive(text: str) -> int:
    """A flag's integer, from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number
