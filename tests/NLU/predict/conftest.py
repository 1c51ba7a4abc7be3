"""predict.py as a module, adapters for it, and the expected answers."""

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from paths import load_script
from predictions import ADAPTERS, GOOD, SCRIPT, adapted, alone, as_answer, some_lines

from loralib.adapters.adapter import Adapter
from loralib.adapters.formats import write_adapter
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    RobertaForSequenceClassification,
)


@pytest.fixture(scope="session")
def predict() -> ModuleType:
    """The script; `predict.main(arguments)` runs it in this process."""
    return load_script(SCRIPT)


@pytest.fixture(scope="session")
def bases(tiny_base, tiny_deberta_base) -> dict[str, Path]:
    return {"roberta": tiny_base, "deberta": tiny_deberta_base}


@pytest.fixture(scope="session")
def adapters(bases, tmp_path_factory) -> dict[str, dict[str, Path]]:
    """Files of `ADAPTERS`, by the base's family and their name."""
    folder, files = tmp_path_factory.mktemp("adapters"), {}
    for family, base in bases.items():
        for seed, (name, settings) in enumerate(ADAPTERS.items()):
            path = folder / f"{family}_{name}.safetensors"
            write_adapter(path, adapted(base, settings, seed).adapter())
            files.setdefault(family, {})[name] = path
    return files


@pytest.fixture(scope="session")
def expected(bases):
    """The answers to `some_lines`, each from its adapter's own model, by family."""

    @cache
    def answers(family: str) -> list[dict]:
        lines = some_lines()
        found: list[dict] = [{}] * len(lines)
        for seed, (name, settings) in enumerate(ADAPTERS.items()):
            adapter = adapted(bases[family], settings, seed).adapter()
            own = [line for line in lines if line["adapter"] == name]
            for line, logits in zip(own, alone(bases[family], adapter, settings, own), strict=True):
                found[line["id"]] = line | as_answer(logits, list(settings["id2label"].values()))
        return found

    return answers


@pytest.fixture(scope="session")
def bad(bases, make_classifier, tmp_path_factory) -> Path:
    """A folder with the files that `BAD_ARGUMENTS` names."""
    folder, rte = tmp_path_factory.mktemp("bad"), ADAPTERS["rte"]
    (folder / "in.jsonl").write_text(GOOD)
    (folder / "texts.bin").write_text("a dog")
    lora = {"apply_lora": True, **rte}
    narrow = make_classifier("roberta", hidden_size=16, **lora)
    write_adapter(folder / "narrow.safetensors", narrow.adapter())
    adapter = adapted(bases["roberta"], rte, 0).adapter()
    write_adapter(folder / "lone.bin", Adapter(adapter.tensors, None))
    twins = replace(adapter, metadata=replace(adapter.metadata, labels=("yes", "yes")))
    write_adapter(folder / "twins.safetensors", twins)
    shutil.copytree(bases["roberta"], folder / "other")
    other = AutoModelForSequenceClassification.from_pretrained(folder / "other")
    torch.nn.init.normal_(other.roberta.encoder.layer[0].output.dense.weight)
    other.save_pretrained(folder / "other")
    model = adapted(folder / "other", {k: v for k, v in rte.items() if k != "id2label"}, 0)
    write_adapter(folder / "other.safetensors", model.adapter())
    for name, switches in (("adapted", lora), ("bottlenecks", {"apply_adapter": True})):
        config = AutoConfig.from_pretrained(bases["roberta"], **switches)
        shutil.copytree(bases["roberta"], folder / name)
        RobertaForSequenceClassification(config).save_pretrained(folder / name)
    return folder
