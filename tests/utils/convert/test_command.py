"""Tests convert.py as a command: refused targets and sources, usage, and names on the hub."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from conversions import OUT, SCRIPT, assert_same_tensors, close, make_base, plain_logits
from launches import fork_server, preloaded_python

from loralib.adapters.formats import FORMATS, read_adapter, write_adapter

# ---- Refused ----


@pytest.mark.parametrize(
    ("target", "format", "reason"),
    [
        ("in.safetensors", "lora", "exists already"),
        ("in.safetensors", None, "exists already"),
        ("folder/../in.safetensors", "lora", "exists already"),
        ("mine.bin", None, "exists already"),
        ("link.bin", None, "exists already"),
        ("folder.bin", None, "exists already"),
        ("run", "lora", "pytorch_model_lora.safetensors: exists already"),
        ("run", "release", "pytorch_model_lora.bin: exists already"),
        ("folder", "peft", "exists already"),
        ("folder", "merged", "exists already"),
        ("mine", "lora", "is a file, where a folder is needed"),
        ("mine", "peft", "exists already"),
        ("mine", "merged", "exists already"),
        ("mine/out.bin", None, "is a file, where a folder is needed"),
        ("new/out.bin", "lora", "has to end in .safetensors"),
        ("out.safetensors", "release", "has to end in .bin or .pt"),
        ("out.txt", "release", "has to end in .bin or .pt"),
        ("out.bin", "peft", "the format peft is a folder"),
        ("out.safetensors", "merged", "the format merged is a folder"),
        ("out", None, "does not tell the format"),
        ("out.txt", None, "the format"),
    ],
)
def test_targets_that_are_refused(failure, trained, tmp_path, target, format, reason):
    given = trained["roberta"]
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    for folder in ("run", "folder", "folder.bin"):
        (tmp_path / folder).mkdir()
    for suffix in ("safetensors", "bin"):
        (tmp_path / "run" / f"pytorch_model_lora.{suffix}").write_text("mine")
    for name in ("mine", "mine.bin", "folder/mine"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "link.bin").symlink_to(tmp_path / "in.safetensors")
    flags = ["--to", format] if format else []
    flags += ["--base", given.base] if format == "merged" else []
    assert reason in failure(tmp_path / "in.safetensors", tmp_path / target, *flags)


@pytest.mark.parametrize("named", ["folder", "file"])
@pytest.mark.parametrize(("first", "second"), [("lora", "release"), ("release", "lora")])
def test_a_folder_with_another_adapter(convert, failure, trained, tmp_path, first, second, named):
    """It would be read instead of the new one. The same adapter may be there in another format."""
    given, folder = trained["roberta"], tmp_path / "folder"
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    convert(tmp_path / "in.safetensors", folder, "--to", first)
    line = failure(tmp_path / "in.safetensors", folder, "--to", second)
    assert "belongs to another adapter, which would be read instead of the new one" in line
    source = folder if named == "folder" else next(folder.iterdir())
    convert(source, folder, "--to", second, *(("--lora_alpha", 6) if second == "lora" else ()))
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("format", ["lora", "release"])
def test_a_folder_with_pefts_adapter_is_refused(failure, trained, tmp_path, format):
    write_adapter(tmp_path / "in", trained["roberta"].adapter, "peft")
    line = failure(tmp_path / "in", tmp_path / "in", "--to", format)
    assert "adapter_config.json: belongs to another adapter" in line


@pytest.mark.parametrize("format", [*FORMATS, "merged"])
def test_a_targets_folder_is_made(convert, trained, tmp_path, format):
    given = trained["roberta"]
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    target = tmp_path / "new" / "folder" / OUT[format]
    convert(tmp_path / "in.safetensors", target, "--to", format, "--base", given.base)
    assert target.exists()


@pytest.mark.parametrize("format", [*FORMATS, "merged"])
def test_adapters_of_joint_training_are_refused(failure, trained, tmp_path, format):
    given = trained["roberta"]
    info = replace(given.adapter.metadata, trained_with=("apply_adapter", "apply_bitfit"))
    write_adapter(tmp_path / "in.safetensors", replace(given.adapter, metadata=info))
    flags = ("--to", format, "--base", given.base)
    line = failure(tmp_path / "in.safetensors", tmp_path / OUT[format], *flags)
    assert "was trained with apply_adapter, apply_bitfit as well" in line


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("absent.bin", "no such checkpoint file"),
        ("empty", "holds no adapter"),
        ("cut.safetensors", "damaged"),
        ("two", "holds two adapters"),
    ],
)
def test_sources_that_are_not_an_adapter(failure, trained, tmp_path, source, reason):
    given = trained["roberta"]
    (tmp_path / "empty").mkdir()
    write_adapter(tmp_path / "cut.safetensors", given.adapter)
    content = (tmp_path / "cut.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[:-9])
    write_adapter(tmp_path / "two", given.adapter, "peft")
    write_adapter(tmp_path / "two", given.adapter, "lora")
    assert reason in failure(tmp_path / source, tmp_path / "out.bin")


# ---- As a command ----


def command(*arguments: object, cwd: Path, **more) -> subprocess.CompletedProcess:
    line = [preloaded_python(), SCRIPT, *arguments]
    return subprocess.run(list(map(str, line)), cwd=cwd, capture_output=True, text=True, **more)


@pytest.mark.slow
def test_from_any_folder_with_relative_names(trained, tmp_path):
    given = trained["roberta"]
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    done = command("in.safetensors", "out", "--to", "merged", "--base", given.base, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()[:2]
    assert (first, second.split()) == (
        "out: written, from in.safetensors:",
        ["format", "merged"],
    )
    close(plain_logits(tmp_path / "out", "roberta"), given.logits)

    done = command("in.safetensors", "out", "--to", "peft", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line == "convert.py: error: out: exists already; give another name"


def test_help(script, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"])
    assert ended.value.code == 0
    explained = capsys.readouterr().out
    for word in ("lora ", "release ", "peft ", "merged ", "--base", "--lora_alpha", "--dtype"):
        assert word in explained


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "IN"),
        (["in.bin"], "give OUT, or --info"),
        (["in.bin", "--to", "lora"], "give OUT, or --info"),
        (["in.bin", "out.bin", "--info"], "--info writes nothing"),
        (["in.bin", "--info", "--to", "lora"], "--info writes nothing"),
        (["in.bin", "--info", "--base", "x"], "--info writes nothing"),
        (["in.bin", "--info", "--dtype", "float32"], "--info writes nothing"),
        (["in.bin", "--info", "--task", "rte"], "--info writes nothing"),
        (["in.bin", "--info", "--labels", "yes", "no"], "--info writes nothing"),
        (["in.bin", "out.bin", "--labels", "a", "b", "a"], "--labels names 'a' twice"),
        (["in.bin", "out.bin", "--to", "plain"], "invalid choice: 'plain'"),
        (["in.bin", "out.bin", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["in.bin", "out.bin", "--lora_alpha", "many"], "invalid float value"),
        (["in.bin", "out.bin", "more.bin"], "unrecognized arguments: more.bin"),
    ],
)
def test_usage(script, capsys, arguments, reason):
    with pytest.raises(SystemExit) as ended:
        script.main(arguments)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


# Several calls in one process, which takes seconds to start.
CALLS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import convert
from loralib.training import process
for call in json.loads(sys.argv[2]):
    try:
        process.run(lambda: convert.main(call), print)
    except SystemExit as end:
        print("status", end.code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_names_on_the_hub(hub_server, trained, tmp_path, monkeypatch, family):
    """PEFT's adapter names a revision of its base, at which the base is read."""
    monkeypatch.chdir(tmp_path)
    given = trained[family]
    base = make_base(hub_server.root / "org" / "base", family)
    commit = hub_server.find(None, "org/base", None).commit()
    info = replace(given.adapter.metadata, base="org/base", base_revision=commit)
    write_adapter(hub_server.root / "me" / "adapter", replace(given.adapter, metadata=info), "peft")
    calls = [
        ["me/adapter", "out", "--to", "merged", "--base", "org/base"],
        ["me/adapter", "lora.safetensors", "--base", "org/base"],
        ["me/none", "x.bin"],
        ["me/adapter", "x.bin", "--base", "org/none"],
    ]
    words = ["-c", CALLS, SCRIPT.parent, json.dumps(calls)]
    done = fork_server("hub").run(words, hub_server.environment(tmp_path / "home"), timeout=300)
    assert done.stderr == ""
    close(plain_logits(tmp_path / "out", family), given.logits)
    names = {"vocab.json", "merges.txt"}
    assert all((tmp_path / "out" / n).read_text() == (base / n).read_text() for n in names)
    revisions = {path.split("/")[4] for _, path in hub_server.downloads() if "org/base" in path}
    assert revisions == {commit}
    result = read_adapter(tmp_path / "lora.safetensors")
    assert_same_tensors(result.tensors, given.adapter.tensors)
    assert result.metadata == info

    *_, first, first_end, second, second_end = done.stdout.splitlines()
    for line, absent in ((first, "me/none"), (second, "org/none")):
        assert f"error: '{absent}' is neither a local folder nor a model on the hub" in line
    assert first_end == second_end == "status 1"
    assert not (tmp_path / "x.bin").exists()
