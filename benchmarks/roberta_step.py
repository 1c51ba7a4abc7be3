"""What a LoRA step costs per real token: this project, PEFT, and the release's setting.

    python benchmarks/roberta_step.py --peers_python .venv-peers/bin/python

RoBERTa-base's shape with random weights, batches of 16 rows as long as RTE's, dropout on, LoRA of
rank 8 on query and value, the head trained. A step is forward, backward, clipping, AdamW. Each
contestant runs in a fresh process; they take turns, in an order that rotates from round to round,
on the same batches, so that a busy machine slows all. `contestants` lists them, workers/ has their
steps. Prints Markdown; README.md says how to read it.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rte_lengths import LONGEST, QUANTILES, count_tokens, draw_batches
from tqdm import tqdm

WORKERS = Path(__file__).resolve().parent / "workers"
ROBERTA_BASE = {
    "vocab_size": 50265,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
QUICK = {**ROBERTA_BASE, "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 384}
WARMUP = 2
PLAN = {"rank": 8, "alpha": 16, "seed": 0, "warmup": WARMUP}
# What a CPU says of itself that decides how fast it multiplies.
CPU_FLAGS = ("amx_bf16", "amx_fp16", "avx512_bf16", "avx512f", "avx2", "asimd", "bf16", "i8mm")


@dataclass(frozen=True)
class Contestant:
    """One row of the table. The fields but for `name` and `worker` are the plan's: step_loop.py."""

    name: str
    worker: str
    weights: str = "float32"
    autocast: str | None = None
    full: bool = False
    pad_to: int | None = None

    @property
    def dtype(self) -> str:
        """What most products are computed in."""
        return self.autocast or self.weights

    @property
    def precision(self) -> str:
        """That, and what brings it about."""
        means = [] if self.weights == "float32" else ["weights"]
        means += ["autocast"] if self.autocast else []
        return f"{self.dtype} {' + '.join(means)}".strip()

    def computed(self, batch: list[int]) -> list[int]:
        """Tokens computed for each row: the real ones here, the padded ones elsewhere."""
        return batch if self.worker == "ours" else [self.pad_to or max(batch)] * len(batch)


# Of each contestant and round: what its worker wrote, and the timed batches.
Results = dict[Contestant, list[dict]]


def baselines(device: str) -> dict[str, Contestant]:
    """This project's LoRA, by the dtype of its products, which all others are compared with."""
    halves = ["bfloat16"] if device == "cpu" else ["bfloat16", "float16"]
    name = "this project, LoRA"
    in_half = {half: Contestant(name, "ours", weights=half, autocast=half) for half in halves}
    return {"float32": Contestant(name, "ours"), **in_half}


def contestants(device: str, with_peers: bool) -> list[Contestant]:
    """Those that run on `device`."""
    ours = baselines(device)
    full = Contestant("this project, full fine-tuning", "ours", full=True)
    peers = [
        Contestant("PEFT", "peers"),
        Contestant("PEFT", "peers", weights="bfloat16"),
        Contestant("PEFT", "peers", weights="bfloat16", autocast="bfloat16"),
        *(Contestant("PEFT", "peers", autocast=dtype) for dtype in ours if dtype != "float32"),
        Contestant(f"PEFT, padded to {LONGEST}", "peers", pad_to=LONGEST),
    ]
    return [*ours.values(), full, *(peers if with_peers else [])]


def run_worker(python: str, worker: str, plan: dict) -> dict:
    """What the worker wrote. Raises RuntimeError, which says how, where it failed."""
    environment = dict(os.environ)
    if worker == "peers":
        environment.pop("PYTHONPATH", None)  # it may lead to this project's transformers
    if plan["threads"]:
        environment["OMP_NUM_THREADS"] = str(plan["threads"])
    with tempfile.TemporaryDirectory() as folder:
        given, written = Path(folder, "plan.json"), Path(folder, "result.json")
        given.write_text(json.dumps(plan), encoding="utf-8")
        command = [python, WORKERS / f"{worker}.py", given, written]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode == 0:
            return json.loads(written.read_text(encoding="utf-8"))
    if done.returncode < 0:
        raise RuntimeError(f"killed by signal {-done.returncode}")
    raise RuntimeError((done.stderr.strip() or f"exit status {done.returncode}").split("\n")[-1])


