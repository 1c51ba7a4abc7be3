"""Imports run one way: from tools to NLU and NLG to loralib, and within loralib as in a table."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Part of the project -> the other parts that it may import.
PARTS = {
    "loralib": set(),
    "NLU": {"loralib"},
    "NLG": {"loralib"},
    "examples": {"NLU", "NLG", "loralib"},
    "utils": {"NLU", "NLG", "loralib"},
    "benchmarks": {"NLU", "NLG", "loralib"},
}
# Module or subpackage of loralib -> the others that it may import.
MODULES = {
    "text": set(),
    "errors": {"text"},
    "arguments": {"errors", "text"},
    "nn": {"errors", "text"},
    "io": {"errors", "text"},
    "training": {"errors", "io", "nn", "text"},
    "functional": {"nn", "tensor_kinds"},
    "initialization": set(),
    "merged_copy": {"nn", "steps", "wrappers", "zero3"},
    "lora_layer": {
        "arguments",
        "errors",
        "functional",
        "initialization",
        "merged_copy",
        "nn",
        "steps",
        "tensor_kinds",
        "wrappers",
        "zero3",
    },
    "layers": {"arguments", "functional", "lora_layer", "nn", "tensor_kinds"},
    "in_place": {"adapted_layers", "lora_layer", "module_names", "quantized_layers", "wrappers"},
    "trained": {"module_names", "nn", "tensor_kinds"},
    "tied_words": {"text", "trained"},
    "steps": {"text"},
    "wrappers": {"text"},
    "tensor_kinds": {"wrappers"},
    "zero3": set(),
    "positions": {"module_names"},
    "module_names": set(),
    "model_checks": {"lora_layer", "tensor_kinds", "wrappers", "zero3"},
    "utils": {
        "adapted_layers",
        "arguments",
        "functional",
        "in_place",
        "initialization",
        "layers",
        "lora_layer",
        "model_checks",
        "positions",
        "quantized_layers",
        "steps",
        "tensor_kinds",
        "text",
        "tied_words",
        "trained",
        "wrappers",
        "zero3",
    },
    "adapted_layers": {
        "functional",
        "layers",
        "lora_layer",
        "nn",
        "tensor_kinds",
        "wrappers",
    },
    "bypassed": {"in_place", "module_names", "sources", "stacks", "wrappers"},
    "sources": set(),
    "stacks": {"module_names"},
    "quantized_layers": {
        "functional",
        "initialization",
        "layers",
        "lora_layer",
        "nn",
        "text",
        "wrappers",
    },
    "experts": {"adapted_layers", "functional", "nn", "stacks", "wrappers"},
    "layer_kinds": {"in_place", "quantized_layers", "wrappers"},
    "targets": {"experts", "layer_kinds", "module_names", "stacks", "text"},
    "adaptation": {
        "adapted_layers",
        "errors",
        "experts",
        "in_place",
        "layer_kinds",
        "layers",
        "lora_layer",
        "quantized_layers",
        "stacks",
    },
    "inject_checks": {
        "adaptation",
        "adapted_layers",
        "arguments",
        "bypassed",
        "errors",
        "functional",
        "in_place",
        "initialization",
        "layer_kinds",
        "layers",
        "lora_layer",
        "nn",
        "quantized_layers",
        "stacks",
        "targets",
        "tensor_kinds",
        "text",
        "wrappers",
        "zero3",
    },
    "modules_to_train": {
        "inject_checks",
        "model_checks",
        "module_names",
        "targets",
        "tensor_kinds",
        "text",
        "trained",
    },
    "inject_warnings": {
        "bypassed",
        "initialization",
        "lora_layer",
        "model_checks",
        "modules_to_train",
        "stacks",
        "targets",
        "text",
    },
    "inject": {
        "adaptation",
        "arguments",
        "in_place",
        "inject_checks",
        "inject_warnings",
        "lora_layer",
        "model_checks",
        "modules_to_train",
        "stacks",
        "steps",
        "targets",
        "text",
        "trained",
        "utils",
        "zero3",
    },
    "adapters": {
        "adaptation",
        "adapted_layers",
        "arguments",
        "errors",
        "experts",
        "functional",
        "in_place",
        "initialization",
        "inject",
        "inject_warnings",
        "io",
        "layer_kinds",
        "layers",
        "lora_layer",
        "model_checks",
        "module_names",
        "modules_to_train",
        "positions",
        "quantized_layers",
        "stacks",
        "steps",
        "targets",
        "tensor_kinds",
        "tied_words",
        "text",
        "trained",
        "utils",
        "wrappers",
        "zero3",
    },
    "serving": {
        "adapted_layers",
        "adapters",
        "arguments",
        "bypassed",
        "errors",
        "functional",
        "io",
        "layer_kinds",
        "lora_layer",
        "model_checks",
        "nn",
        "quantized_layers",
        "stacks",
        "steps",
        "tensor_kinds",
        "text",
        "wrappers",
    },
}


def imported(path: Path, package: str | None = None) -> Iterator[str]:
    """The dotted names that a file imports, in functions too; relative imports need `package`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            parents = package.split(".")[: 1 - node.level or None] if node.level else []
            above = [*parents, node.module] if node.module else parents
            yield from (".".join([*above, alias.name]) for alias in node.names)


