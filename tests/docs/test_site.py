"""The documentation's site builds without warnings, has all public names, and links to code."""

import importlib.util
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from paths import ROOT

import loralib


def load_hook():
    spec = importlib.util.spec_from_file_location(
        "code_links", ROOT / "docs" / "hooks" / "code_links.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


code_links = load_hook()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return folder


@pytest.mark.slow
def test_it_builds_without_warnings(site):
    assert (site / "index.html").is_file()
    assert (site / "api" / "layers" / "index.html").is_file()
    assert not (site / "hooks").exists()


@pytest.mark.slow
def test_every_public_name_of_loralib_is_in_the_reference(site):
    shown = set()
    for page in (site / "api").rglob("*.html"):
        shown |= set(re.findall(r'id="loralib\.[\w.]*?(\w+)"', page.read_text(encoding="utf-8")))
    assert set(loralib.__all__) <= shown


@pytest.mark.parametrize(
    ("markdown", "url", "expected"),
    [
        ("[a](other.md)", "https://h/p", "[a](other.md)"),
        ("[a](../loralib/a.py)", "https://h/p", "[a](https://h/p/blob/main/loralib/a.py)"),
        ("[a](../loralib)", "https://h/p/", "[a](https://h/p/tree/main/loralib)"),
        ("[a](../R.md#x)", "https://h/p", "[a](https://h/p/blob/main/R.md#x)"),
        ("[a](../loralib/a.py) b", None, "a b"),
        ("[a](../docs/other.md)", "https://h/p", "[a](../docs/other.md)"),
        ("```\n[a](../loralib)\n```\n", "https://h/p", "```\n[a](../loralib)\n```\n"),
        ("![a](../p.png)", "https://h/p", "![a](../p.png)"),
    ],
)
def test_links_to_code_lead_to_the_repository(tmp_path, markdown, url, expected):
    assert rewritten(tmp_path, markdown, url) == expected


def test_a_link_to_a_missing_file_is_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert rewritten(tmp_path, "[a](../missing.py)", None) == "[a](../missing.py)"
        assert rewritten(tmp_path, "[a](../../outside.py)", None) == "[a](../../outside.py)"
    assert [record.name for record in caplog.records] == ["mkdocs.hooks.code_links"] * 2


def rewritten(folder: Path, markdown: str, url: str | None) -> str:
    root = folder / "project"
    (root / "docs").mkdir(parents=True, exist_ok=True)
    (root / "loralib").mkdir(exist_ok=True)
    for name in ("loralib/a.py", "R.md", "docs/other.md", "docs/page.md", "../outside.py"):
        (root / name).touch()
    page = SimpleNamespace(
        file=SimpleNamespace(abs_src_path=str(root / "docs" / "page.md"), src_uri="page.md")
    )
    config = {"docs_dir": str(root / "docs"), "repo_url": url}
    return code_links.on_page_markdown(markdown, page=page, config=config)
