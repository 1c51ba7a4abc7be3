"""The folders of a task's script: which runs are resumed, and what is not overwritten."""

import os
from pathlib import Path

import pytest

from loralib.training import restarts
from transformers import TrainingArguments, trainer_checkpoint
from transformers.fine_tuning.folders import check_sources_kept, find_checkpoint
from transformers.trainer_checkpoint import checkpoint_identities


@pytest.mark.parametrize("folder", ["out", "./out", "a/../out"])
def test_a_restart_resumes_only_its_own_run(tmp_path, monkeypatch, folder):
    """It ignores an earlier run's checkpoints, though their step numbers are higher."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(restarts, "_agent", lambda: "host 1 1")
    for name in ("a", "out/checkpoint-30", "out/checkpoint-40"):
        Path(name).mkdir(parents=True)
    args = TrainingArguments(folder, do_train=True, overwrite_output_dir=True)
    assert find_checkpoint(args) is None
    args.launch.begin(checkpoint_identities(args))
    assert find_checkpoint(args) is None
    Path("out/checkpoint-10").mkdir()
    Path("out/checkpoint-30").rename("away")  # this run writes one of that name
    Path("out/checkpoint-30").mkdir()
    later = os.stat("away").st_mtime_ns + 10**9
    os.utime("out/checkpoint-30", ns=(later, later))
    assert Path(find_checkpoint(args)).name == "checkpoint-30"
    Path("out/checkpoint-30").rmdir()
    assert Path(find_checkpoint(args)).name == "checkpoint-10"


SAVED = ("pytorch_model_lora.bin", "pytorch_model.bin", "model.safetensors")


@pytest.mark.parametrize(
    "source",
    [
        *("out", "./out/", "link", "out/checkpoint-5", "out/checkpoint-5/x.bin"),
        *(f"out/{name}" for name in SAVED),
    ],
)
def test_training_does_not_overwrite_what_it_starts_from(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    Path("out/checkpoint-5").mkdir(parents=True)
    Path("link").symlink_to("out")
    for name in (*SAVED, "mine.bin", "checkpoint-5/x.bin"):
        Path("out", name).touch()
    args = TrainingArguments("out", do_train=True, overwrite_output_dir=True)
    with pytest.raises(ValueError, match=r"^--lora_path .+: training would overwrite it"):
        check_sources_kept(args, {"model_name_or_path": "roberta-base", "lora_path": source})
    # Training writes neither to files of other names nor outside of the folder.
    check_sources_kept(args, {"model_name_or_path": ".", "lora_path": "out/mine.bin"})
    args.overwrite_output_dir = False  # the run resumes from the checkpoint
    check_sources_kept(args, {"lora_path": source})
    args.do_train, args.overwrite_output_dir = False, True  # evaluation writes only results
    check_sources_kept(args, {"lora_path": source})


def test_training_does_not_write_into_a_base_s_folder(tmp_path):
    args = TrainingArguments(str(tmp_path), do_train=True)
    (tmp_path / "circle").symlink_to("circle")
    check_sources_kept(args, {"model_name_or_path": str(tmp_path / "circle")})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="training would overwrite it"):
        check_sources_kept(args, {"model_name_or_path": str(tmp_path)})


def test_results_are_not_written_among_a_base_s_files(tmp_path):
    """They are written to the folder of a run, whose model is evaluated again."""
    args = TrainingArguments(str(tmp_path / "out"), do_eval=True)
    sources = {"model_name_or_path": str(tmp_path / "out"), "lora_path": None}
    check_sources_kept(args, sources)  # there is no such folder, so it is a name on the hub
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"^--model_name_or_path .+: results would be written am"):
        check_sources_kept(args, sources)
    check_sources_kept(args, {"model_name_or_path": str(tmp_path)})
    for name in ("lora_path", "adapter_path"):  # results may be written to an adapter's folder
        check_sources_kept(
            args, {"model_name_or_path": "roberta-base", name: str(tmp_path / "out")}
        )
    (tmp_path / "link").symlink_to("out")
    linked = {"model_name_or_path": str(tmp_path / "link"), "lora_path": str(tmp_path / "out")}
    with pytest.raises(ValueError, match=r"^--model_name_or_path .+link: results would be writ"):
        check_sources_kept(args, linked)
    (tmp_path / "out" / "training_args.bin").touch()
    check_sources_kept(args, sources)
    check_sources_kept(args, linked)


def test_a_missing_model_name_is_not_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_sources_kept(TrainingArguments(".", do_eval=True), {"model_name_or_path": None})


def test_a_restart_on_another_machine_recognizes_an_earlier_run_s_checkpoints(
    tmp_path, monkeypatch
):
    """Another machine may give the files of a shared folder other inode numbers."""
    monkeypatch.setattr(restarts, "_agent", lambda: "host 1 1")
    (tmp_path / "checkpoint-30").mkdir()
    args = TrainingArguments(str(tmp_path), do_train=True, overwrite_output_dir=True)
    assert find_checkpoint(args) is None
    args.launch.begin(checkpoint_identities(args))
    seen_here = os.stat

    def seen_there(path, *given, **more):
        status = seen_here(path, *given, **more)
        numbers = list(status)
        numbers[1:3] = status.st_ino + 1, status.st_dev + 1
        times = {name: getattr(status, name) for name in ("st_atime_ns", "st_mtime_ns")}
        return os.stat_result(numbers, times)

    monkeypatch.setattr(trainer_checkpoint.os, "stat", seen_there)
    assert find_checkpoint(args) is None
    (tmp_path / "checkpoint-10").mkdir()
    assert Path(find_checkpoint(args)).name == "checkpoint-10"


@pytest.mark.parametrize("overwrites", [True, False])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_new_run_that_overwrites_replaces_old_checkpoints(tmp_path, overwrites, is_new):
    (tmp_path / "checkpoint-30").mkdir()
    args = TrainingArguments(str(tmp_path), overwrite_output_dir=overwrites)
    found = trainer_checkpoint.outdated_checkpoints(args, is_new=is_new)
    assert found == ["checkpoint-30"] * (overwrites and is_new)
    assert bool(trainer_checkpoint.outdated_checkpoints(args)) == overwrites
