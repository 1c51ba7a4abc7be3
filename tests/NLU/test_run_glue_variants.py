"""run_glue.py with LoRA's variants: the flags, the files, and scripts that read those files."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from compare import assert_same_bits
from glue_runs import LORA, common, failure, results
from paths import load_script

from loralib.adapters.formats import read_adapter
from loralib.io.tensors import read_tensors

pytestmark = pytest.mark.slow

FLAGS = {
    "rslora": "--lora_variant rslora",
    "dora": "--lora_variant dora --lora_targets all-linear",
    "both": "--lora_variant rslora+dora --lora_init orthogonal --lora_plus_ratio 4",
    "pissa": "--lora_init pissa --lora_layers 1",
    "olora": "--lora_init olora --lora_variant dora --lora_targets intermediate attention.*.dense",
    "frozen": "--lora_freeze_A --lora_layers 0-1 --lora_dropout 0.1",
    "patterns": "--lora_targets query value output --lora_rank_pattern value=2 layer.0.*=3 "
    "--lora_alpha_pattern output=5 *.1.*=2.5",
    "uneven": "--lora_targets 0.attention.self.query value --lora_rank_pattern value=2",
}
EACH = pytest.mark.parametrize("name", FLAGS)


@pytest.fixture(scope="module")
def run(run_glue, tiny_base, tiny_glue, tmp_path_factory):
    """``run(name)``: the output folder of a run with the flags `FLAGS[name]`, made once."""
    made = {}

    def train(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("variants") / "out"
            data = ["--task_name", "rte", "--data_dir", tiny_glue]
            arguments = [*data, "--do_train", "--do_eval", "--do_predict", *LORA]
            arguments += [*FLAGS[name].split(), "--max_steps", 4, "--save_steps", 2]
            arguments += ["--output_dir", made[name]]
            run_glue.main([*common(tiny_base), *map(str, arguments)])
        return made[name]

    return train


def on_rte(tiny_glue, *flags) -> list:
    return ["--task_name", "rte", "--data_dir", tiny_glue, *flags]


@EACH
def test_a_file_or_a_folder_evaluates_as_trained_without_flags(
    glue, run, tiny_glue, tmp_path, name
):
    trained = run(name)
    for path in (trained, trained / "pytorch_model_lora.safetensors"):
        flags = ["--do_eval", "--do_predict", "--apply_lora", "--lora_path", path]
        glue(*on_rte(tiny_glue, *flags), "--output_dir", "again", "--overwrite_output_dir")
        assert results(tmp_path / "again") == results(trained)
        words = "test_results_rte.txt"
        assert (tmp_path / "again" / words).read_text() == (trained / words).read_text()


@EACH
def test_the_full_checkpoint_evaluates_as_trained(glue, run, tiny_glue, tmp_path, name):
    flags = ["--do_eval", "--output_dir", "again"]
    glue(*on_rte(tiny_glue, *flags), base=run(name))
    assert results(tmp_path / "again") == results(run(name))


@EACH
def test_the_flags_of_training_fit_the_file(glue, run, tiny_glue, tmp_path, name):
    flags = ["--do_eval", *LORA, "--lora_path", run(name), *FLAGS[name].split()]
    glue(*on_rte(tiny_glue, *flags), "--output_dir", "again")
    assert results(tmp_path / "again") == results(run(name))


def test_training_goes_on_as_the_file_says(glue, run, tiny_glue, tmp_path):
    flags = ["--do_train", "--max_steps", 1, "--save_strategy", "no", "--apply_lora"]
    glue(*on_rte(tiny_glue, *flags), "--lora_path", run("frozen"), "--output_dir", "next")
    assert read_adapter(tmp_path / "next").lora == read_adapter(run("frozen")).lora


@EACH
def test_a_killed_run_resumes_to_the_same_bits(glue, run, tiny_glue, tmp_path, name):
    shutil.copytree(run(name) / "checkpoint-2", tmp_path / "out" / "checkpoint-2")
    flags = ["--do_train", *LORA, *FLAGS[name].split(), "--max_steps", 4, "--save_steps", 2]
    glue(*on_rte(tiny_glue, *flags), "--output_dir", "out")
    files = [folder / "pytorch_model_lora.safetensors" for folder in (tmp_path / "out", run(name))]
    assert_same_bits(*(read_tensors(file)[0] for file in files))


@EACH
def test_the_release_s_format_is_written_if_it_can_hold_the_adapter(run, name):
    """The release's models have no scales per module, magnitudes or initializations."""
    files = {path.name for path in run(name).glob("pytorch_model_lora.*")}
    assert "pytorch_model_lora.safetensors" in files
    assert ("pytorch_model_lora.bin" in files) == (name == "frozen")