def modules_of(part: Path) -> set[str]:
    """The names under which other files can import what is in a part of the project."""
    if part.name == "loralib":
        return {"loralib"}
    folders = {path.parent for path in part.rglob("*.py")}
    packages = {folder for folder in folders if (folder / "__init__.py").is_file()}
    inside = {folder for folder in folders if packages & {folder, *folder.parents}}
    files = {path.stem for folder in folders - inside for path in folder.glob("*.py")}
    return files | {folder.name for folder in packages if folder.parent not in packages}


def wrong_imports_of_parts(root: Path, allowed: Mapping[str, set[str]]) -> list[str]:
    """Imports of other parts that are not allowed, as ``file: name``."""
    known = {part: modules_of(root / part) - {"setup"} for part in allowed}
    wrong = []
    for part in allowed:
        for path in sorted((root / part).rglob("*.py")):
            names = {name.split(".")[0] for name in imported(path)} - known[part]
            reachable = set().union(*(known[other] for other in allowed[part]))
            elsewhere = set().union(*known.values())
            wrong += [f"{path}: {name}" for name in sorted(names & elsewhere - reachable)]
    return wrong


def wrong_imports_of_modules(package: Path, allowed: Mapping[str, set[str]]) -> list[str]:
    """Imports within a package that are not allowed, as ``file: module``; __init__.py may all."""
    wrong = []
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).parts[0].removesuffix(".py")
        if module == "__init__":
            continue
        above = ".".join([package.name, *path.relative_to(package).parts[:-1]])
        names = (name.split(".") for name in imported(path, above))
        modules = {name[1] for name in names if name[0] == package.name and len(name) > 1}
        found = modules & set(allowed) - allowed[module] - {module}
        wrong += [f"{path}: {other}" for other in sorted(found)]
    return wrong


def test_parts_import_what_they_may():
    assert wrong_imports_of_parts(ROOT, PARTS) == []


def test_loralibs_modules_import_what_they_may():
    names = {path.stem for path in (ROOT / "loralib").iterdir() if not path.name.startswith("__")}
    assert names <= set(MODULES)
    assert wrong_imports_of_modules(ROOT / "loralib", MODULES) == []


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("loralib/layers.py", "import transformers", "transformers"),
        ("loralib/layers.py", "def late():\n    from transformers import x", "transformers"),
        ("NLG/src/model.py", "from transformers.models import x", "transformers"),
        ("NLU/src/transformers/trainer.py", "from beam import search", "beam"),
        ("NLU/src/transformers/trainer.py", "import reproduce", "reproduce"),
        ("NLU/src/transformers/trainer.py", "from .beam import search", None),
        ("NLG/src/model.py", "from beam import search", None),
        ("utils/reproduce.py", "import beam, loralib.layers, transformers", None),
        ("examples/glue/run.py", "import reproduce", "reproduce"),
    ],
)
def test_a_wrong_import_of_a_part_is_found(tmp_path, file, text, wrong):
    files = ["loralib/layers.py", "NLU/src/transformers/__init__.py", "NLG/src/beam.py"]
    for name in (*files, "utils/reproduce.py", file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / file).write_text(text)
    expected = [f"{tmp_path / file}: {wrong}"] if wrong else []
    assert wrong_imports_of_parts(tmp_path, PARTS) == expected


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("nn/dropout.py", "from ..layers import Linear", "layers"),
        ("nn/dropout.py", "from .. import layers", "layers"),
        ("nn/dropout.py", "from loralib.serving.bank import AdapterBank", "serving"),
        ("layers.py", "from .adapters import peft", "adapters"),
        ("layers.py", "from . import training", "training"),
        ("layers.py", "from .functional import Delta", None),
        ("serving/bank.py", "from ..adapters.peft import x\nfrom .rows import y", None),
    ],
)
def test_a_wrong_import_of_a_module_is_found(tmp_path, file, text, wrong):
    path = tmp_path / "loralib" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    expected = [f"{path}: {wrong}"] if wrong else []
    assert wrong_imports_of_modules(tmp_path / "loralib", MODULES) == expected
