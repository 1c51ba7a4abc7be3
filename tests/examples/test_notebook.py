"""The notebook runs from top to bottom, and what is stored in it is of such a run."""

import os
import sys

import nbformat
import pytest
from launches import fork_server
from nbclient import NotebookClient
from paths import ROOT

PATH = ROOT / "examples" / "lora_from_scratch.ipynb"
LARGEST = 200_000  # bytes, of the file with its pictures
# Seconds, which no busy machine needs: for the kernel to start, and for a cell to run.
PATIENCE = {"startup_timeout": 600, "timeout": 1800}


@pytest.fixture
def notebook():
    return nbformat.read(PATH, as_version=4)


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Runs a notebook in a kernel of this Python, with an empty home and without the hub."""
    for name in ("HOME", "IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "HOME").mkdir()
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("JUPYTER_PATH", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    others = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), others])))
    monkeypatch.delenv("PYTHONOPTIMIZE", raising=False)  # which leaves asserts out

    def run(notebook):
        where = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(notebook, kernel_name="python3", resources=where, **PATIENCE).execute()
        return notebook

    return run


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook):
    """What each cell prints, by its number; Matplotlib's messages, on stderr, are left out."""
    return [
        "".join(out.text for out in cell.outputs if out.get("name") == "stdout")
        for cell in code_of(notebook)
    ]


def check_complete(notebook):
    """Every cell has been run once, in order, and none has failed."""
    cells = code_of(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {out.output_type for cell in cells for out in cell.outputs}
    assert kinds == {"stream", "display_data"}


def test_what_is_stored_is_of_a_complete_run(notebook):
    nbformat.validate(notebook)
    check_complete(notebook)
    outputs = [out for cell in code_of(notebook) for out in cell.outputs]
    assert {out.name for out in outputs if "name" in out} == {"stdout"}
    pictures = [out for out in outputs if "data" in out]
    assert len(pictures) == 3
    assert all("image/png" in out.data for out in pictures)
    assert PATH.stat().st_size < LARGEST


def test_nothing_stored_is_of_the_machine_it_ran_on(notebook):
    for text in printed(notebook):
        assert "/home/" not in text
        assert "/tmp/" not in text
        assert sys.prefix not in text


@pytest.mark.slow
def test_it_runs_and_says_what_is_stored(notebook, execute):
    stored = printed(notebook)
    checked = 'print("asserts are on:", __debug__)'
    notebook.cells.append(nbformat.v4.new_code_cell(checked))
    now = printed(execute(notebook))
    check_complete(notebook)
    assert now.pop() == "asserts are on: True\n"
    # Accuracies may differ from machine to machine; what is counted does not.
    counted = [number for number, text in enumerate(stored) if "parameters are trained" in text]
    assert [now[number] for number in counted] == [stored[number] for number in counted]
    assert len(counted) == 1
    assert [bool(text) for text in now] == [bool(text) for text in stored]


@pytest.mark.slow
def test_an_update_that_is_scaled_wrongly_is_found(notebook, tmp_path):
    """By hand then is not what loralib computes."""
    (cell,) = (cell for cell in code_of(notebook) if "class LowRank" in cell.source)
    right = "self.scaling = alpha / r"
    assert right in cell.source
    cell.source = cell.source.replace(right, "self.scaling = alpha / r / 2")
    path = tmp_path / "notebook.py"
    path.write_text("\n".join(cell.source for cell in code_of(notebook)))
    done = fork_server("others").run([path], {**os.environ, "MPLBACKEND": "agg"}, 300)
    assert "assert difference < 1e-6" in done.stderr
    assert done.stderr.splitlines()[-1] == "AssertionError"
