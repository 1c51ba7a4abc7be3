"""Models with the weights of roberta_fixture.safetensors, and its inputs."""

import json

import pytest
import torch
from roberta_cases import FIXTURE, KINDS, part
from safetensors import safe_open

from transformers import RobertaConfig, RobertaModel


@pytest.fixture(scope="session")
def upstream():
    """What make_roberta_fixture.py wrote: tensors by name, and the settings under "config"."""
    with safe_open(FIXTURE, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return {**tensors, "config": json.loads(file.metadata()["config"])}


@pytest.fixture
def build(upstream):
    """Builds a model with the fixture's weights; LoRA's are random, B too."""

    def build(kind, **settings):
        backbone = part(upstream, "weights/backbone/")
        if kind == "backbone":
            model = RobertaModel(RobertaConfig(**upstream["config"], **settings))
            weights = backbone
        else:
            model_class, labels = KINDS[kind]
            model = model_class(RobertaConfig(**upstream["config"], **labels, **settings))
            weights = {f"roberta.{name}": t for name, t in backbone.items() if "pooler" not in name}
            weights |= part(upstream, f"weights/{kind}/")
        torch.manual_seed(0)
        model.load_checkpoint(weights, "the fixture")
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        return model.eval()

    return build


@pytest.fixture
def arguments(upstream):
    """The model's arguments in one of the fixture's cases."""
    given = part(upstream, "inputs/")

    def arguments(case):
        if case.startswith("row"):
            row = int(case[3:])
            return {"input_ids": given["ids"][row : row + 1, : int(given["mask"][row].sum())]}
        holes = "_with_holes" if case == "holes" else ""
        types = {"token_type_ids": given["types"]} if case == "types" else {}
        return {
            "input_ids": given[f"ids{holes}"],
            "attention_mask": given[f"mask{holes}"],
            **types,
        }

    return arguments
