"""The messages that the troubleshooting page and others explain are those of the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from paths import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
FOLDERS = ("loralib", "NLU", "NLG", "examples", "utils")
PLACEHOLDER = "\0"
# Python's own.
IMPORT_ERROR = "cannot import name '…' from 'transformers'"
# What other pages show where the troubleshooting page has …, as far as its form tells: numbers,
# quoted values, names of modules, files and classes.
VALUE = re.compile(r"…|'[^']*'|\S*[\d._/]\S*|\([^ ]*\)|\b[A-Z]\w+")


def messages(text: str) -> list[str]:
    """What is in backticks at the start of a table's rows, but for Python's and PyTorch's own."""
    cells = re.findall(r"^\| (`.+?) \| ", text, re.M)
    ours = (cell for cell in cells if not re.search(r"\((?:Python|PyTorch)'s\)", cell))
    return [message for cell in ours for message in re.findall("`(.+?)`", cell)]


def docstrings(node: ast.AST) -> set[int]:
    """The ids of the nodes of a module that are docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = (each for each in ast.walk(node) if isinstance(each, kinds))
    return {id(each.body[0].value) for each in documented if ast.get_docstring(each) is not None}


def literals(node: ast.AST) -> Iterator[str]:
    """The strings of a module but for docstrings, with a placeholder for an f-string's values."""
    left_out = docstrings(node)
    for child in ast.walk(node):
        if id(child) in left_out:
            continue
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
    return re.search(pattern, known()) is not None


@pytest.mark.parametrize("message", messages(PAGE.read_text(encoding="utf-8")))
def test_a_message_of_the_page_is_in_the_code(message):
    assert is_known(message)


def sequences(text: str) -> Iterator[tuple[str, ...]]:
    """The sequences of three words in a text."""
    words = re.sub(r"[^\w'-]+", " ", text).split()
    return zip(words, words[1:], words[2:], strict=False)


@cache
def known_sequences() -> set[tuple[str, ...]]:
    """The sequences of three words in the code's strings, where values take no place."""
    lines = re.sub(rf"{PLACEHOLDER}|%[sd]", " ", known()).splitlines()
    return {sequence for line in lines for sequence in sequences(line)}


def share_known(message: str) -> float:
    """The share of a message's sequences, but for those with a value, that are in the code."""
    own = [each for part in VALUE.split(message) for each in sequences(part)]
    return sum(each in known_sequences() for each in own) / len(own) if own else 1.0


def messages_of_other_pages() -> list[tuple[str, str]]:
    """Each page's name with the messages in its tables: what is in backticks."""
    found = []
    for page in sorted(PAGE.parent.glob("*.md")):
        tables = re.findall(r"^\| message \|.*\n((?:\|.*\n)+)", page.read_text("utf-8"), re.M)
        if page != PAGE:
            found += [(page.name, message) for table in tables for message in messages(table)]
    return found


@pytest.mark.parametrize(("page", "message"), messages_of_other_pages())
def test_a_message_with_the_values_of_an_example_is_in_the_code(page, message):
    # Half of it, because a value that is a common word cannot be told from the message's own.
    assert share_known(message) >= 0.5


@pytest.mark.parametrize(
    "message",
    [
        "r = 300 is larger than a dimension of …",
        "head has too low a rank, 5: give rank_pattern={'head': 5}",
    ],
)
def test_unknown_messages_with_values_are_detected(message):
    assert share_known(message) < 0.5


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
