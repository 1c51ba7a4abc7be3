"""run_glue.py on data of every kind: GLUE, the user's own files, and the hub."""

import errno
import json
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import datasets
import pytest
from compare import assert_same_bits
from glue_runs import LORA, SCRIPT, common, lora_of, on_rte, own_rows, results, write
from launches import fork_server
from paths import SHARED
from safetensors import safe_open

from loralib.adapters.formats import read_adapter, write_adapter
from loralib.errors import CheckpointError
from transformers import Trainer
from transformers.utils import cli

pytestmark = pytest.mark.slow

REAL_GLUE = SHARED / "data" / "glue"


# ---- data ----


@pytest.mark.parametrize(
    ("task", "metric"), [("cola", "matthews_correlation"), ("SST-2", "accuracy")]
)
def test_tasks_of_one_sentence(glue, tiny_glue, tmp_path, task, metric):
    arguments = ["--task_name", task, "--data_dir", tiny_glue, "--do_train", "--do_eval"]
    arguments += ["--do_predict", *LORA, "--max_steps", 2, "--max_train_samples", 16]
    glue(*arguments, "--max_val_samples", 5, "--max_test_samples", 3, "--output_dir", "out")
    assert results(tmp_path / "out").keys() == {"eval_loss", f"eval_{metric}", "eval_samples"}
    assert results(tmp_path / "out")["eval_samples"] == 5
    assert results(tmp_path / "out", "train")["train_samples"] == 16
    name = task.lower().replace("-", "")
    rows = (tmp_path / "out" / f"test_results_{name}.txt").read_text().splitlines()[1:]
    assert len(rows) == 3
    assert all(row.split("\t")[1] in "01" for row in rows)


