"""The project's Markdown files: their blocks of commands and code, their links and anchors.

A block of bash or Python is run as it is, unless the line before it says why not:

    <!-- not run: downloads roberta-base -->
    ```bash
    …
"""

import functools
import os
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from launches import fork_server
from paths import ROOT

# Files and folders in the project's folder that are not part of the project.
NOT_OURS = (
    *(".git", ".venv*", ".pytest_cache", ".ruff_cache", ".mypy_cache", "__pycache__", "*.egg-info"),
    *("build", "dist", "site", "runs", "quickstart_output", "glue_data", "output"),
    *("pretrained_checkpoints", "trained_models"),
)
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```[ ]*$", re.M | re.S)
_OUTPUT = re.compile(r"\s*^( *)```text\n(.*?)^\1```[ ]*$", re.M | re.S)
_REASON = re.compile(r"<!-- not run: (\S.*?) -->\s*\Z")
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")
_FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
# The line of a recipe's script that passes its flags on.
_RECIPE = re.compile(r"^exec .*/recipe(\.py|s/\w+\.sh)\"", re.M)
_SEPARATORS = {"&&", "||", ";", "|", "&"}


def pages(root: Path = ROOT) -> list[Path]:
    """The Markdown files of the project, except those in ignored folders."""
    found = (path.relative_to(root) for path in sorted(root.rglob("*.md")))
    return [
        path for path in found if not any(part.match(p) for part in path.parents for p in NOT_OURS)
    ]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Args:
        page: the page, from the project's root.
        line: the number of its first line.
        language: the language that the fence names.
        text: its content, without the fence's indentation.
        reason: why it is not run; None if it is.
        output: the output that the page shows in a block of text right below; None without one.
    """

    page: Path
    line: int
    language: str
    text: str
    reason: str | None
    output: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path, root: Path = ROOT) -> list[Block]:
    """The blocks of bash and Python on a page, in order."""
    text = (root / page).read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        indent, language, content = match.groups()
        if language not in ("bash", "python"):
            continue
        reason = _REASON.search(text[: match.start()])
        printed = _OUTPUT.match(text, match.end())
        line = text.count("\n", 0, match.start()) + 2
        found.append(
            Block(
                page,
                line,
                language,
                _unindented(content, indent),
                reason[1] if reason else None,
                _unindented(printed[2], printed[1]) if printed else None,
            )
        )
    return found


def _unindented(text: str, indent: str) -> str:
    return "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))


# ------------------------------------------------------------------------------------------------
# Links
# ------------------------------------------------------------------------------------------------


def _without_code(text: str) -> str:
    """A page without fenced blocks and inline code, which have no headings and links."""
    return re.sub(r"`[^`\n]*`", "``", _FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#{1,6} +(.+?)\s*#*$", _FENCE.sub("", text), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken_links(page: Path, root: Path = ROOT) -> Iterator[str]:
    """The links of a page that lead nowhere in the project, a line each."""
    text = (root / page).read_text(encoding="utf-8")
    for target in _LINK.findall(_without_code(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        path = (root / page).parent / name if name else root / page
        if not path.exists():
            yield f"{page}: {target}: there is no such file"
        elif not path.resolve().is_relative_to(root.resolve()):
            yield f"{page}: {target}: is not in the project"
        elif anchor and path.suffix != ".md":
            yield f"{page}: {target}: an anchor in something else than a page"
        elif anchor and anchor not in anchors(path.read_text(encoding="utf-8")):
            yield f"{page}: {target}: the page has no such heading"


# ------------------------------------------------------------------------------------------------
# Commands
# ------------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command of a shell script, without what comments say."""
    lines = iter(text.replace("\\\n", " ").splitlines())
    for line in lines:
        words = None
        while words is None:
            try:
                words = _words(line)
            except ValueError:  # a quotation that spans lines
                line += "\n" + next(lines)
        document = re.search(r"<<-?\s*['\"]?(\w+)", line)
        if document:
            while next(lines).strip() != document[1]:
                pass
        command: list[str] = []
        for word in [*words, ";"]:
            if word in _SEPARATORS:
                if command:
                    yield command
                command = []
            else:
                command.append(word)


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    return list(lexer)


def wrong_commands(block: Block, folder: Path = Path()) -> Iterator[str]:
    """Scripts that a block of bash names and that do not exist, and flags that they do not know.

    Args:
        block: the block.
        folder: where it is run, from the project's root.
    """
    here = folder
    for command in commands(block.text):
        if command[0] == "cd":
            here = here / command[1]
            continue
        names = [i for i, word in enumerate(command) if re.fullmatch(r"[\w./-]+\.(py|sh)", word)]
        if not names or not any(word in _RUNNERS for word in command[: names[0]]):
            continue
        script = here / command[names[0]]
        if not (ROOT / script).is_file():
            yield f"{block}: there is no {script}"
            continue
        given = command[names[0] + 1 :]
        given = given[: given.index("--")] if "--" in given else given
        flags = {word.partition("=")[0] for word in given if _FLAG.match(word)}
        known = known_flags((ROOT / script).resolve()) if flags else frozenset()
        for flag in sorted(flags - known):
            yield f"{block}: {script} does not know {flag}"


_RUNNERS = {"bash", "python", "python3", "torchrun", ".venv/bin/python", ".venv/bin/torchrun"}
_RUNNERS |= {".venv-any/bin/python"}


@functools.cache
def known_flags(script: Path) -> frozenset[str]:
    """The flags that a script knows: those in its --help, and in that of a script it refers to.

    Of the shell scripts, only recipes are asked for --help; others know the flags in their text.
    """
    own = script.read_text(encoding="utf-8")
    if script.suffix == ".sh" and not _RECIPE.search(own):
        return frozenset(_FLAG.findall(own))
    if script.suffix == ".sh":
        command = ["bash", script, "--help"]
        process = subprocess.run(command, capture_output=True, text=True)
    else:
        process = fork_server("others").run([script, "--help"], os.environ, timeout=120)
    if process.returncode:
        raise AssertionError(f"{script} --help: {process.stderr}")
    flags = set(_FLAG.findall(process.stdout)) | {"--help"}
    if script.suffix == ".sh":
        other = re.search(r"python (\S+\.py) --help", process.stdout)
        flags |= known_flags(ROOT / other[1]) if other else set()
    return frozenset(flags)
