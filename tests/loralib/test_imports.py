"""Tests of which packages `import loralib` and later steps import."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import loralib

# The code that a new interpreter runs, step by step.
STEPS = {
    "no layer": "import loralib; from loralib.io import atomic, encoding, hub; "
    "from loralib.training import process",
    "torch": "import torch",
    "layers": "loralib.Linear",
    "training": "from loralib.training.optimizer import AdamW\n"
    "layer = loralib.Linear(3, 2, r=1)\n"
    "optimizer = AdamW(layer.parameters())\n"
    "layer(torch.ones(1, 3)).sum().backward()\n"
    "optimizer.step()\n"
    "optimizer.zero_grad()\n"
    "optimizer.load_state_dict(optimizer.state_dict())",
    "bank": "loralib.AdapterBank",
}


@pytest.fixture(scope="module")
def added():
    """The names that each step adds to `sys.modules`, by step."""
    lists = "".join(f"{step}\nprint(json.dumps(sorted(sys.modules)))\n" for step in STEPS.values())
    command = [sys.executable, "-c", f"import json, sys\n{lists}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seen = [set(json.loads(line)) for line in done.stdout.splitlines()]
    before = [set(), *seen]
    return {
        step: after - before[n] for n, (step, after) in enumerate(zip(STEPS, seen, strict=True))
    }


def packages(modules):
    return {name.partition(".")[0] for name in modules} - sys.stdlib_module_names


def test_type_checkers_and_python_have_the_same_names():
    tree = ast.parse(Path(loralib.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    listed = {
        alias.name: "." * node.level + node.module for node in block.body for alias in node.names
    }
    assert listed == loralib._MODULE_OF


@pytest.mark.parametrize("name", [*loralib.__all__, "layers", "utils", "functional"])
def test_names_can_be_imported(name):
    assert getattr(loralib, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'loralib' has no attribute 'Transformer'"):
        _ = loralib.Transformer
    assert not hasattr(loralib, "_nothing")


@pytest.mark.slow
def test_what_needs_no_layer_does_not_import_torch(added):
    assert "loralib.training.process" in added["no layer"]
    assert not {"torch", "numpy"} & packages(added["no layer"])


@pytest.mark.slow
def test_the_layers_import_no_package_but_torch(added):
    assert "loralib.layers" in added["layers"]
    assert packages(added["layers"]) == {"loralib"}


@pytest.mark.slow
def test_the_layers_import_no_heavy_subpackage(added):
    heavy = {"adapters", "io", "serving", "training"}
    names = [name.split(".")[1] for name in added["layers"] if name.startswith("loralib.")]
    assert not heavy & set(names)


@pytest.mark.slow
def test_a_heavy_name_is_imported_on_its_first_access(added):
    assert "loralib.serving.bank" in added["bank"]


@pytest.mark.slow
def test_building_training_and_resuming_do_not_import_the_compiler(added):
    assert not {"torch._dynamo", "sympy"} & set().union(*added.values())
