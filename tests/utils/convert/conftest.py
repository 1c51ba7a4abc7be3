"""Fixtures that run convert.py in this process, and adapters of each family."""

import importlib

import pytest
from conversions import FAMILIES, SETTINGS_LIKE_PEFT, Trained, make_base, train, tree

from loralib.training import process


@pytest.fixture(scope="session")
def script():
    """The module; `script.main(arguments)` runs it in this process."""
    return importlib.import_module("convert")


@pytest.fixture
def convert(script, capsys):
    """``convert(*arguments)``: runs convert.py; what it prints, by name, with notes as a list."""

    def run(*arguments: object) -> dict:
        capsys.readouterr()
        script.main([str(argument) for argument in arguments])
        first, *lines = capsys.readouterr().out.splitlines()
        printed = {"first": first, "notes": []}
        for line in lines:
            assert line.startswith("  ")
            if line.startswith("  note: "):
                printed["notes"].append(line.removeprefix("  note: "))
            else:
                name, value = line.split(maxsplit=1)
                printed[name] = value
        return printed

    return run


@pytest.fixture
def failure(script, tmp_path, capsys):
    """``failure(*arguments)``: the error line of convert.py, which must fail and change no file."""

    def run(*arguments: object) -> str:
        before, lines = tree(tmp_path), []
        with pytest.raises(SystemExit) as ended:
            process.run(
                lambda: script.main([str(argument) for argument in arguments]), lines.append
            )
        assert ended.value.code == 1
        assert tree(tmp_path) == before
        assert capsys.readouterr().out == ""
        (line,) = lines
        assert "\n" not in line
        return line

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> dict[str, Trained]:
    """An adapter of each family."""
    folder = tmp_path_factory.mktemp("bases")
    adapters = {family: train(make_base(folder / family, family), family) for family in FAMILIES}
    adapters["deberta as PEFT's"] = train(
        adapters["deberta"].base, "deberta", **SETTINGS_LIKE_PEFT["deberta"]
    )
    return adapters
