"""The quickstart's learning curves: of which runs they are, and what their rates are chosen on."""

import json
import shutil
import sys

import pytest
import torch
from PIL import Image
from small_quickstart import add_lora_run, make_base_and_task

from loralib.adapters.formats import read_adapter
from loralib.io.tensors import read_tensors
from loralib.training import process

EPOCHS = 2


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = make_base_and_task(tmp_path_factory.mktemp("quickstart"))
    add_lora_run(folder, EPOCHS)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A copy of a small quickstart, to be written to."""
    return shutil.copytree(made, tmp_path / "quickstart")


@pytest.fixture
def script(load_example):
    return load_example("quickstart_curves.py")


@pytest.mark.slow
def test_a_table_and_a_picture_of_three_runs(script, folder, capsys, monkeypatch):
    drawn, draw = [], script.draw
    monkeypatch.setattr(script, "draw", lambda curves: drawn.append(curves) or draw(curves))
    script.main([str(folder)])
    *said, _titles, head, lora, full, last = capsys.readouterr().out.splitlines()
    epochs = [f"  epoch {number} of {EPOCHS}" for number in range(1, EPOCHS + 1)]
    assert [line for line in said if line.startswith("  epoch")] == 2 * epochs
    assert last == f"learning curves: {folder / 'learning_curves.png'}"
    with Image.open(folder / "learning_curves.png") as image:
        assert image.format == "PNG"
    (curves,) = drawn
    assert list(curves) == [script.HEAD, script.LORA, script.FULL]
    # LoRA's is the run that quickstart.sh has made.
    history = json.loads((folder / "sst2" / "trainer_state.json").read_text())["log_history"]
    assert curves[script.LORA].accuracies == {
        entry["epoch"]: 100 * entry["eval_accuracy"]
        for entry in history
        if "eval_accuracy" in entry
    }
    for curve in curves.values():
        assert list(curve.accuracies) == list(range(1, EPOCHS + 1))
        assert curve.last == curve.accuracies[EPOCHS]
    adapter, (everything, _) = (
        read_adapter(folder / "lora.bin").tensors,
        read_tensors(folder / "sst2" / "pytorch_model.bin"),
    )
    sizes = {
        head: sum(t.numel() for name, t in adapter.items() if "lora_" not in name),
        lora: sum(t.numel() for t in adapter.values()),
        full: sum(t.numel() for name, t in everything.items() if "lora_" not in name),
    }
    for line, size in sizes.items():
        assert line.split()[-1] == f"{size:,}"


@pytest.mark.slow
def test_only_the_learning_rate_is_another_than_lora_s(script, folder, monkeypatch):
    given = []

    class Recorded(script.TrainingArguments):
        def __post_init__(self):
            super().__post_init__()
            given.append(self)

    monkeypatch.setattr(script, "TrainingArguments", Recorded)
    script.main([str(folder)])
    of_lora = torch.load(folder / "sst2" / "training_args.bin", weights_only=True)
    assert [args.learning_rate for args in given] == [
        script.HEAD.learning_rate,
        script.FULL.learning_rate,
    ]
    for args in given:
        for name, value in args.to_dict().items():
            of_files = {"output_dir", "logging_dir", "run_name", "overwrite_output_dir", "no_cuda"}
            of_logs = {"logging_strategy", "disable_tqdm", "do_train", "do_eval", "local_rank"}
            if name not in of_files | of_logs | {"learning_rate"}:
                assert value == of_lora[name], name


@pytest.mark.slow
def test_rates_are_chosen_without_the_development_set(script, folder, monkeypatch, capsys):
    (folder / "data" / "SST-2" / "dev.tsv").unlink()
    quickstart, seen = script.Quickstart(folder), []

    def train(method, rate, training, measured, **settings):
        seen.append((method, rate, settings["seed"]))
        assert training + measured == quickstart.rows("train")
        assert len(measured) == len(training) // 4
        return script.Curve({1.0: 50.0}, 1)

    monkeypatch.setattr(quickstart, "train", train)
    script.try_rates(quickstart, 7)
    assert seen == [(method, rate, 7) for method in script.METHODS for rate in method.rates]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(seen)
    assert lines[0] == f"{script.HEAD.name}: rate {script.HEAD.rates[0]:g}: seed 7: 50.0 %"


def test_rates_were_chosen_from_those_that_are_tried(script):
    for method in (script.HEAD, script.FULL):
        assert method.learning_rate in method.rates[1:-1]


def test_matplotlib_is_asked_for_before_anything_is_trained(script, monkeypatch, tmp_path):
    def train(*_given, **_settings):
        raise AssertionError("nothing should be trained")

    monkeypatch.setattr(script.Quickstart, "__init__", lambda self, folder: None)
    monkeypatch.setattr(script.Quickstart, "train", train)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    lines = []
    with pytest.raises(SystemExit):
        process.run(lambda: script.main([str(tmp_path)]), lines.append)
    assert lines[0].endswith("the picture needs matplotlib: pip install matplotlib")


def test_a_curve_is_drawn_as_it_is(script):
    curves = {
        script.HEAD: script.Curve({1.0: 50.0, 2.0: 60.0}, 10),
        script.FULL: script.Curve({2.0: 80.0, 1.0: 70.0}, 2000),
    }
    (panel,) = script.draw(curves).axes
    assert [list(map(list, line.get_data())) for line in panel.lines] == [
        [[1.0, 2.0], [50.0, 60.0]],
        [[1.0, 2.0], [70.0, 80.0]],
    ]
    assert panel.lines[1].get_label() == "full fine-tuning: 80.0 %, 2,000 parameters trained"
    assert script.table(curves)[2].split() == ["full", "fine-tuning", "80.0", "2,000"]
