"""run_mlm.py on a small corpus: what it writes of its training and of its evaluation."""

import json
import math
import random
import shutil
from pathlib import Path

import pytest

WORDS = ["the", "dog", "sees", "a", "warm", "house", "and", "sings", "every", "cold", "river"]


@pytest.fixture(scope="module")
def script(load_example):
    return load_example("language-modeling/run_mlm.py")


@pytest.fixture(scope="module")
def run(script, tmp_path_factory) -> tuple[Path, dict]:
    """The folder of a run on 40 lines, evaluated on 12; and its evaluation's results."""
    folder, chance = tmp_path_factory.mktemp("mlm"), random.Random(0)
    for name, count in (("train", 40), ("valid", 12)):
        lines = [" ".join(chance.choices(WORDS, k=chance.randint(3, 9))) for _ in range(count)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    shape = "--vocab_size 300 --hidden_size 16 --num_hidden_layers 1 --num_attention_heads 2 "
    shape += "--intermediate_size 16 --max_seq_length 20 --mlm_probability 0.3"
    script.main(
        [
            *("--train_file", str(folder / "train.txt"), "--do_train", "--do_eval"),
            *("--validation_file", str(folder / "valid.txt"), *shape.split()),
            *("--output_dir", str(folder / "out"), "--num_train_epochs", "1", "--no_cuda"),
            *("--report_to", "none", "--disable_tqdm", "--save_strategy", "no"),
        ]
    )
    return folder / "out", json.loads((folder / "out" / "eval_results.json").read_text())


def test_perplexity_is_that_of_the_loss(run):
    _, results = run
    assert 1 < results["perplexity"] == math.exp(results["eval_loss"])
    assert results["eval_samples"] == 12


def test_perplexity_of_a_loss_too_large_is_infinite(script):
    assert script.perplexity(1e4) == math.inf
    assert script.perplexity(0.0) == 1


def test_files_of_results(run):
    out, results = run
    trained = json.loads((out / "train_results.json").read_text())
    assert trained["train_samples"] == 40
    assert trained["train_loss"] > 0
    assert json.loads((out / "all_results.json").read_text()) == {**trained, **results}


def test_a_model_that_classified_texts_no_longer_says_which(script, run, tmp_path):
    out, _ = run
    base = shutil.copytree(out, tmp_path / "base")
    settings = json.loads((base / "config.json").read_text())
    own = {"text_columns": ["premise", "claim"], "finetuning_task": "rte"}
    (base / "config.json").write_text(json.dumps({**settings, **own}))
    script.main(
        [
            *("--model_name_or_path", str(base), "--train_file", str(out.parent / "valid.txt")),
            *("--do_train", "--max_steps", "1", "--output_dir", str(tmp_path / "out"), "--no_cuda"),
            *("--report_to", "none", "--disable_tqdm", "--save_strategy", "no"),
        ]
    )
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {said[name] for name in own} == {None}


def test_an_estimate(script, tmp_path, capsys):
    """Of a new model on 40 lines: the vocabulary is learned, and nothing is written."""
    (tmp_path / "lines.txt").write_text("the dog sees a warm house\n" * 40)
    argv = ["--train_file", str(tmp_path / "lines.txt"), "--output_dir", str(tmp_path / "out")]
    shape = "--hidden_size 16 --num_hidden_layers 1 --num_attention_heads 2 --vocab_size 300 "
    shape += "--intermediate_size 16 --no_cuda --num_train_epochs 2"
    argv += ["--do_train", *shape.split(), "--estimate", "--estimate_rate", "1"]
    script.main(argv)
    said = capsys.readouterr().out
    assert "optimizer steps         10\n" in said  # of 8 lines each
    assert "(100.00 %)" in said
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="--estimate_length"):
        script.main([*argv, "--estimate_length", "5"])