def measure(args: argparse.Namespace, lengths: list[int], shape: dict) -> tuple[Results, dict]:
    """Runs every contestant once a round, each round on batches of its own.

    Returns:
        The results of those that ran to the end, and why the others did not, by contestant.
    """
    runners = contestants(args.device, args.peers_python is not None)
    about = {**PLAN, "shape": shape, "threads": args.threads, "device": args.device}
    results, failed = {contestant: [] for contestant in runners}, {}
    progress = tqdm([(a, b) for a in range(args.rounds) for b in range(len(runners))], unit="run")
    for number, turn in progress:
        contestant = runners[(number + turn) % len(runners)]
        if contestant in failed:
            continue
        progress.set_postfix_str(f"{contestant.name}, {contestant.precision}")
        # Padded to 512, steps take ten times as long: a third of them has to do.
        steps = -(-args.steps // 3) if contestant.pad_to else args.steps
        batches = draw_batches(lengths, WARMUP + steps, seed=number)
        plan = {**about, **asdict(contestant), "batches": batches}
        python = sys.executable if contestant.worker == "ours" else args.peers_python
        try:
            run = run_worker(python, contestant.worker, plan)
        except RuntimeError as error:
            failed[contestant] = str(error)
            del results[contestant]
        else:
            results[contestant].append({**run, "batches": batches[WARMUP:]})
    return results, failed


def gflop(contestant: Contestant, batch: list[int], shape: dict) -> float:
    """Billions of multiplications and additions in a step, by the formula of README.md."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    weights = 4 * hidden**2 + 2 * hidden * shape["intermediate_size"]
    tokens = contestant.computed(batch)
    linear = 2 * weights * (3 if contestant.full else 2) * sum(tokens)
    attention = 4 * hidden * 3 * sum(n**2 for n in tokens)
    if contestant.worker == "ours":
        # Of the last layer, only keys and values are computed for every token.
        layers -= 1 - 2 * hidden**2 / weights
    return layers * (linear + attention) / 1e9


def row(contestant: Contestant, runs: list[dict], baseline: list[dict], shape: dict) -> str:
    """A contestant's line of the table; its times are divided by those of `baseline`."""
    steps = [step for run in runs for step in zip(run["batches"], run["seconds"], strict=True)]
    quotients = [  # on the batches that both have run
        own / other
        for run, base in zip(runs, baseline, strict=True)
        for own, other in zip(run["seconds"], base["seconds"], strict=False)
    ]
    cells = [
        contestant.name,
        contestant.precision,
        f"{median(1e3 * seconds / sum(batch) for batch, seconds in steps):.4g}",
        f"{median(quotients):.2f}",
        f"{sum(sum(batch) for batch, _ in steps):,}",
        f"{sum(sum(contestant.computed(batch)) for batch, _ in steps):,}",
        f"{median(gflop(contestant, batch, shape) / seconds for batch, seconds in steps):,.0f}",
        f"{max(run['peak_bytes'] for run in runs) / 2**30:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def table(results: Results, device: str, shape: dict) -> str:
    """The Markdown table of all whose baseline ran to the end."""
    titles = "contestant | precision | ms per real token | times ours | real tokens | computed"
    lines = [f"| {titles} | GFLOP/s | peak GiB |", "|---|---|---:|---:|---:|---:|---:|---:|"]
    ours = {dtype: results.get(one) for dtype, one in baselines(device).items()}
    rows = [(one, runs, ours[one.dtype], shape) for one, runs in results.items()]
    return "\n".join([*lines, *(row(*about) for about in rows if about[2])])


def machine(results: Results, load: float) -> str:
    """What was measured on, and with which versions, as a Markdown list."""
    info = Path("/proc/cpuinfo")
    about = dict(re.findall(r"^(.+?)\s*: (.+)$", info.read_text(), re.M)) if info.is_file() else {}
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
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--peers_python", help="Python with requirements-peers.txt; without: this project alone")
    add("--data_dir", type=Path, help="a folder of GLUE, for RTE's lengths; without: quantiles")
    add("--vocab", type=Path, help="folder of a byte-level BPE; goes with --data_dir")
    add("--rounds", type=int, default=3, help="turns that each contestant has (%(default)s)")
    add("--steps", type=int, default=6, help="timed steps a turn (%(default)s)")
    add("--threads", type=int, help="CPU threads; without: as many as torch takes")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where to train (%(default)s)")
    add("--quick", action="store_true", help="a tiny shape, to see that the script works")
    add("--json", type=Path, metavar="OUT", help="also write every step's seconds to OUT")
    args = parser.parse_args(argv)
    if (args.data_dir is None) != (args.vocab is None):
        parser.error("--data_dir and --vocab go together")
    if args.peers_python and not shutil.which(args.peers_python):
        parser.error(f"--peers_python: {args.peers_python} is no program")
    if args.rounds < 1 or args.steps < 1:
        parser.error("--rounds and --steps start at 1")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measures and prints; 1 where a contestant failed."""
    args = parse(argv)
    load = os.getloadavg()[0]
    lengths = count_tokens(args.data_dir, args.vocab) if args.data_dir else QUANTILES
    shape = QUICK if args.quick else ROBERTA_BASE
    results, failed = measure(args, lengths, shape)
    print(table(results, args.device, shape), machine(results, load), sep="\n\n")
    for contestant, why in failed.items():
        print(f"- failed: {contestant.name}, {contestant.precision}: {why}")
    if args.json:
        records = [{**asdict(one), "runs": runs} for one, runs in results.items()]
        args.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
