"""The messages that the troubleshooting page explains are those of the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from places import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
ROOMS = ("loralib", "NLU/src", "NLG/src", "NLG/eval", "examples", "utils")
PLACEHOLDER = "\0"
# Not in the code; a test below makes Python say it.
PYTHONS = "cannot import name '…' from 'transformers'"


def messages(text: str) -> list[str]:
    """The first column of the page's tables: what is in backticks."""
    return re.findall(r"^\| `([^`]+)` \|", text, re.M)


def literals(node: ast.AST) -> Iterator[str]:
    """The strings of a module, with a placeholder for each value that is filled in."""
    for child in ast.walk(node):
        if isinstance(child, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else PLACEHOLDER
                for part in child.values
            )
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


@cache
def known() -> str:
    """All strings of the code and the texts of its scripts."""
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            found += literals(ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted((ROOT / room).rglob("*.sh")):
            found.append(path.read_text(encoding="utf-8"))
    return "\n".join(found)


def is_known(message: str) -> bool:
    """Whether a string of the code is this message, each … standing for one line at most."""
    pattern = r"[^\n]*".join(re.escape(part) for part in message.split("…"))
    return message == PYTHONS or re.search(pattern, known()) is not None


@pytest.mark.parametrize("message", messages(PAGE.read_text(encoding="utf-8")))
def test_a_message_is_one_of_the_code(message):
    assert is_known(message)


def test_python_says_that_a_name_cannot_be_imported():
    name = re.escape(PYTHONS).replace("…", "LlamaForCausalLM")
    with pytest.raises(ImportError, match=name):
        from transformers import LlamaForCausalLM  # noqa: F401


def test_there_are_many():
    assert len(messages(PAGE.read_text(encoding="utf-8"))) >= 25


@pytest.mark.parametrize(
    "message", ["no such message", "was trained with alpha …, but lora_beta is …"]
)
def test_another_message_is_not(message):
    assert not is_known(message)
