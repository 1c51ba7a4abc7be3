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


@pytest.fixture(scope="module")
def adapted(run) -> Path:
    """The model of that run with LoRA, as a task's script leaves one behind."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    out, _ = run
    folder = out.with_name("adapted")
    settings = {"apply_lora": True, "lora_r": 2, "lora_alpha": 4}
    AutoModelForMaskedLM.from_pretrained(out, **settings).save_pretrained(folder)
    AutoTokenizer.from_pretrained(out).save_pretrained(folder)
    return folder


def further(script, base: Path, out: Path, *flags: str) -> Path:
    """Two steps from a model on."""
    texts = base.parent
    script.main(
        [
            *("--model_name_or_path", str(base), "--train_file", str(texts / "train.txt")),
            *("--validation_file", str(texts / "valid.txt"), "--output_dir", str(out)),
            *("--report_to", "none", "--disable_tqdm", "--save_strategy", "no", "--no_cuda"),
            *("--max_steps", "2", "--learning_rate", "1e-2", *flags),
        ]
    )
    return out


def test_an_adapted_model_s_base_stays_as_it_is(script, adapted, tmp_path, caplog):
    """Trained are LoRA and the head, and the adapter that is written holds all of that."""
    import torch

    from loralib.adapters.formats import read_adapter
    from transformers import AutoModelForMaskedLM

    whole = further(script, adapted, tmp_path / "whole", "--do_train")
    assert caplog.text.count("was trained with --apply_lora, which stays on") == 1
    alone = further(script, adapted, tmp_path / "alone", "--do_train", "--save_lora_only")
    models = [AutoModelForMaskedLM.from_pretrained(each).eval() for each in (adapted, whole)]
    before, after = (model.state_dict() for model in models)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("lora_" in name or name.startswith("lm_head.") for name in changed)
    adapter = read_adapter(alone)
    assert adapter.metadata.head == "masked_lm"
    models[0].load_adapters([adapter])
    ids = torch.tensor([[0, 40, 41, 2]])
    with torch.no_grad():
        assert torch.equal(models[0](ids).logits, models[1](ids).logits)


def test_perplexity_is_of_the_words_as_they_are(script, adapted, tmp_path):
    """However labels are smoothed in training, which is of no update here."""
    flags = ("--do_train", "--do_eval", "--learning_rate", "0", "--label_smoothing_factor")
    plain, smooth = (
        further(script, adapted, tmp_path / factor, *flags, factor) for factor in ("0", "0.5")
    )
    results = [json.loads((out / "eval_results.json").read_text()) for out in (plain, smooth)]
    assert results[0]["perplexity"] == pytest.approx(results[1]["perplexity"], rel=1e-6)


def test_nothing_is_evaluated_that_is_not_trained(script, run, tmp_path):
    from transformers import AutoModel, AutoTokenizer

    out, results = run
    AutoModel.from_pretrained(out).save_pretrained(tmp_path / "headless")
    AutoTokenizer.from_pretrained(out).save_pretrained(tmp_path / "headless")
    for name in ("train.txt", "valid.txt"):
        shutil.copy(out.with_name(name), tmp_path)
    message = "has no trained lm_head.*nothing to evaluate; give a model that is trained to fill"
    with pytest.raises(ValueError, match=message):
        further(script, tmp_path / "headless", tmp_path / "out", "--do_eval")
    evaluated = further(script, out, tmp_path / "out", "--do_eval", "--mlm_probability", "0.3")
    again = json.loads((evaluated / "eval_results.json").read_text())
    assert again["eval_loss"] == pytest.approx(results["eval_loss"], abs=1)  # other masks


def test_a_model_is_not_trained_in_its_own_folder(script, run, tmp_path):
    out, _ = run
    base = Path(shutil.copytree(out, tmp_path / "base"))
    for name in ("train.txt", "valid.txt"):
        shutil.copy(out.with_name(name), tmp_path)
    before = (base / "pytorch_model.bin").read_bytes()
    with pytest.raises(ValueError, match=r"--model_name_or_path .*: training would overwrite it"):
        further(script, base, base, "--do_train", "--overwrite_output_dir")
    assert (base / "pytorch_model.bin").read_bytes() == before


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


def test_a_byte_order_mark_is_not_text(script, tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("the dog\n\na house\n", "utf-8-sig")
    tokenizer = script.learn_tokenizer(str(path), 300, 20)
    rows = script.read_lines(str(path), tokenizer, 20, str(tmp_path / "cache"))
    assert rows["input_ids"][:] == tokenizer(["the dog", "a house"])["input_ids"]


def test_tables_are_kept_where_cache_dir_says(script, run, tmp_path):
    out, _ = run
    texts = out.parent / "train.txt"
    script.main(
        [
            *("--model_name_or_path", str(out), "--train_file", str(texts), "--do_train"),
            *("--max_steps", "1", "--output_dir", str(tmp_path / "out"), "--no_cuda"),
            *("--report_to", "none", "--disable_tqdm", "--save_strategy", "no"),
            *("--cache_dir", str(tmp_path / "cache")),
        ]
    )
    assert list((tmp_path / "cache").rglob("*.arrow"))