def test_mnli_is_evaluated_and_predicted_twice(glue, tiny_glue, tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(Trainer, "log", lambda _, logs: logged.append(logs))
    arguments = ["--task_name", "mnli", "--data_dir", tiny_glue, "--do_train", "--do_eval"]
    glue(*arguments, "--do_predict", *LORA, "--max_steps", 3, "--output_dir", "out")
    evaluated = results(tmp_path / "out")
    assert (evaluated["eval_samples"], evaluated["eval_samples_mm"]) == (11, 10)
    assert {"eval_accuracy", "eval_accuracy_mm", "eval_loss", "eval_loss_mm"} <= evaluated.keys()
    for name in ("eval_accuracy", "eval_mm_accuracy"):
        assert sum(name in logs for logs in logged) == 1
    for name, count in (("mnli", 5), ("mnli-mm", 4)):
        rows = (tmp_path / "out" / f"test_results_{name}.txt").read_text().splitlines()[1:]
        assert len(rows) == count
        words = {row.split("\t")[1] for row in rows}
        assert words <= {"entailment", "neutral", "contradiction"}


@pytest.mark.slow
def test_pad_to_max_length_changes_no_loss(glue, tiny_glue, tmp_path, base_without_dropout):
    for name, flags in (("short", []), ("long", ["--pad_to_max_length"])):
        arguments = [*on_rte(tiny_glue, name), *flags, "--learning_rate", 1e-3]
        glue(*arguments, "--evaluation_strategy", "epoch", base=base_without_dropout)
    short, long = (
        json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        for name in ("short", "long")
    )
    for key in ("loss", "eval_loss"):
        numbers = [[r[key] for r in history if key in r] for history in (short, long)]
        assert len(numbers[0]) > 1
        assert numbers[0] == pytest.approx(numbers[1], abs=2e-4 if key == "loss" else 1e-5)


def test_settings_can_come_from_a_json_file(
    run_glue, glue, trained, tiny_base, tiny_glue, tmp_path
):
    settings = {
        "model_name_or_path": str(tiny_base),
        "max_seq_length": 60,
        "report_to": ["none"],
        "disable_tqdm": True,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "task_name": "rte",
        "data_dir": str(tiny_glue),
        "do_train": True,
        "do_eval": True,
        "apply_lora": True,
        "lora_r": 4,
        "lora_alpha": 8,
        "num_train_epochs": 2,
        "save_steps": 4,
        "output_dir": str(tmp_path / "out"),
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    run_glue.main([str(tmp_path / "settings.json")])
    assert_same_bits(lora_of(tmp_path / "out"), lora_of(trained))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rte", "cola", "sst2"])
@pytest.mark.skipif(not REAL_GLUE.is_dir(), reason="the real GLUE files are not on this machine")
def test_real_glue_files(glue, tmp_path, name):
    arguments = ["--task_name", name, "--data_dir", REAL_GLUE, "--do_train", "--do_eval", *LORA]
    arguments += ["--max_train_samples", 64, "--max_val_samples", 50, "--num_train_epochs", 1]
    glue(*arguments, "--output_dir", "out")
    assert results(tmp_path / "out")["eval_samples"] == 50
    assert results(tmp_path / "out")["eval_loss"] < 3
    assert results(tmp_path / "out", "train")["train_loss"] < 3


# ---- the user's own files ----


def own(suffix: str, tmp_path: Path, labels: list, pair: bool = False) -> list:
    """Writes three files, the last without labels, and returns the flags that name them."""
    train = write(tmp_path / f"train{suffix}", own_rows(labels, pair))
    # Labels are in another order, and one is missing.
    dev = write(tmp_path / f"dev{suffix}", own_rows(labels[::-1], pair, count=len(labels) - 1))
    rows = [{n: v for n, v in row.items() if n != "label"} for row in own_rows(labels, pair, 5)]
    test = write(tmp_path / f"test{suffix}", rows)
    return ["--train_file", train, "--validation_file", dev, "--test_file", test]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("labels", "names", "pair", "suffix"),
    [
        (["yes", "maybe", "no"], ["maybe", "no", "yes"], False, ".csv"),
        ([10, 2, 3], ["2", "3", "10"], True, ".csv"),
        ([10, 2, 3], ["2", "3", "10"], True, ".json"),
        ([0.5, 1.25, 3.75], ["LABEL_0"], True, ".csv"),
        ([0.5, 1.25, 3.75], ["LABEL_0"], True, ".jsonl"),
    ],
)
def test_the_user_s_own_files(glue, tmp_path, labels, names, pair, suffix):
    files = own(suffix, tmp_path, labels, pair)
    flags = ["--do_eval", "--do_predict"]
    glue(*files, *flags, "--do_train", *LORA, "--num_train_epochs", 2, "--output_dir", "out")
    metric = "eval_mse" if len(names) == 1 else "eval_accuracy"
    own_metrics = {
        "eval_mse": {"eval_pearson", "eval_spearmanr"},
        "eval_accuracy": {"eval_f1_macro"},
    }
    expected = {"eval_loss", metric, "eval_samples"} | own_metrics[metric]
    assert results(tmp_path / "out").keys() == expected
    assert results(tmp_path / "out")["eval_samples"] == 2
    if metric == "eval_mse":
        evaluated = results(tmp_path / "out")
        assert evaluated["eval_mse"] == pytest.approx(evaluated["eval_loss"], rel=1e-5)
    predicted = (tmp_path / "out" / "test_results_None.txt").read_text()
    words = [line.split("\t")[1] for line in predicted.splitlines()[1:]]
    assert len(words) == 5
    if metric == "eval_accuracy":
        assert set(words) <= set(names)
    else:
        assert all(word == f"{float(word):.3f}" for word in words)
    with safe_open(tmp_path / "out" / "pytorch_model_lora.safetensors", "pt") as file:
        assert json.loads(file.metadata()["labels"]) == names

    # The order of labels is the adapter's, or the training set's for a .bin file without names.
    evaluation = [*flags, *files[2:], "--apply_lora", "--lora_path", "out"]
    glue(*evaluation, "--output_dir", "safe")
    glue(*flags, *files, *LORA, "--lora_path", "out/pytorch_model_lora.bin", "--output_dir", "bin")
    for name in ("safe", "bin"):
        assert results(tmp_path / name) == results(tmp_path / "out")
        assert (tmp_path / name / "test_results_None.txt").read_text() == predicted
    # In prediction alone, only the adapter distinguishes classes from scores.
    glue("--do_predict", *files[4:], *evaluation[-3:], "--output_dir", "alone")
    assert (tmp_path / "alone" / "test_results_None.txt").read_text() == predicted


def test_sentence_columns_are_the_texts_if_there_are_others(glue, tmp_path):
    rows = [
        {"id": f"row {n}", "sentence1": "a dog", "sentence2": "a cat", "label": n % 2}
        for n in range(8)
    ]
    file = write(tmp_path / "train.csv", rows)
    glue("--train_file", file, "--do_train", *LORA, "--max_steps", 1, "--output_dir", "out")


def test_columns_can_be_chosen_by_flags(glue, run_glue, tmp_path, caplog):
    """Columns may have any name, and a text that looks like a number is read as text."""
    texts = ["a dog", "007", "the cat", "12"] * 4
    plain = [{"text": text, "label": n % 2} for n, text in enumerate(texts)]
    named = [{"label": r["text"], "id": n, "y": r["label"]} for n, r in enumerate(plain)]
    one, other = write(tmp_path / "one.csv", plain), write(tmp_path / "other.csv", named)
    run = ["--do_train", *LORA, "--max_steps", 3, "--output_dir"]
    with caplog.at_level("INFO", logger=run_glue.__name__):
        glue("--train_file", one, *run, "one")
        assert f"{one}: texts from text; labels from label: classes '0', '1'" in caplog.text
        asked = ["--text_columns", "label", "--label_column", "y"]
        glue("--train_file", other, *asked, *run, "other")
        assert f"{other}: texts from label; labels from y: classes '0', '1'" in caplog.text
    assert_same_bits(lora_of(tmp_path / "one"), lora_of(tmp_path / "other"))


def test_a_model_reads_the_columns_that_it_was_trained_on(glue, tmp_path, caplog):
    """In that order, whatever other columns a file has; other columns of texts are refused."""
    rows = own_rows(["yes", "no"], pair=True)
    file = write(tmp_path / "train.csv", rows)
    glue("--train_file", file, "--do_train", *LORA, "--max_steps", 3, "--output_dir", "out")
    swapped = [{n: row[n] for n in ("answer", "review", "label")} for row in rows]
    noted = [{"note": "a note", **row} for row in rows]
    evaluate = ["--do_eval", "--apply_lora", "--lora_path", "out", "--output_dir"]
    for name, changed in {"same": rows, "swapped": swapped, "noted": noted}.items():
        glue("--validation_file", write(tmp_path / f"{name}.csv", changed), *evaluate, name)
        assert results(tmp_path / name) == results(tmp_path / "same")

    others = [{"premise": r["review"], "claim": r["answer"], "label": r["label"]} for r in rows]
    named = ["--validation_file", write(tmp_path / "named.csv", others)]
    glue(*named, *evaluate, "named")
    assert results(tmp_path / "named") == results(tmp_path / "same")
    assert "reads premise as review, claim as answer" in caplog.text
    one = write(tmp_path / "one.csv", own_rows(["yes", "no"]))
    swap = ["--validation_file", file, "--text_columns", "answer", "review"]
    half = [{"answer": r["review"], "claim": r["answer"], "label": r["label"]} for r in rows]
    for flags, found in (
        (["--validation_file", one], "review"),
        (["--validation_file", write(tmp_path / "half.csv", half)], "answer and claim"),
        ([*named, "--text_columns", "claim"], "claim"),
        (swap, "answer and review"),
    ):
        message = f"was trained on rows of review and answer, not of {found}; in your own files"
        with pytest.raises(ValueError, match=message):
            glue(*flags, *evaluate, "refused")
    # Training may continue from the model on any texts, which its adapter then records.
    train = ["--train_file", one, "--do_train", "--apply_lora", "--lora_path", "out"]
    glue(*train, "--max_steps", 1, "--output_dir", "next")
    assert read_adapter(tmp_path / "next").metadata.text_columns == ("review",)
    # A full model records its text columns as well.
    with pytest.raises(ValueError, match="was trained on rows of review, not of premise and claim"):
        glue(*named, "--do_eval", "--output_dir", "refused", base="next")


def test_a_text_column_named_label(glue, tmp_path):
    """Later runs have to name the label column; otherwise, another column would be the text."""
    rows = own_rows(["yes", "no"], pair=True)
    rows = [{"label": r["review"], "note": r["answer"], "verdict": r["label"]} for r in rows]
    file = write(tmp_path / "rows.csv", rows)
    verdict = ["--label_column", "verdict"]
    texts = ["--text_columns", "label"]
    glue("--train_file", file, *verdict, *texts, "--do_train", *LORA, "--output_dir", "out")
    later = ["--test_file", file, "--do_predict", "--apply_lora", "--lora_path", "out"]
    message = "was trained on the texts of 'label': give another name for the labels' column"
    with pytest.raises(ValueError, match=message):
        glue(*later, "--output_dir", "refused")
    glue(*later, *verdict, "--output_dir", "found")
    glue(*later, *verdict, *texts, "--output_dir", "asked")
    found, asked = (tmp_path / name / "test_results_None.txt" for name in ("found", "asked"))
    assert found.read_text() == asked.read_text()


def test_an_adapter_without_label_names(glue, tmp_path):
    """As for the release's, the training set names the labels; predicting needs its file."""
    rows = own_rows(["no", "yes"])
    file = write(tmp_path / "train.csv", rows)
    glue("--train_file", file, "--do_train", *LORA, "--max_steps", 3, "--output_dir", "out")
    later = ["--do_predict", "--test_file", file, *LORA]
    shutil.copy(tmp_path / "out" / "pytorch_model_lora.bin", tmp_path / "alone.bin")
    later += ["--lora_path", "alone.bin", "--output_dir"]
    with pytest.raises(ValueError, match="does not name its labels; give the --train_file"):
        glue(*later, "refused")
    glue(*later, "named", "--train_file", file)
    predicted = (tmp_path / "named" / "test_results_None.txt").read_text().split()
    assert {*predicted[3::2]} <= {"no", "yes"}


def test_labels_that_do_not_fit_the_model_are_errors(glue, tmp_path):
    """A regressor reads whole numbers as scores; other mixes of classes and scores are errors."""
    files = {
        "scores": own_rows([0.5, 1.25, 3.0]),
        "whole": own_rows([0, 1, 3]),
        "words": own_rows(["no", "yes"]),
    }
    for name, rows in files.items():
        write(tmp_path / f"{name}.csv", rows)
    for name in ("scores", "words"):
        train = ["--train_file", tmp_path / f"{name}.csv", "--do_train", *LORA, "--max_steps", 2]
        glue(*train, "--output_dir", f"of {name}")
    evaluate = ["--do_eval", "--output_dir", "eval", "--apply_lora", "--lora_path"]
    glue(*evaluate, "of scores", "--validation_file", tmp_path / "whole.csv")
    assert results(tmp_path / "eval")["eval_mse"] > 0
    with pytest.raises(ValueError, match=r"words\.csv: the labels are words, and the model gives"):
        glue(*evaluate, "of scores", "--validation_file", tmp_path / "words.csv")
    with pytest.raises(ValueError, match="has a head of 2 classes, but the data's labels are"):
        glue(*evaluate, "of words", "--validation_file", tmp_path / "scores.csv")


@pytest.mark.parametrize(
    ("scores", "level", "labels"),
    [
        ([0.0, 1.0], "WARNING", ("0.0, 1.0", "0, 1")),
        ([-1.0, 1.0], "WARNING", ("-1.0, 1.0", "-1, 1")),
        ([3.0, 1.0, 2.0], "INFO", ("1.0, 2.0, 3.0", "1, 2, 3")),
        ([3.0, 1.0, 2.0, 4.0], "INFO", ("1.0, 2.0, 3.0, …", "1, 2, 3")),
        ([2.0, 1.0, 0.0], "WARNING", ("0.0, 1.0, 2.0", "0, 1, 2")),
        ([0.0, 1.0, 2.5], None, None),
        ([0.0, 0.5], None, None),
        ([0, 1], None, None),
    ],
)
def test_a_few_scores_that_are_whole_numbers_are_reported(
    glue, tmp_path, caplog, scores, level, labels
):
    """They may be classes from a table with missing values; more of them are rather a scale."""
    rows = own_rows(scores)
    train = ["--train_file", write(tmp_path / "train.csv", rows), "--do_train", *LORA]
    with caplog.at_level("INFO"):
        glue(*train, "--max_steps", 1, "--output_dir", "out")
    warnings = [record for record in caplog.records if "taken for scores" in record.message]
    assert [record.levelname for record in warnings] == [level] * (labels is not None)
    for record in warnings:
        assert f"train.csv: the labels {labels[0]} are taken for scores; " in record.message
        assert record.message.endswith(f"classes, write them without a point, as in {labels[1]}")


def test_scores_0_and_1_train_a_regressor(glue, tmp_path, caplog):
    """Resuming it, evaluating it and training from it give no further warning."""
    rows = own_rows([0.0, 1.0])
    files = ["--train_file", write(tmp_path / "train.csv", rows)]
    files += ["--validation_file", write(tmp_path / "dev.csv", own_rows([1.0], count=4))]
    run = [*files, "--do_train", "--do_eval", *LORA, "--save_steps", 1, "--output_dir"]
    glue(*run, "out", "--max_steps", 2)
    assert caplog.text.count("are taken for scores") == 1
    evaluated, weights = results(tmp_path / "out"), lora_of(tmp_path / "out")
    assert evaluated["eval_mse"] > 0
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    glue(*run, "out", "--max_steps", 2)
    assert results(tmp_path / "out") == evaluated
    assert_same_bits(lora_of(tmp_path / "out"), weights)
    caplog.clear()
    adapter = ["--apply_lora", "--lora_path", "out"]
    glue(*files, "--do_eval", *adapter, "--output_dir", "evaluated")
    assert results(tmp_path / "evaluated") == evaluated
    glue(*files, "--do_train", *adapter, "--max_steps", 1, "--output_dir", "next")
    assert "taken for scores" not in caplog.text


def test_a_class_for_each_row_gives_a_warning(glue, tmp_path, caplog):
    rows = [{**row, "label": f"about {n}"} for n, row in enumerate(own_rows(["a"], count=8))]
    train = ["--train_file", write(tmp_path / "train.csv", rows), "--do_train", *LORA]
    glue(*train, "--max_steps", 1, "--output_dir", "out")
    assert "8 classes in 8 rows; is label its label?" in caplog.text
    assert "are they one?" not in caplog.text


def test_two_spellings_of_a_label_give_a_warning(glue, tmp_path, caplog):
    spellings = ("good", "bad", "Good ", "good")
    rows = [{**row, "label": spellings[n % 4]} for n, row in enumerate(own_rows(["a"], count=8))]
    train = ["--train_file", write(tmp_path / "train.csv", rows), "--do_train", *LORA]
    glue(*train, "--max_steps", 1, "--output_dir", "out")
    assert "'Good ', 'good' are separate classes; do they mean the same?" in caplog.text


def test_a_run_is_not_resumed_on_other_rows(glue, tmp_path, caplog):
    """There are as many other rows; a run that was complete logs that nothing is left."""
    rows = own_rows(["yes", "no"])
    file = write(tmp_path / "train.csv", rows)
    run = ["--do_train", *LORA, "--max_steps", 2, "--save_steps", 2, "--output_dir", "out"]
    glue("--train_file", file, *run)
    other = [{**row, "label": {"yes": "no", "no": "yes"}[row["label"]]} for row in rows]
    flags = ["--train_file", write(tmp_path / "other.csv", other)]
    with pytest.raises(
        CheckpointError, match=r"checkpoint-2.*belongs to a run on other data with the same"
    ):
        glue(*flags, *run)
    with caplog.at_level("INFO"):
        glue("--train_file", file, *run)
    assert "checkpoint-2, step 2: nothing is left to train" in caplog.text


def test_a_run_is_not_resumed_on_other_texts(glue, tmp_path):
    """An older checkpoint, which does not record its text columns, is resumed."""
    file = write(tmp_path / "train.csv", own_rows(["yes", "no"], pair=True))
    run = ["--train_file", file, "--do_train", *LORA, "--max_steps", 4, "--save_steps", 2]
    run += ["--output_dir", "out"]
    glue(*run)
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    before = lora_of(tmp_path / "out")
    for columns in (["answer", "review"], ["review"]):
        message = r"a run with text columns \['review', 'answer'\], but this run has \['"
        with pytest.raises(CheckpointError, match=message + columns[0]):
            glue(*run, "--text_columns", *columns)
    settings = tmp_path / "out" / "checkpoint-2" / "config.json"
    recorded = json.loads(settings.read_text())
    settings.write_text(json.dumps({k: v for k, v in recorded.items() if k != "text_columns"}))
    glue(*run)
    assert_same_bits(lora_of(tmp_path / "out"), before)


def test_identifiers_and_numbers_are_not_read_as_texts(glue, run_glue, tmp_path, caplog):
    rows = [
        {
            "guid": f"row-{n}",
            "score": n,
            "idx": f"{n}",
            "digits": f"{n}",
            "said": "a",
            "label": n % 2,
        }
        for n in range(8)
    ]
    for name in ("train.csv", "train.json"):
        file = write(tmp_path / name, rows)
        with caplog.at_level("INFO", logger=run_glue.__name__):
            glue(
                "--train_file",
                file,
                "--do_train",
                *LORA,
                "--max_steps",
                1,
                "--output_dir",
                name[6:],
            )
        assert f"{file}: texts from said; labels from label" in caplog.text


def test_blank_lines_at_the_end_of_json_lines_are_ignored(glue, tmp_path):
    file = write(tmp_path / "train.json", own_rows(["yes", "no"]))
    run = ["--train_file", file, "--do_train", *LORA, "--max_steps", 3, "--output_dir"]
    glue(*run, "without")
    with file.open("a") as lines:
        lines.write("\n\n \n")
    glue(*run, "with")
    assert_same_bits(lora_of(tmp_path / "without"), lora_of(tmp_path / "with"))


@pytest.mark.parametrize("more", [(), ("--pad_to_max_length",)])
def test_texts_that_are_cut_are_counted(glue, tmp_path, caplog, tiny_base, more):
    from transformers import AutoTokenizer

    words = [4, 5, 6, 100]
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    rows = [{"text": "the" + " dog" * n, "label": n % 2} for n in words]
    length = len(tokenizer(rows[1]["text"])["input_ids"])
    train = write(tmp_path / "train.csv", rows)
    dev = write(tmp_path / "dev.csv", rows[1:3])
    files = ["--train_file", train, "--validation_file", dev, "--max_seq_length", length]
    glue(*files, "--do_train", "--do_eval", *LORA, "--max_steps", 1, *more, "--output_dir", "out")
    messages = [record.message for record in caplog.records if "were cut" in record.message]
    assert messages == [f"texts were cut to {length} tokens: 2 of 4 in train, 1 of 2 in validation"]


def test_the_default_length_is_limited_by_the_base(
    run_glue, tiny_base, tiny_glue, tmp_path, caplog
):
    arguments = [*common(tiny_base), *on_rte(tiny_glue, tmp_path / "out"), "--max_steps", 1]
    at = arguments.index("--max_seq_length")
    del arguments[at : at + 2]
    with caplog.at_level("INFO", logger=run_glue.__name__):
        run_glue.main(list(map(str, arguments)))
    assert "the model has 64 positions: longer texts are cut to that" in caplog.text


@pytest.fixture
def cached_tables():
    """Returns a function that lists the cached tables of tokens with their times."""
    cache = Path(os.environ["HF_HOME"])
    return lambda: {(path, path.stat().st_mtime_ns) for path in cache.rglob("cache-*.arrow")}


@pytest.mark.slow
def test_tokens_are_cached_unless_settings_or_flags_differ(glue, tmp_path, cached_tables):
    files = own(".csv", tmp_path, ["yes", "no"])[:4]
    arguments = [*files, "--do_train", "--do_eval", *LORA, "--max_steps", 1, "--output_dir"]
    glue(*arguments, "first")
    first = cached_tables()
    glue(*arguments, "second", "--learning_rate", 1e-3)
    assert cached_tables() == first
    glue(*arguments, "third", "--max_seq_length", 10)
    assert cached_tables() > first
    before = cached_tables()
    glue(*arguments, "fourth", "--overwrite_cache")
    assert cached_tables() != before


@pytest.fixture
def set_default_cache(monkeypatch):
    """Returns a function that sets the default cache folder."""
    return partial(monkeypatch.setattr, datasets.config, "HF_DATASETS_CACHE")


@pytest.mark.parametrize("kind", ["csv", "glue"])
def test_cache_dir_is_used(glue, tiny_glue, tmp_path, set_default_cache, caplog, kind):
    (tmp_path / "file").touch()
    set_default_cache(tmp_path / "file" / "no folder")
    files = own(".csv", tmp_path, ["yes", "no"])[:2]
    data = files if kind == "csv" else ["--task_name", "rte", "--data_dir", tiny_glue]
    arguments = [*data, "--do_train", *LORA, "--max_steps", 1, "--cache_dir", "mine"]
    glue(*arguments, "--output_dir", "out")
    assert list((tmp_path / "mine").rglob("cache-*.arrow"))
    assert "temporary folder" not in caplog.text


@pytest.mark.parametrize(
    ("place", "variable"),
    [
        ("{}/file/huggingface", "HF_HOME"),
        ("{}/file/huggingface", "HF_DATASETS_CACHE"),
        ("~nosuchuser/.cache/huggingface", "HF_HOME"),
    ],
)
def test_a_default_cache_that_cannot_be_written_is_replaced(
    glue, tmp_path, set_default_cache, monkeypatch, caplog, place, variable
):
    """For example, in a container that runs as another user than its image was made for."""
    place = place.format(tmp_path)
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.setenv(variable, place)
    (tmp_path / "file").touch()
    set_default_cache(Path(place))
    files = own(".csv", tmp_path, ["yes", "no"])[:2]
    before = {path.name for path in tmp_path.iterdir()}
    glue(*files, "--do_train", *LORA, "--max_steps", 1, "--output_dir", "out")
    assert f"{place}: cannot be written to, so data is kept in a temporary folder" in caplog.text
    assert f"set {variable} to a folder" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == before | {"out"}


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX's locks")
@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("pathlib.Path.write_bytes", errno.ENOSPC),
        ("pathlib.Path.write_bytes", errno.EDQUOT),
        ("fcntl.flock", errno.ENOLCK),
    ],
)
def test_a_cache_without_room_or_locks_cannot_be_written(tmp_path, monkeypatch, function, code):
    """Such as a home folder whose quota is used up, or that is on another machine."""

    def fail(*_):
        raise OSError(code, os.strerror(code))

    assert cli._can_be_written_to(tmp_path)
    monkeypatch.setattr(function, fail)
    assert not cli._can_be_written_to(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_dir_that_cannot_be_written_is_an_error(glue, tmp_path):
    (tmp_path / "file").touch()
    files = own(".csv", tmp_path, ["yes", "no"])[:2]
    arguments = [*files, "--do_train", *LORA, "--output_dir", "out", "--cache_dir", "file/mine"]
    with pytest.raises(OSError, match=r"--cache_dir file/mine: cannot be written to; give another"):
        glue(*arguments)


def test_tokens_of_glue_are_cached_by_file_contents(glue, tiny_glue, tmp_path, cached_tables):
    folder = tmp_path / "data"
    shutil.copytree(tiny_glue, folder)
    arguments = ["--task_name", "rte", "--data_dir", folder, "--do_train", "--do_eval", *LORA]
    arguments += ["--max_steps", 1, "--output_dir"]
    before = cached_tables()
    glue(*arguments, "first")
    first = cached_tables()
    assert first > before
    os.utime(folder / "RTE" / "dev.tsv")
    glue(*arguments, "second")
    assert cached_tables() == first
    path = folder / "RTE" / "dev.tsv"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:-1]), encoding="utf-8")
    glue(*arguments, "third")
    assert cached_tables() > first
    assert results(tmp_path / "third")["eval_samples"] == len(lines) - 2


