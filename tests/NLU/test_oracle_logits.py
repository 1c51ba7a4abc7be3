"""Logits and losses are those that the release's own code gave on small random models."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from glue_runs import results

from loralib.adapters.adapter import LORA
from loralib.adapters.formats import read_adapter
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.adapter_kinds import BOTTLENECK, PATHS

ORACLE = Path(__file__).parents[3] / "shared" / "data" / "oracle"

pytestmark = pytest.mark.skipif(
    not ORACLE.is_dir(), reason="the release's recorded logits are absent from ../shared"
)

LORA_16 = {"apply_lora": True, "lora_r": 4, "lora_alpha": 16}
HOULSBY = {"apply_adapter": True, "adapter_type": "houlsby", "adapter_size": 8}
PFEIFFER = {**HOULSBY, "adapter_type": "pfeiffer"}
# Name in the record -> model, adapter file, its kind, the model's settings.
CASES = {
    "deberta_lora": ("deberta", "adapter.bin", LORA, LORA_16),
    "roberta_lora": ("roberta", "lora.bin", LORA, LORA_16),
    "roberta_houlsby": ("roberta", "houlsby.bin", BOTTLENECK, HOULSBY),
    "roberta_pfeiffer": ("roberta", "pfeiffer.bin", BOTTLENECK, PFEIFFER),
}


@pytest.fixture(scope="module")
def recorded():
    return json.loads((ORACLE / "release_logits.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def rows():
    with open(ORACLE / "rows.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def evaluate(family, adapter, settings, rows):
    """The logits of all rows, and their mean loss."""
    base = ORACLE / family / "base"
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2, **settings)
    assert model.load_adapters([adapter]) == []
    texts = [[row[key] for row in rows] for key in ("sentence1", "sentence2")]
    tokenizer = AutoTokenizer.from_pretrained(base)
    batch = tokenizer(*texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
    with torch.no_grad():
        output = model(**batch, labels=torch.tensor([int(row["label"]) for row in rows]))
    return output.logits, output.loss.item()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_loss_are_the_releases(case, recorded, rows):
    family, file, kind, settings = CASES[case]
    adapter = read_adapter(ORACLE / family / file, kind)
    logits, loss = evaluate(family, adapter, settings, rows)
    expected = torch.tensor(recorded[case]["logits"])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert loss == pytest.approx(recorded[case]["loss"], abs=5e-5)
    # The logits depend on the adapter: with its second matrices halved, they are far off.
    halved = {
        name: tensor / 2 if name.endswith(("lora_B", "adapter_B.weight")) else tensor
        for name, tensor in adapter.tensors.items()
    }
    logits, _ = evaluate(family, replace(adapter, tensors=halved), settings, rows)
    assert (logits - expected).abs().max() > 1e-3


def flags_of(settings):
    """A model's settings as run_glue.py's flags; a switch has no value."""
    pairs = ((f"--{name}", value) for name, value in settings.items())
    return [word for flag, value in pairs for word in ((flag,) if value is True else (flag, value))]


@pytest.mark.parametrize("case", CASES)
def test_run_glue_evaluates_as_the_release_does(case, recorded, run_glue, tmp_path):
    """run_glue.py's loss and accuracy, with the adapter's own flags, in batches of eight."""
    family, file, kind, settings = CASES[case]
    rows = str(ORACLE / "rows.csv")
    arguments = ["--model_name_or_path", ORACLE / family / "base", "--output_dir", tmp_path / "out"]
    arguments += ["--train_file", rows, "--validation_file", rows, "--do_eval", "--disable_tqdm"]
    arguments += [f"--{PATHS[kind]}", ORACLE / family / file, *flags_of(settings)]
    arguments += ["--report_to", "none"]
    run_glue.main([str(argument) for argument in arguments])
    expected = torch.tensor(recorded[case]["logits"])
    with open(rows, encoding="utf-8", newline="") as lines:
        labels = torch.tensor([int(row["label"]) for row in csv.DictReader(lines)])
    evaluated = results(tmp_path / "out")
    assert evaluated["eval_loss"] == pytest.approx(recorded[case]["loss"], abs=5e-5)
    assert evaluated["eval_accuracy"] == (expected.argmax(1) == labels).double().mean().item()
