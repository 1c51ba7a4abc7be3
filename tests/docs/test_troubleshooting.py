"""The messages that the troubleshooting page explains are those of the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from paths import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
FOLDERS = ("loralib", "NLU/src", "NLG/src", "NLG/eval", "examples", "utils")
PLACEHOLDER = "\0"
# Not in the code, but Python's own; see the test below.
IMPORT_ERROR = "cannot import name '…' from 'transformers'"


def messages(text: str) -> list[str]:
    """The first column of the page's tables: what is in backticks."""
    return re.findall(r"^\| `([^`]+)` \|", text, re.M)


def literals(node: ast.AST) -> Iterator[str]:
    """The strings of a module, with a placeholder for each value of an f-string."""
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
    """All strings of the Python code, and the shell scripts."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found += literals(ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted((ROOT / folder).rglob("*.sh")):
            found.append(path.read_text(encoding="utf-8"))
    return "\n".join(found)


def is_known(message: str) -> bool:
    """Whether the code has this message, where each … stands for anything within one line."""
    pattern = r"[^\n]*".join(re.escape(part) for part in message.split("…"))
    return message == IMPORT_ERROR or re.search(pattern, known()) is not None


@pytest.mark.parametrize("message", messages(PAGE.read_text(encoding="utf-8")))
def test_a_message_of_the_page_is_in_the_code(message):
    assert is_known(message)


def test_python_raises_the_error_for_a_name_it_cannot_import():
    name = re.escape(IMPORT_ERROR).replace("…", "LlamaForCausalLM")
    with pytest.raises(ImportError, match=name):
        from transformers import LlamaForCausalLM  # noqa: F401


def test_the_page_explains_at_least_25_messages():
    assert len(messages(PAGE.read_text(encoding="utf-8"))) >= 25


@pytest.mark.parametrize(
    "message", ["no such message", "was trained with alpha …, but lora_beta is …"]
)
def test_unknown_messages_are_detected(message):
    assert not is_known(message)
