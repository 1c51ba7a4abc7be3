"""A copy of the project and the environment of a new user, to run a page's commands in."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from launches import ForkServer
from page_runs import clean_environment, copy_project, run_bash, shortened


@pytest.fixture(scope="session")
def new_user(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The environment of a user who has just installed the project, with an empty home.

    Its python is a fork of a process that has imported the other packages; see `ForkServer`.
    """
    environment = clean_environment(tmp_path_factory.mktemp("home"))
    server = ForkServer("others", environment=environment)
    python = server.command()
    yield {**environment, "PATH": f"{python.parent}{os.pathsep}{environment['PATH']}"}
    server.close()


@pytest.fixture(scope="session")
def checkout(tmp_path_factory, new_user) -> Path:
    """A copy of the project with the quickstart's output, made in few steps."""
    folder = tmp_path_factory.mktemp("checkout") / "lora"
    copy_project(folder)
    script = shortened((folder / "quickstart.sh").read_text(encoding="utf-8"))
    run_bash(script, folder, new_user, "quickstart.sh")
    made = ("base/config.json", "data/corpus.txt", "sst2/pytorch_model.bin", "lora.bin")
    made += ("reloaded/eval_results.json", "learning_curves.png")
    assert [name for name in made if not (folder / "quickstart_output" / name).is_file()] == []
    return folder