# ---- GLUE and a model from the hub ----


@pytest.mark.slow
def test_glue_and_model_by_name_from_the_hub(
    hub_server, trained, tiny_base, tiny_glue, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words, splits = ["entailment", "not_entailment"], {}
    for split, file in (("train", "train"), ("validation", "dev"), ("test", "test")):
        lines = (tiny_glue / "RTE" / f"{file}.tsv").read_text().splitlines()[1:]
        rows = [line.split("\t") for line in lines]
        splits[split] = {
            "sentence1": [row[1] for row in rows],
            "sentence2": [row[2] for row in rows],
            "label": [words.index(row[3]) if file != "test" else -1 for row in rows],
            "idx": list(range(len(rows))),
        }
    hub_server.add_rte(splits)
    shutil.copytree(tiny_base, hub_server.root / "org" / "tiny")
    write_adapter(hub_server.root / "org" / "peft", read_adapter(trained), "peft")

    def call(out: str, flags: Sequence = (), **environment: str) -> None:
        arguments = [*common("org/tiny"), *(flags or on_rte(tiny_glue, tmp_path / out))]
        arguments += ["--do_predict", "--output_dir", tmp_path / out]
        if "--data_dir" in arguments:
            at = arguments.index("--data_dir")
            del arguments[at : at + 2]
        variables = hub_server.environment(tmp_path / "home", **environment)
        result = fork_server("hub").run([SCRIPT, *arguments], variables, timeout=300)
        assert result.returncode == 0, result.stderr

    call("online")
    # The results equal those from the TSV files and the local folder.
    assert_same_bits(lora_of(tmp_path / "online"), lora_of(trained))
    assert results(tmp_path / "online") == results(trained)
    predicted = (tmp_path / "online" / "test_results_rte.txt").read_text()
    assert predicted == (trained / "test_results_rte.txt").read_text()
    hub_server.requests.clear()
    call("offline", HF_HUB_OFFLINE="1")
    assert hub_server.requests == []
    assert_same_bits(lora_of(tmp_path / "offline"), lora_of(trained))
    call("unreached", HF_ENDPOINT="http://127.0.0.1:9")  # no server listens there
    assert_same_bits(lora_of(tmp_path / "unreached"), lora_of(trained))

    adapter = ["--task_name", "rte", "--do_eval", "--apply_lora", "--lora_path", "org/peft"]
    for out, environment in (("peft", {}), ("peft_offline", {"HF_HUB_OFFLINE": "1"})):
        call(out, adapter, **environment)
        assert results(tmp_path / out) == results(trained)


def test_tokenizing_counts_as_progress(glue, run_glue, tiny_glue, monkeypatch):
    """Otherwise the watchdog would end processes that tokenize for long, as if they hung."""
    beats = []
    monkeypatch.setattr(run_glue, "beat", lambda: beats.append(1))

    def stop(*_, **__):
        raise ValueError("tokenized")

    monkeypatch.setattr(run_glue, "build_model", stop)
    with pytest.raises(ValueError, match="tokenized"):
        glue(*on_rte(tiny_glue, "out"), "--overwrite_cache")
    assert len(beats) == 2  # a batch of each set
