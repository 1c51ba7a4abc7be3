"""Adapters and lines for predict.py, and the answers of models with one adapter each."""

import json
import random
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from compare import rounding
from encoder_options import ENCODER_TERMS
from paths import ROOT

from loralib.adapters.adapter import Adapter
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils.cli import run_script

SCRIPT = ROOT / "examples" / "text-classification" / "predict.py"

# They differ in rank, scale, targets and head; the last one gives scores.
ADAPTERS = {
    "rte": {
        **{"lora_r": 4, "lora_alpha": 8, "lora_targets": ["query", "value"]},
        "id2label": {0: "entailment", 1: "not_entailment"},
    },
    "mnli": {
        **{"lora_r": 2, "lora_alpha": 6, "lora_targets": ["key", "attention_output", "output"]},
        "id2label": {0: "entailment", 1: "neutral", 2: "contradiction"},
    },
    "stsb": {
        **{"lora_r": 3, "lora_alpha": 3, "lora_targets": ["intermediate", "query"]},
        "id2label": {0: "LABEL_0"},
    },
}
FAMILIES = ["roberta", "deberta"]


def adapted(base: Path, settings: dict, seed: int):
    """A model with LoRA and a head that both have a visible effect on its logits."""
    config = AutoConfig.from_pretrained(base, apply_lora=True, **settings)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(base, config=config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or name in model.newly_initialized:
            parameter.data.normal_(std=0.3)
    return model


def some_lines(count: int = 14) -> list[dict]:
    """Lines for `ADAPTERS` in mixed order, texts and pairs, of several lengths."""
    chance = random.Random(4)
    words = [
        "the",
        "dog",
        "sings",
        "a",
        "quiet",
        "song",
        "under",
        "this",
        "window",
        "and",
        "never",
        "reads",
    ]
    lines = []
    for number in range(count):
        texts = [" ".join(chance.choices(words, k=chance.randint(1, 12))) for _ in range(2)]
        line = {"id": number, "adapter": chance.choice(list(ADAPTERS)), "text": texts[0]}
        lines.append(line | ({"text_pair": texts[1]} if number % 3 else {}))
    return lines


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def alone(base: Path, adapter: Adapter, settings: dict, lines: list[dict]) -> list[torch.Tensor]:
    """Each line's logits from a model built with this one adapter, a line at a time."""
    config = AutoConfig.from_pretrained(base, apply_lora=True, **settings)
    model = AutoModelForSequenceClassification.from_pretrained(base, config=config)
    model.load_adapters([adapter])
    tokenizer = AutoTokenizer.from_pretrained(base)
    encoded = [
        tokenizer(line["text"], line.get("text_pair"), max_length=60, truncation=True)
        for line in lines
    ]
    with torch.no_grad():
        rows = [{name: torch.tensor([ids]) for name, ids in row.items()} for row in encoded]
        return [model(**row)["logits"][0] for row in rows]


def as_answer(logits: torch.Tensor, labels: list[str]) -> dict:
    if len(labels) == 1:
        return {"score": logits.item()}
    shares = logits.softmax(0)
    named = {label: share.item() for label, share in zip(labels, shares, strict=True)}
    return {"label": labels[int(shares.argmax())], "probabilities": named}


def close(value: float | dict[str, float]):
    largest = max(map(abs, value.values() if isinstance(value, dict) else [value]))
    return pytest.approx(value, abs=rounding(largest, ENCODER_TERMS), rel=0)


def assert_close(found: list[dict], expected: list[dict]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            of_numbers = key in ("probabilities", "score")
            assert ours[key] == (close(value) if of_numbers else value)


def named(files: dict[str, Path], names=tuple(ADAPTERS)) -> list[str]:
    return [f"{name}={files[name]}" for name in names]


def common(base: Path, *paths: Path) -> list[str]:
    """The arguments of a call without the adapters; with an input and an output file, or none."""
    arguments = ["--model_name_or_path", str(base), "--max_seq_length", "60"]
    for flag, path in zip(("--input_file", "--output_file"), paths, strict=False):
        arguments += [flag, str(path)]
    return arguments


def failure(predict, arguments: list[str], capsys) -> str:
    """Runs a call that must fail, and returns its one line of error."""
    argv = sys.argv
    sys.argv = [str(SCRIPT)]
    try:
        with pytest.raises(SystemExit) as ended:
            run_script(partial(predict.main, list(map(str, arguments))))
    finally:
        sys.argv = argv
    assert ended.value.code in (1, 2)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert lines[0].startswith("predict.py: error: ")
    return lines[0]


GOOD = '{"adapter": "rte", "text": "a dog"}'


def failed_untouched(predict, capsys, folder: Path, arguments: list[str]) -> str:
    """As `failure`; also asserts that an existing output file and its folder stay unchanged."""
    out = folder / "out.jsonl"
    out.write_text("mine")
    before = sorted(folder.iterdir())
    line = failure(predict, [*arguments, "--output_file", str(out)], capsys)
    assert out.read_text() == "mine"
    assert sorted(folder.iterdir()) == before
    return line
