"""Every link between the documents, and from them to the project's files, leads somewhere."""

import re
from pathlib import Path

import pytest
from documents import anchors, broken_links, pages
from paths import ROOT


@pytest.mark.parametrize("page", pages(), ids=str)
def test_links_and_anchors_resolve(page):
    assert list(broken_links(page)) == []


@pytest.mark.parametrize("page", pages(), ids=str)
def test_files_that_are_named_exist(page):
    """Those in backticks in a folder of the project; * stands for any characters."""
    parts = "benchmarks|docs|examples|loralib|NLG|NLU|tests|utils"
    text = (ROOT / page).read_text("utf-8")
    named = set(re.findall(rf"`((?:{parts})/[\w*./-]*\.(?:ini|ipynb|md|py|sh|txt))`", text))
    assert sorted(name for name in named if not any(ROOT.glob(name))) == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 125


def test_anchors_are_those_of_code_hosts():
    text = "# What's new? (A & B)\n## `a_b` and [c](d.md)\n```\n# not one\n```\n## Same\n## Same\n"
    assert anchors(text) == {"whats-new-a--b", "a_b-and-c", "same", "same-1"}


@pytest.mark.parametrize(
    ("link", "wrong"),
    [
        ("[a](other.md)", None),
        ("[a](other.md#one-two)", None),
        ("[a](#here)", None),
        ("![a](picture.png)", None),
        ("[a](https://example.org/missing)", None),
        ("`[a](missing.md)`", None),
        ("[a](missing.md)", "no such file"),
        ("[a](other.md#three)", "no such heading"),
        ("[a](#there)", "no such heading"),
        ("![a](missing.png)", "no such file"),
        ("[![a](picture.png)](other.md)", None),
        ("[a](../../outside.md)", "not in the project"),
        ("[a](picture.png#x)", "something else than a page"),
    ],
)
def test_broken_links_are_found(tmp_path, link, wrong):
    root = tmp_path / "project"
    (root / "docs").mkdir(parents=True)
    (tmp_path / "outside.md").touch()
    (root / "docs" / "other.md").write_text("# One two\n")
    (root / "docs" / "picture.png").touch()
    page = Path("docs/page.md")
    (root / page).write_text(f"# Here\n\n{link}\n")
    found = list(broken_links(page, root))
    assert len(found) == (wrong is not None)
    assert all(wrong in each for each in found)


def test_pages_in_ignored_folders_are_left_out(tmp_path):
    for name in ("a.md", "docs/b.md", ".venv-any/c.md", "output/d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert pages(tmp_path) == [Path("a.md"), Path("docs/b.md")]


def test_the_pages_install_the_pinned_torch_on_machines_without_a_gpu():
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)[1]
    for page, times in (("installing.md", 2), ("any-model.md", 1)):
        text = (ROOT / "docs" / page).read_text("utf-8")
        assert re.findall(r"torch==(\S+) ", text) == [pinned] * times
