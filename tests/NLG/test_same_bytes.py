"""Tests that the same command, run twice in new processes, writes the same bytes."""

import json

import pytest


@pytest.mark.distributed
@pytest.mark.parametrize("save", [[], ["--save_lora_only"]])
def test_gpt2_ft(tiny, launch_tiny, tmp_path, files_of, save):
    work_dir = tmp_path / "run"
    more = "--max_epoch 2 --save_interval 3 --eval_interval 4 --lora_dropout 0.3 --lr 0.03"
    argv = tiny.flags(work_dir, *more.split(), *save)
    contents = []
    for name in ("first", "second"):
        result = launch_tiny("torch.distributed.run", argv, processes=1)
        assert result.returncode == 0, result.stderr
        work_dir.rename(tmp_path / name)
        found = {path: content for path, (content, _) in files_of(tmp_path / name).items()}
        del found[".launch.json"]  # identifies the launcher
        lines = found.pop("metrics.jsonl").decode().splitlines()
        found["metrics"] = [
            {key: value for key, value in json.loads(line).items() if key != "tokens_per_second"}
            for line in lines
        ]
        contents.append(found)
    assert contents[0].keys() == contents[1].keys()
    assert [name for name in contents[0] if contents[0][name] != contents[1][name]] == []
    assert {"resume.pt", "model.3.pt", "model.6.pt"} <= contents[0].keys()
