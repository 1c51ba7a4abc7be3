"""Tests of how an attempt finds out that there was an earlier one of the same run."""

import json
import os
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from loralib.training import restarts
from loralib.training.locks import started
from loralib.training.restarts import find_launch


@pytest.fixture
def agent(monkeypatch):
    """``agent(name)`` sets the agent that has started this process; None if no launcher has."""

    def start(name):
        monkeypatch.setattr(restarts, "_agent", lambda: name)

    return start


@pytest.mark.parametrize("note", [{"step": 3}, {}, None])
def test_later_attempts_of_one_agent_are_restarts(agent, tmp_path, note):
    agent("a 1 100")
    first = find_launch(tmp_path, 1)
    assert (first.is_restart, first.note) == (False, None)
    assert not find_launch(tmp_path, 1).is_restart  # the first attempt has not begun
    first.begin(note)
    later = find_launch(tmp_path, 1)
    assert (later.is_restart, later.note) == (True, note)
    later.begin({"step": 4})
    assert find_launch(tmp_path, 1).note == note
    agent("a 1 200")  # another process with the same id
    assert not find_launch(tmp_path, 1).is_restart


def test_one_agent_in_common_makes_it_a_restart(agent, tmp_path):
    path = tmp_path / ".launch.json"
    path.write_text(json.dumps({"agents": ["lost 1 1", "left 2 2"], "note": None}))
    agent("left 2 2")
    assert find_launch(tmp_path, 1).is_restart
    agent("new 3 3")
    assert not find_launch(tmp_path, 1).is_restart


def test_a_restart_is_recognized_after_hosts_were_replaced_one_by_one(agent, tmp_path, monkeypatch):
    """The third attempt has no agent in common with the first, and the fourth only that one."""
    attempts = ["a 1 1", "b 2 2"], ["b 2 2", "c 3 3"], ["c 3 3", "d 4 4"], ["a 1 1", "e 5 5"]
    for number, hosts in enumerate(attempts):
        monkeypatch.setattr(
            restarts,
            "gather_objects",
            lambda value, _, hosts=hosts: hosts if isinstance(value, str) else [value],
        )
        agent(hosts[0])
        found = find_launch(tmp_path, 2)
        assert found.is_restart == (number > 0)
        found.begin("the first one's" if not found.is_restart else "another")
    assert found.note == "the first one's"


@pytest.mark.parametrize("is_first_one_s", [True, False])
def test_all_processes_use_what_the_first_one_reads(agent, tmp_path, monkeypatch, is_first_one_s):
    """A host may see a shared folder as it was seconds ago."""
    agent("a 1 1")
    read = [{"agents": ["a 1 1"], "note": 3}, None]
    read = read if is_first_one_s else read[::-1]
    monkeypatch.setattr(
        restarts, "gather_objects", lambda value, _: [value] * 2 if value == "a 1 1" else read
    )
    found = find_launch(tmp_path, 2)
    assert (found.is_restart, found.note) == ((True, 3) if is_first_one_s else (False, None))


def test_without_a_launcher_no_file_is_written(agent, tmp_path):
    agent(None)
    find_launch(tmp_path, 1).begin()
    assert list(tmp_path.iterdir()) == []
    assert not find_launch(tmp_path / "nowhere", 1).is_restart


def test_the_agent_can_start_processes_by_multiprocessing(monkeypatch):
    """As with torchrun --run_path; the process is then in the agent's own session."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert restarts._agent() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    parent = SimpleNamespace(pid=1)
    monkeypatch.setattr(restarts.multiprocessing, "parent_process", lambda: parent)
    assert restarts._agent() == f"{socket.gethostname()} 1 {started(1)}"


def test_without_sessions_the_agent_is_the_parent_process(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(restarts.sys, "platform", "win32")
    monkeypatch.delattr(os, "getsid")
    assert restarts._agent().split()[1] == str(os.getppid())


WITHOUT_PROC = "from loralib.training import locks; locks._stat = open\n"
# The module that talks to other processes would import PyTorch, which takes most of the time.
AGENT = """
import sys
from types import SimpleNamespace

sys.modules["loralib.training.distributed"] = SimpleNamespace(gather_objects=None)
from loralib.training import restarts

print(restarts._agent())
"""


@pytest.mark.parametrize("wrapper", ["exec {}", "{}; exit $?", "sh -c '{}; exit $?'"])
@pytest.mark.parametrize("has_proc", [True, False], ids=["Linux", "another system"])
def test_the_agent_can_start_a_shell_that_starts_python(tmp_path, wrapper, has_proc):
    """As with torchrun --no-python and a shell script."""
    if not has_proc and shutil.which("ps") is None:
        pytest.skip("needs ps")
    script = tmp_path / "agent.py"
    script.write_text(AGENT if has_proc else f"{WITHOUT_PROC}{AGENT}")
    python = f'"{sys.executable}" "{script}"'
    result = subprocess.run(
        ["sh", "-c", wrapper.format(python)],
        env={**os.environ, "TORCHELASTIC_RUN_ID": "none"},
        start_new_session=True,  # as torchrun's agent does
        capture_output=True,
        text=True,
    )
    assert result.stdout.split()[1:2] == [str(os.getpid())], result.stderr


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"agents": 3}', '{"agents": ["a 1 1"]}', "null"]
)
def test_with_a_damaged_file_the_run_counts_as_new(agent, tmp_path, caplog, content):
    agent("a 1 1")
    (tmp_path / ".launch.json").write_text(content)
    found = find_launch(tmp_path, 1)
    assert not found.is_restart
    assert ".launch.json is damaged" in caplog.text
    found.begin()
    assert find_launch(tmp_path, 1).is_restart
