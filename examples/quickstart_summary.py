"""Prints a table of the results in the quickstart's output folder; the quickstart's last step."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loralib.adapters.formats import read_adapter
from loralib.io.command_line import ArgumentParser
from loralib.io.console import table
from loralib.io.tensors import read_tensors
from transformers.data.processors import load_glue_split


def summarise(folder: Path) -> tuple[list[tuple[str, str]], bool]:
    """Returns the table's rows, and whether the reloaded adapter scores like the trained model."""
    full, lora = folder / "sst2" / "pytorch_model.bin", folder / "lora.bin"
    trained = sum(tensor.numel() for tensor in read_adapter(lora).tensors.values())
    everything = sum(tensor.numel() for tensor in read_tensors(full)[0].values())
    labels = Counter(e.label for e in load_glue_split("sst2", folder / "data", "validation"))
    majority = max(labels.values()) / sum(labels.values())
    after, again = (
        _read_json(folder / run / "eval_results.json")["eval_accuracy"]
        for run in ("sst2", "reloaded")
    )
    rows = [
        ("trainable parameters", f"{trained:,} of {everything:,} ({trained / everything:.1%})"),
        ("full checkpoint", f"{full.stat().st_size / 1024:,.0f} KiB"),
        ("LoRA-only checkpoint", f"{lora.stat().st_size / 1024:,.0f} KiB"),
        ("accuracy of the majority label", f"{majority:.4f}"),
        ("accuracy after training", f"{after!r}"),
        ("accuracy of the reloaded adapter", f"{again!r}"),
    ]
    return rows, after == again


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table; exits with 1 if the two accuracies differ."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the quickstart's output folder")
    rows, equal = summarise(parser.parse_args(argv).folder)
    print(table(rows, stream=sys.stdout))
    if not equal:
        sys.exit("quickstart: error: the reloaded adapter scores differently")


if __name__ == "__main__":
    main()
