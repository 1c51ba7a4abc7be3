"""Runs a script with --cuda_graphs on a CPU, where a replay runs the recorded step again.

    graphed_run.py SCRIPT ARGUMENTS…

Attention is padded, as a graph reads no lengths of rows. The number of replays is written to
standard error at the end.
"""

import sys
from pathlib import Path

from killed_run import load
from simulated_graphs import SimulatedGraphs

from loralib.nn import packing
from loralib.nn.fast_paths import fast_paths_off
from loralib.training import cuda_graphs, process


def main() -> None:
    # The launcher inserts a flag of its own before the script.
    start = next(i for i, word in enumerate(sys.argv) if i and word.endswith(".py"))
    script, arguments = sys.argv[start], [*sys.argv[1:start], *sys.argv[start + 1 :]]
    packing.padding_is_cheap = lambda *_: True
    cuda_graphs.why_no_graphs = lambda *_: None
    module = load(Path(script))
    sys.argv = [script, *arguments]
    with fast_paths_off(), SimulatedGraphs() as graphs:
        module.main([*arguments, "--cuda_graphs"])
    # In one piece, which `print` does not promise: several processes write to the same file.
    sys.stderr.write(f"replays: {graphs.replays}\n")


if __name__ == "__main__":
    process.run(main, lambda line: print(line, file=sys.stderr))
