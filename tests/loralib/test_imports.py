"""What `import loralib` brings along: torch, and nothing else that is installed."""

import json
import subprocess
import sys

import pytest

LIST_MODULES = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def modules_after(statement):
    """The names in `sys.modules` once a new interpreter has run a statement."""
    command = [sys.executable, "-c", f"{statement}\n{LIST_MODULES}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def packages(modules):
    return {name.partition(".")[0] for name in modules}


@pytest.fixture(scope="module")
def torch_modules():
    return modules_after("import torch")


@pytest.mark.slow
def test_import_loralib_needs_torch_alone(torch_modules):
    added = modules_after("import loralib") - torch_modules
    assert "loralib.layers" in added
    assert packages(added) - sys.stdlib_module_names == {"loralib"}


@pytest.mark.slow
def test_import_loralib_imports_no_heavy_room(torch_modules):
    added = modules_after("import loralib") - torch_modules
    rooms = {"adapters", "io", "serving", "training"}
    assert not {name for name in added if name.split(".")[1:2] and name.split(".")[1] in rooms}


@pytest.mark.slow
def test_a_heavy_name_is_imported_when_it_is_asked_for():
    modules = modules_after("import loralib; loralib.AdapterBank")
    assert "loralib.serving.bank" in modules


@pytest.mark.slow
def test_the_layers_are_built_trained_and_resumed_without_the_compiler():
    statement = (
        "import loralib as lora, torch\n"
        "from loralib.training.optimizer import AdamW\n"
        "layer = lora.Linear(3, 2, r=1)\n"
        "optimizer = AdamW(layer.parameters())\n"
        "layer(torch.ones(1, 3)).sum().backward()\n"
        "optimizer.step()\n"
        "optimizer.zero_grad()\n"
        "optimizer.load_state_dict(optimizer.state_dict())"
    )
    assert not {"torch._dynamo", "sympy"} & modules_after(statement)
