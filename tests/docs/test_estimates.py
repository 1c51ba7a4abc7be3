"""The estimates on the pages are what `--estimate` prints."""

import os
import re
import shlex
import subprocess

import pytest
from launches import preloaded_python
from paths import ROOT

# A page, and the folder that its command is run in.
PAGES = [("docs/performance.md", "."), ("NLU/README.md", "."), ("NLG/README.md", "NLG")]


def shown(page: str) -> tuple[str, list[str]]:
    """The command with --estimate_rate on a page, and the lines that it prints by the page."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", "")
    command = re.search(r"^(?:\$ )?(.*--estimate_rate.*)$", text, re.MULTILINE)
    printed = re.search(r"^parameters .*?(?=^```)", text[command.end() :], re.MULTILINE | re.DOTALL)
    return command[1], printed[0].splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "folder"), PAGES)
def test_estimates_are_those_of_the_page(page, folder, tmp_path):
    command, expected = shown(page)
    command = command.replace("output/none", shlex.quote(str(tmp_path / "none")))
    path = os.pathsep.join([str(preloaded_python().parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT / folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("parameters "))
    assert lines[start : start + len(expected)] == expected