@EACH
def test_the_adapter_split_from_the_full_checkpoint_equals_the_written_one(
    run, split_lora, tmp_path, name
):
    split_lora.main([str(run(name)), str(tmp_path / "lora.safetensors")])
    split, written = read_adapter(tmp_path / "lora.safetensors"), read_adapter(run(name))
    assert_same_bits(split.tensors, written.tensors)
    assert split.metadata == written.metadata


@EACH
def test_predict_py_gives_the_run_s_predictions(run, tiny_base, tiny_glue, tmp_path, name):
    """A bank with a second adapter gives the labels of the run's own predictions."""
    predict = load_script("examples/text-classification/predict.py")
    rows = (tiny_glue / "RTE" / "test.tsv").read_text().splitlines()[1:]
    texts = [row.split("\t")[1:3] for row in rows]
    lines = [{"text": a, "text_pair": b, "adapter": name} for a, b in texts]
    lines += [{"text": "a dog", "text_pair": "a cat", "adapter": "frozen"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    adapters = {f"{each}={run(each)}" for each in (name, "frozen")}
    files = ["--input_file", tmp_path / "in.jsonl", "--output_file", tmp_path / "out.jsonl"]
    arguments = ["--model_name_or_path", tiny_base, *adapters, *files, "--max_seq_length", 60]
    predict.main(list(map(str, arguments)))
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    expected = (run(name) / "test_results_rte.txt").read_text().splitlines()[1:]
    assert [a["label"] for a in answers[:-1]] == [line.split("\t")[1] for line in expected]


@EACH
def test_merged_into_its_base_it_evaluates_the_same(
    glue, run, tiny_base, tiny_glue, tmp_path, name
):
    """The merged model has no LoRA and evaluates as the adapter does."""
    merged = [str(run(name)), str(tmp_path / "merged"), "--to", "merged", "--base", str(tiny_base)]
    importlib.import_module("convert").main(merged)
    glue(*on_rte(tiny_glue, "--do_eval", "--output_dir", "again"), base=tmp_path / "merged")
    assert results(tmp_path / "again") == pytest.approx(results(run(name)), abs=1e-5)


@EACH
def test_converted_to_peft_it_evaluates_the_same(glue, run, tiny_glue, tmp_path, name):
    """It evaluates as the run's own files do, without flags."""
    importlib.import_module("convert").main(
        [str(run(name)), str(tmp_path / "peft"), "--to", "peft"]
    )
    flags = ["--do_eval", "--apply_lora", "--lora_path", "peft", "--output_dir", "again"]
    glue(*on_rte(tiny_glue, *flags))
    assert results(tmp_path / "again") == pytest.approx(results(run(name)), abs=1e-5)


SHOWN = {
    "dora": {"variant": "dora"},
    "both": {"variant": "rslora+dora", "initialization": "orthogonal"},
    "olora": {"variant": "dora", "initialization": "olora"},
    "patterns": {"rank": "2 in", "alpha": "2.5 in"},
}


@pytest.mark.parametrize("name", SHOWN)
def test_convert_info_shows_the_variant(run, capsys, name):
    importlib.import_module("convert").main([str(run(name)), "--info"])
    output = capsys.readouterr().out
    for what, value in SHOWN[name].items():
        assert any(line.split()[:1] == [what] and value in line for line in output.splitlines())


@pytest.mark.parametrize(
    "flags",
    [
        "--lora_layers 1 0-1 --lora_init pissa",
        "--lora_rank_pattern layer.*.value=4 --lora_alpha_pattern query=8.0",
    ],
)
def test_flags_equal_to_the_defaults_are_not_recorded(glue, tiny_glue, tmp_path, flags):
    """All layers are recorded as no choice of layers, and an equal rank is not in the pattern."""
    train = ["--do_train", *LORA, *flags.split(), "--max_steps", 1]
    glue(*on_rte(tiny_glue, *train), "--output_dir", "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["lora_layers"] is None
    assert config["lora_rank_pattern"] == config["lora_alpha_pattern"] == {}


# ---- bad input ----

RTE = "--task_name rte --data_dir {glue}"
TRAIN = f"{RTE} --do_train --apply_lora --lora_r 4 --lora_alpha 8"
BAD = {
    "unknown variant": (f"{TRAIN} --lora_variant dorra", "invalid choice: 'dorra' (choose from"),
    "variant without LoRA": (f"{RTE} --do_train --lora_variant dora", "needs --apply_lora"),
    "unknown initialization": (f"{TRAIN} --lora_init pisa", "invalid choice: 'pisa' (choose from"),
    "initialization without LoRA": (f"{RTE} --do_train --lora_init olora", "needs --apply_lora"),
    "freezing neither true nor false": (
        f"{TRAIN} --lora_freeze_A perhaps",
        "neither true nor false",
    ),
    "freezing without LoRA": (f"{RTE} --do_train --lora_freeze_A", "needs --apply_lora"),
    "ratio 0": (
        f"{TRAIN} --lora_plus_ratio 0",
        "--lora_plus_ratio must be above 0, not 0.0",
    ),
    "ratio below 0": (f"{TRAIN} --lora_plus_ratio -1", "must be above 0, not -1.0"),
    "ratio without LoRA": (
        f"{RTE} --do_train --lora_plus_ratio 2",
        "--lora_plus_ratio needs a model with LoRA: add --apply_lora",
    ),
    "unmatched target": (
        f"{TRAIN} --lora_targets querry",
        "lora_targets: 'querry' matches no projection; similar names: query",
    ),
    "target of the embeddings": (f"{TRAIN} --lora_targets word_embeddings", "matches no"),
    "layer beyond the last": (f"{TRAIN} --lora_layers 0-2", "has layers 0 to 1, not 2"),
    "layer by name": (
        f"{TRAIN} --lora_layers first",
        "--lora_layers: 'first' is not a layer's number, nor a range such as 6-11",
    ),
    "range backwards": (f"{TRAIN} --lora_layers 1-0", "--lora_layers: '1-0' is not a layer's"),
    "unmatched rank pattern": (
        f"{TRAIN} --lora_rank_pattern key=2",
        "lora_rank_pattern: 'key' matches no projection that LoRA adapts; similar names: query",
    ),
    "pattern without a number": (
        f"{TRAIN} --lora_rank_pattern query",
        "--lora_rank_pattern: 'query' is not a target, '=' and an integer, such as value=4",
    ),
    "rank that is no integer": (f"{TRAIN} --lora_rank_pattern query=2.5", "'query=2.5' is not"),
    "rank 0": (f"{TRAIN} --lora_rank_pattern query=0", "has to be a positive integer, not 0"),
    "target named twice": (f"{TRAIN} --lora_rank_pattern query=1 query=2", "names 'query' twice"),
    "unmatched alpha pattern": (
        f"{TRAIN} --lora_alpha_pattern keys=2",
        "'keys' matches no projection",
    ),
    "alpha in words": (f"{TRAIN} --lora_alpha_pattern query=two", "'=' and a number"),
    "alpha 0": (f"{TRAIN} --lora_alpha_pattern query=0", "has to be a positive number, not 0"),
    "rank beyond a dimension": (
        f"{TRAIN} --lora_r 33",
        "lora_r: rank 33 is larger than the smaller dimension of "
        "roberta.encoder.layer.0.attention.self.query, 32",
    ),
    "pattern beyond a dimension": (f"{TRAIN} --lora_rank_pattern value=40", "rank 40 is larger"),
    "file of another variant": (
        f"{RTE} --do_eval --apply_lora --lora_path {{dora}} --lora_variant lora",
        "was trained with variant dora",
    ),
    "file of another initialization": (
        f"{RTE} --do_eval --apply_lora --lora_path {{pissa}} --lora_init olora",
        "was trained with initialization pissa",
    ),
    "file of another pattern": (
        f"{RTE} --do_eval --apply_lora --lora_path {{patterns}} --lora_rank_pattern value=1",
        "was trained with rank",
    ),
    "file of other layers": (
        f"{RTE} --do_eval --apply_lora --lora_path {{pissa}} --lora_layers 0 1",
        "lacks",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_an_error_of_one_line(
    run_glue, tiny_base, tiny_glue, tmp_path, run, monkeypatch, capsys, arguments, message
):
    files = {name: run(name) for name in FLAGS if f"{{{name}}}" in arguments}
    given = [word.format(glue=tiny_glue, **files) for word in arguments.split()]
    capsys.readouterr()
    line = failure(
        run_glue,
        [*common(tiny_base), *given, "--output_dir", tmp_path / "out"],
        monkeypatch,
        capsys,
    )
    assert message in line


def test_splitting_dora_into_a_bin_file_is_refused(run, split_lora, tmp_path):
    with pytest.raises(ValueError, match="variant dora"):
        split_lora.main([str(run("dora")), str(tmp_path / "lora.bin")])
    assert not (tmp_path / "lora.bin").exists()


def test_targets_can_differ_between_layers(run):
    adapter = read_adapter(run("uneven"))
    shapes = {name: tuple(t.shape) for name, t in adapter.tensors.items() if "lora_A" in name}
    start = "roberta.encoder.layer"
    assert shapes == {
        f"{start}.0.attention.self.query.lora_A": (4, 32),
        f"{start}.0.attention.self.value.lora_A": (2, 32),
        f"{start}.1.attention.self.value.lora_A": (2, 32),
    }
    assert all(torch.isfinite(tensor).all() for tensor in adapter.tensors.values())
