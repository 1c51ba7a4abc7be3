"""Versions that several files name are the same in all of them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_pre_commit_runs_the_pinned_ruff():
    pinned = re.search(r"^ruff==(\S+)$", read("constraints.txt"), re.M)[1]
    config = read(".pre-commit-config.yaml")
    assert re.search(r"ruff-pre-commit\n\s+rev: v(\S+)$", config, re.M)[1] == pinned


def test_oldest_txt_has_the_oldest_versions_that_are_allowed():
    needs = "".join(map(read, ["setup.py", "NLU/setup.py", "NLG/requirements.txt"]))
    oldest = dict(re.findall(r"\b(?!python|loralib)([a-z_]+)>=([\d.]+)", needs))
    tested = dict(re.findall(r"^([a-z_]+)==(\S+)$", read("tests/oldest.txt"), re.M))
    assert tested.keys() == oldest.keys()
    for name, version in oldest.items():
        assert f"{tested[name]}.".startswith(f"{version}."), name


def test_continuous_integration_runs_every_supported_python():
    matrix = re.search(r"python: \[(.*)\]", read(".github/workflows/tests.yml"))[1]
    versions = re.findall(r"3\.(\d+)", matrix)
    oldest, newest = re.search(
        r"\(3, (\d+)\) <= .* <= \(3, (\d+)\)", read("utils/make_environment.sh")
    ).groups()
    assert versions == [str(minor) for minor in range(int(oldest), int(newest) + 1)]
    assert f'python_requires=">=3.{oldest}"' in read("setup.py")
