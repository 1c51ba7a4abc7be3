"""Text is read and written as UTF-8 on every system, whatever its locale says."""

import ast
from collections.abc import Iterator

import pytest
from places import ROOT

ROOMS = ("loralib", "NLU", "NLG", "examples", "utils", "benchmarks", "docs")
# Functions that take the locale's encoding, with the place of theirs among the positional ones.
_PLACES = {"read_text": 0, "write_text": 1, "open": 3, "fdopen": 3}


def unnamed(source: str) -> Iterator[int]:
    """The lines of a module in which text is read or written and no encoding is named."""
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
        if is_text or (name in _PLACES and not _is_sound(node, name, is_method, given)):
            yield node.lineno


def _is_sound(node: ast.Call, name: str, is_method: bool, given: dict[str, ast.expr]) -> bool:
    """Whether a call names its encoding by place, is of bytes, or not of a file of text at all."""
    if name == "open" and is_method:  # os.open, Image.open, those of archives
        return True
    if name in ("open", "fdopen"):
        mode = given.get("mode", node.args[1] if len(node.args) > 1 else None)
        if "b" in getattr(mode, "value", "b" if mode is not None else "r"):
            return True
    return len(node.args) > _PLACES[name]


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_names_the_encoding_of_its_text(room):
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for line in unnamed(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("call", "is_unnamed"),
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
def test_what_is_found(call, is_unnamed):
    assert list(unnamed(call)) == [1] * is_unnamed
