"""All code that reads or writes text names the encoding, so that no locale matters."""

import ast
from collections.abc import Iterator

import pytest
from paths import ROOT

FOLDERS = ("loralib", "NLU", "NLG", "examples", "utils", "benchmarks", "docs")
# Functions whose default is the locale's encoding -> the position of their argument for it.
_POSITIONS = {"read_text": 0, "write_text": 1, "open": 3, "fdopen": 3}


def lines_without_encoding(source: str) -> Iterator[int]:
    """The lines of a module that read or write text without naming an encoding."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        is_method = isinstance(node.func, ast.Attribute)
        name = node.func.attr if is_method else getattr(node.func, "id", "")
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if "encoding" in given:
            continue
        is_text = any(
            getattr(given.get(flag), "value", False) for flag in ("text", "universal_newlines")
        )
        if is_text or (name in _POSITIONS and not _is_fine(node, name, is_method, given)):
            yield node.lineno


def _is_fine(node: ast.Call, name: str, is_method: bool, given: dict[str, ast.expr]) -> bool:
    """Whether a call gives its encoding by position, or reads and writes no text."""
    if name == "open" and is_method:  # os.open, Image.open, archives' open
        return True
    if name in ("open", "fdopen"):
        mode = given.get("mode", node.args[1] if len(node.args) > 1 else None)
        if "b" in getattr(mode, "value", "b" if mode is not None else "r"):
            return True
    return len(node.args) > _POSITIONS[name]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_names_the_encoding_of_its_text(folder):
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in lines_without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ("open(path)", True),
        ("open(path, 'w')", True),
        ("open(path, mode='a')", True),
        ("open(path, 'rb')", False),
        ("open(path, encoding='utf-8')", False),
        ("os.fdopen(number, 'w')", True),
        ("os.open(path, flags)", False),
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text)", True),
        ("path.write_text(text, 'utf-8')", False),
        ("path.read_bytes()", False),
        ("run(command, text=True)", True),
        ("run(command, text=True, encoding='utf-8')", False),
        ("run(command)", False),
    ],
)
def test_calls_without_an_encoding_are_found(call, is_found):
    assert list(lines_without_encoding(call)) == [1] * is_found
