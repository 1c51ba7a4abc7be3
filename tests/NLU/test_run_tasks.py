"""run_ner.py, run_qa.py and run_swag.py, from their command lines to their scores and files."""

import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest
from compare import assert_same_bits
from glue_runs import lora_of, results, write
from paths import load_script
from task_runs import SCRIPTS, choice_rows, command, question_rows, sentence_rows, write_data

from loralib.adapters.formats import read_adapter
from loralib.errors import TrainingError

pytestmark = pytest.mark.slow

CASES = [
    ("ner", "tiny_base"),
    ("qa", "tiny_deberta_base"),
    ("swag", "tiny_base"),
]
# The score that shows that a task was learned, and its least value, far above chance.
SCORES = {"ner": ("eval_f1", 0.75), "qa": ("eval_f1", 75.0), "swag": ("eval_accuracy", 0.75)}
# Each of eight seeds learned with these: other processors draw and round differently. A checkpoint
# is written in the middle of the last epoch but two.
LEARNING = {
    "ner": "--num_train_epochs 20 --save_steps 140",
    "qa": "--num_train_epochs 12 --save_steps 76",
    "swag": "--num_train_epochs 24 --save_steps 172 --learning_rate 4e-3",
}
PREDICTED = {
    "ner": ["test_predictions.txt"],
    "qa": ["test_predictions.json", "test_nbest_predictions.json"],
    "swag": ["test_results_swag.txt"],
}
HEADS = {"ner": "token_classification", "qa": "question_answering", "swag": "multiple_choice"}
STAGES = ["--do_train", "--do_eval", "--do_predict"]


@pytest.fixture(scope="module")
def scripts():
    return {task: load_script(path) for task, path in SCRIPTS.items()}


@pytest.fixture(scope="module")
def learned(scripts, request, tmp_path_factory):
    """``learned(task, base)``: the output folder of a trained task, and its flags."""
    made = {}

    def run(task: str, base: str) -> tuple[Path, list]:
        if (task, base) not in made:
            folder = tmp_path_factory.mktemp(task)
            flags = [*write_data(task, folder / "data"), *STAGES, *LEARNING[task].split()]
            flags += ["--lora_targets", "all-linear"]
            scripts[task].main(command(request.getfixturevalue(base), folder / "out", *flags))
            made[task, base] = folder / "out", flags
        return made[task, base]

    return run


@pytest.fixture
def call(scripts, tiny_base, tmp_path, monkeypatch):
    """``call(task, out, flags…)``: runs a script in `tmp_path`, by default on RoBERTa."""
    monkeypatch.chdir(tmp_path)

    def run(task: str, out: str, *flags: object, base: Path = tiny_base) -> Path:
        scripts[task].main(command(base, tmp_path / out, *flags))
        return tmp_path / out

    return run


def test_lora_with_the_default_learning_rate_warns(scripts, tiny_base, tmp_path, caplog):
    """Only if the flag is missing: the default is for training all weights."""
    flags = [*write_data("swag", tmp_path / "data"), "--do_train", "--max_steps", 1]
    given = command(tiny_base, tmp_path / "given", *flags, "--save_strategy", "no", "--no_cuda")
    at = given.index("--learning_rate")
    warning = "--learning_rate is not given: the default, 5e-05, is for training all weights; LoRA"
    for out, argv, count in (
        ("given", [*given, "--learning_rate", "5e-5"], 0),
        ("default", given[:at] + given[at + 2 :], 1),
    ):
        caplog.clear()
        scripts["swag"].main([*argv, "--output_dir", str(tmp_path / out)])
        assert caplog.text.count(warning) == count


def predicted(out: Path, task: str) -> list[str]:
    return [(out / name).read_text() for name in PREDICTED[task]]


# ---- from files to scores ----


@pytest.mark.parametrize(("task", "base"), CASES)
def test_a_task_is_learned(learned, task, base):
    out, _ = learned(task, base)
    name, least = SCORES[task]
    assert results(out)[name] > least
    assert results(out)["eval_samples"] == 16
    assert results(out, "train")["train_samples"] == 60
    tested = results(out, "test")
    assert tested[name.replace("eval", "test")] > least / 2
    assert tested["test_samples"] == 9
    adapter = read_adapter(out / "pytorch_model_lora.safetensors")
    assert adapter.metadata.head == HEADS[task]
    assert adapter.metadata.rank == 4


@pytest.mark.parametrize(("task", "base"), CASES)
def test_base_and_adapter_evaluate_as_the_trained_model(learned, call, request, task, base):
    out, flags = learned(task, base)
    files = flags[2 : flags.index("--do_train")]  # without the training file
    stages = ["--do_eval", "--do_predict", "--lora_path", out]
    evaluated = call(task, "evaluated", *files, *stages, base=request.getfixturevalue(base))
    assert results(evaluated) == results(out)
    assert predicted(evaluated, task) == predicted(out, task)


@pytest.mark.parametrize(("task", "base"), CASES)
def test_a_run_is_resumed_to_the_same_bits(learned, call, request, tmp_path, task, base):
    out, flags = learned(task, base)
    (checkpoint,) = out.glob("checkpoint-*")
    shutil.copytree(checkpoint, tmp_path / "resumed" / checkpoint.name)
    resumed = call(task, "resumed", *flags, base=request.getfixturevalue(base))
    assert_same_bits(lora_of(resumed), lora_of(out))
    assert results(resumed) == results(out)
    assert predicted(resumed, task) == predicted(out, task)


@pytest.mark.parametrize(("task", "base"), CASES)
def test_csv_and_json_give_the_same_results(call, request, tmp_path, task, base):
    runs = []
    for suffix in (".csv", ".json"):
        flags = write_data(task, tmp_path / suffix[1:], suffix)
        flags = [*flags, *STAGES, "--max_steps", 2]
        runs.append(call(task, f"out{suffix}", *flags, base=request.getfixturevalue(base)))
    assert_same_bits(*map(lora_of, runs))
    assert results(runs[0]) == results(runs[1])
    assert predicted(runs[0], task) == predicted(runs[1], task)


@pytest.mark.parametrize("task", SCRIPTS)
def test_a_folder_can_be_the_dataset(call, tmp_path, task):
    """It is read like a dataset of the hub; a file that is given replaces its split."""
    flags = write_data(task, tmp_path / "set", ".json")
    stages = ["--do_train", "--do_eval", "--max_steps", 1]
    files = call(task, "files", *flags, *stages)
    folder = call(task, "folder", "--dataset_name", tmp_path / "set", *stages)
    both = call(task, "both", "--dataset_name", tmp_path / "set", *flags[2:4], *stages)
    for out in (folder, both):
        assert_same_bits(lora_of(out), lora_of(files))
        assert results(out) == results(files)


@pytest.mark.parametrize("task", SCRIPTS)
def test_adapters_and_biases_are_trained_and_loaded(call, tmp_path, task):
    """The paper's baselines train together with LoRA, as in run_glue.py."""
    kinds = ["--apply_adapter", "--adapter_size", 3, "--apply_bitfit"]
    data = write_data(task, tmp_path / "data")
    stages = ["--do_train", "--do_eval", "--max_steps", 2]
    trained = call(task, "trained", *data, *kinds, *stages, "--save_lora_only")
    paths = [w for kind in ("lora", "adapter", "bitfit") for w in (f"--{kind}_path", trained)]
    evaluated = call(task, "evaluated", *data, *kinds, *paths, "--do_eval")
    assert results(evaluated) == results(trained)


@pytest.mark.parametrize("task", SCRIPTS)
def test_pad_to_max_length_keeps_the_loss(call, base_without_dropout, tmp_path, task):
    data = [*write_data(task, tmp_path / "data"), *STAGES, "--max_steps", 2]
    short = call(task, "short", *data, base=base_without_dropout)
    long = call(task, "long", *data, "--pad_to_max_length", base=base_without_dropout)
    assert results(long)["eval_loss"] == pytest.approx(results(short)["eval_loss"], abs=1e-4)


@pytest.mark.parametrize("task", SCRIPTS)
def test_estimate_prints_the_number_of_steps(scripts, tiny_base, tmp_path, capsys, task):
    flags = [*write_data(task, tmp_path / "data")[:2], "--do_train", "--estimate"]
    arguments = command(tiny_base, tmp_path / "out", *flags, "--estimate_rate", 100, "--no_cuda")
    scripts[task].main(arguments)
    read = capsys.readouterr().out
    assert "optimizer steps         24\n" in read  # 60 examples in batches of 8, three epochs
    scripts[task].main([*arguments, "--estimate_length", "9", "--max_steps", "5"])
    assert "optimizer steps         5\n" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


# ---- tagged words ----


def test_entity_level_metrics_are_reported(call, tmp_path):
    data = write_data("ner", tmp_path / "data")
    flags = ["--do_train", "--do_eval", "--max_steps", 1, "--return_entity_level_metrics"]
    scores = results(call("ner", "out", *data, *flags))
    of_each = {f"eval_{t}_{s}" for t in ("ANI", "PLA") for s in ("precision", "recall", "f1")}
    assert of_each < scores.keys()
    true = [tag for row in read_rows(data[3]) for tag in row["ner_tags"]]
    assert scores["eval_ANI_number"] == true.count("B-ANI")
    assert {"eval_overall_f1", "eval_overall_accuracy"} < scores.keys()


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("base", ["tiny_base", "tiny_deberta_base"])
def test_every_word_of_a_test_set_is_given_a_tag(call, request, tmp_path, caplog, base):
    """The set has no tags; one message counts the sentences that were cut."""
    data = write_data("ner", tmp_path / "data")
    rows = [{"tokens": ["the", "dog", *["warm"] * extra]} for extra in (1, 50, 0)]
    test = write(tmp_path / "test.json", rows)
    flags = [*data[:2], "--test_file", test, "--do_train", "--do_predict", "--max_steps", 1]
    out = call("ner", "out", *flags, "--max_seq_length", 9, base=request.getfixturevalue(base))
    lines = (out / "test_predictions.txt").read_text().splitlines()
    assert [len(line.split()) for line in lines] == [3, 52, 2]
    assert lines[1].endswith(" _ _")
    assert "_" not in lines[0] + lines[2]
    assert results(out, "test").keys() == {"test_samples"}
    messages = [record.message for record in caplog.records if "were cut" in record.message]
    assert len(messages) == 1
    assert "1 of 3 in test" in messages[0]


def test_label_all_tokens_still_predicts_one_tag_per_word(call, tmp_path):
    """The loss covers more tokens; predictions still have one tag per word."""
    rows = [{"tokens": ["unheard-of", "dog"], "ner_tags": ["O", "B-ANI"]}] * 4
    train = write(tmp_path / "train.json", rows)
    flags = ["--train_file", train, "--test_file", train, "--do_train", "--do_predict"]
    flags += ["--max_steps", 1]
    first = call("ner", "first", *flags)
    every = call("ner", "every", *flags, "--label_all_tokens")
    losses = [results(out, "train")["train_loss"] for out in (first, every)]
    assert losses[0] != losses[1]
    for out in (first, every):
        lines = (out / "test_predictions.txt").read_text().splitlines()
        assert [len(line.split()) for line in lines] == [2] * 4


def test_scores_count_words_with_label_all_tokens(call, tmp_path):
    """Scores agree with the predictions that are written, which are of words."""
    chance = random.Random(3)
    tags = {"unheard-of": "B-A", "zebra-like": "B-B", "dog": "O", "warm": "O"}
    rows = [
        {"tokens": words, "ner_tags": [tags[word] for word in words]}
        for words in (chance.choices(list(tags), k=5) for _ in range(24))
    ]
    file = write(tmp_path / "rows.json", rows)
    files = [f"--{split}_file={file}" for split in ("train", "validation", "test")]
    out = call("ner", "out", *files, *STAGES, "--max_steps", 4, "--label_all_tokens")
    lines = (out / "test_predictions.txt").read_text().splitlines()
    same = [
        ours == true
        for line, row in zip(lines, rows, strict=True)
        for ours, true in zip(line.split(), row["ner_tags"], strict=True)
    ]
    assert 0 < sum(same) < len(same) == 120
    for stage in ("eval", "test"):
        assert results(out, stage)[f"{stage}_accuracy"] == pytest.approx(sum(same) / len(same))


def test_max_train_samples_does_not_change_the_tags(call, tmp_path):
    """The tags are those of all rows, so that a run on more rows has the same head."""
    data = write_data("ner", tmp_path / "data")
    rows = [{"tokens": ["the"], "ner_tags": ["O"]}, *read_rows(data[1])]
    write(data[1], rows)
    flags = [*data, "--do_train", "--do_eval", "--max_steps", 1, "--max_train_samples", 1]
    out = call("ner", "out", *flags)
    assert results(out, "train")["train_samples"] == 1
    settings = json.loads((out / "config.json").read_text())
    assert [*settings["id2label"].values()] == ["B-ANI", "B-PLA", "O"]


@pytest.mark.parametrize(
    ("names", "warning"),
    [
        ({"O": 0, "B-ANI": 1, "B-PLA": 2}, "the tags are numbers, and each is scored as"),
        (
            {"O": "O", "B-ANI": "ANI-B", "B-PLA": "PLA-B"},
            "tag 'ANI-B' is taken for a type of entity",
        ),
        ({"O": "O", "B-ANI": "U_ANI", "B-PLA": "B_PLA"}, ""),
    ],
)
def test_tags_that_are_not_entities_give_a_warning(call, tmp_path, caplog, names, warning):
    data = write_data("ner", tmp_path / "data")
    for file in data[1::2]:
        rows = read_rows(file)
        write(file, [{**row, "ner_tags": [names[tag] for tag in row["ner_tags"]]} for row in rows])
    call("ner", "out", *data, *STAGES, "--max_steps", 1)
    warned = [record.message for record in caplog.records if "type of entity" in record.message]
    assert len(warned) == bool(warning)
    assert warning in "".join(warned)


def test_tags_of_a_bin_file_come_from_the_training_set(learned, call, tmp_path):
    """A .bin file does not name its tags, so they come from the training set."""
    out, flags = learned("ner", "tiny_base")
    path = shutil.copy(out / "pytorch_model_lora.bin", tmp_path / "lone.bin")
    adapter = ["--lora_path", path, "--do_eval", "--lora_targets", "all-linear"]
    with pytest.raises(ValueError, match=r"\.bin does not name its tags; give the --train"):
        call("ner", "without", *flags[2:4], *adapter)
    assert results(call("ner", "with", *flags[:4], *adapter)) == results(out)


# ---- questions ----


def test_long_texts_are_split_into_rows(call, tmp_path, caplog):
    """A question has several rows, and nothing is cut."""
    data = write_data("qa", tmp_path / "data")
    flags = ["--do_train", "--do_eval", "--do_predict", "--max_seq_length", 14, "--doc_stride", 3]
    out = call("qa", "out", *data, *flags, "--num_train_epochs", 4)
    assert results(out)["eval_f1"] > 50
    assert results(out)["eval_samples"] == 16
    assert "cut" not in caplog.text
    questions = {row["id"]: row for row in read_rows(data[5])}
    answers = json.loads((out / "test_predictions.json").read_text())
    assert answers.keys() == questions.keys()
    assert all(text in questions[name]["context"] for name, text in answers.items())


def test_questions_without_answers(call, tiny_deberta_base, tmp_path):
    """SQuAD 2.0's scores; a threshold decides how many questions are answered."""
    data = write_data("qa", tmp_path / "data", none=0.4)
    flags = [*data, "--version_2_with_negative"]
    train = ["--do_train", "--num_train_epochs", 12, "--lora_targets", "all-linear"]
    base = tiny_deberta_base
    out = call("qa", "out", *flags, *train, "--do_eval", base=base)
    scores = results(out)
    assert scores["eval_f1"] > 60
    assert scores["eval_HasAns_total"] + scores["eval_NoAns_total"] == scores["eval_total"] == 16
    assert scores["eval_best_f1"] >= scores["eval_f1"]
    odds = json.loads((out / "eval_null_odds.json").read_text())
    answers = json.loads((out / "eval_predictions.json").read_text())
    assert {name for name, odd in odds.items() if odd <= 0} == {n for n, t in answers.items() if t}
    evaluate = [*flags, "--do_eval", "--lora_path", out, "--null_score_diff_threshold"]
    for threshold, wanted in ((-1000, 0), (1000, 16)):
        other = call("qa", f"other{threshold}", *evaluate, threshold, base=base)
        answers = json.loads((other / "eval_predictions.json").read_text())
        assert sum(map(bool, answers.values())) == wanted


def test_a_run_that_fails_before_its_first_checkpoint_can_be_repeated(
    scripts, call, tmp_path, monkeypatch
):
    data = write_data("qa", tmp_path / "data")
    flags = [*data, "--do_train", "--do_eval", "--evaluation_strategy", "steps", "--eval_steps", 2]
    flags += ["--max_steps", 4]
    score, seen = scripts["qa"].scores_of, []

    def end_at_the_second(*given):
        seen.append(given)
        if len(seen) == 2:
            raise RuntimeError("killed")
        return score(*given)

    monkeypatch.setattr(scripts["qa"], "scores_of", end_at_the_second)
    with pytest.raises(RuntimeError, match="killed"):
        call("qa", "out", *flags)
    out = call("qa", "out", *flags)
    answers = json.loads((out / "eval_predictions.json").read_text())
    assert answers.keys() == {row["id"] for row in read_rows(data[3])}
    loss = call("qa", "loss", *flags[:-2], "--lora_path", out, "--prediction_loss_only")
    assert results(loss).keys() == {"eval_loss", "eval_samples"}
    assert not (loss / "eval_predictions.json").exists()


def test_n_best_size_and_max_answer_length_limit_the_answers(call, tmp_path):
    data = write_data("qa", tmp_path / "data")
    flags = [*data, "--do_train", "--do_eval", "--max_steps", 1]
    out = call("qa", "out", *flags, "--n_best_size", 3, "--max_answer_length", 2)
    best = json.loads((out / "eval_nbest_predictions.json").read_text())
    assert {len(each) for each in best.values()} <= {1, 2, 3}
    assert max(len(row["text"].split()) for each in best.values() for row in each) <= 2
    for each in best.values():
        assert sum(row["probability"] for row in each) == pytest.approx(1)


# ---- choices ----


@pytest.mark.parametrize("endings", [2, 5])
def test_other_numbers_of_endings(call, tmp_path, endings):
    data = write_data("swag", tmp_path / "data", endings=endings)
    out = call("swag", "out", *data, *STAGES, "--max_steps", 1)
    rows = (out / "test_results_swag.txt").read_text().splitlines()
    assert rows[0] == "index\tprediction"
    assert [row.split("\t")[0] for row in rows[1:]] == [str(n) for n in range(9)]
    assert {int(row.split("\t")[1]) for row in rows[1:]} <= {*range(endings)}


def test_choices_that_are_cut_are_counted(call, tmp_path, caplog):
    rows = choice_rows(random.Random(0), 8)
    rows[3]["ending1"] = "warm " * 60
    train = write(tmp_path / "train.json", rows)
    call("swag", "out", "--train_file", train, "--do_train", "--max_steps", 1)
    messages = [record.message for record in caplog.records if "were cut" in record.message]
    assert messages == ["texts were cut to 40 tokens: 1 of 24 in train"]


def test_a_test_set_without_labels(call, tmp_path):
    rows = choice_rows(random.Random(0), 8)
    train = write(tmp_path / "train.json", rows)
    test = write(tmp_path / "test.json", [{**row, "label": -1} for row in rows])
    flags = ["--train_file", train, "--test_file", test, "--do_train", "--do_predict"]
    out = call("swag", "out", *flags, "--max_steps", 1)
    assert results(out, "test").keys() == {"test_samples"}


# ---- flags ----

OF_ALL = "train_file validation_file overwrite_cache preprocessing_num_workers pad_to_max_length "
OF_ALL += "max_train_samples max_val_samples"
OF_4_4 = {
    "ner": "task_name dataset_name dataset_config_name test_file max_test_samples label_all_tokens "
    "return_entity_level_metrics",
    "qa": "dataset_name dataset_config_name max_seq_length version_2_with_negative "
    "null_score_diff_threshold doc_stride n_best_size max_answer_length",
    "swag": "max_seq_length",
}


@pytest.mark.parametrize("task", SCRIPTS)
def test_every_flag_of_4_4_exists(scripts, task):
    known = {field.name for field in dataclasses.fields(scripts[task].DataTrainingArguments)}
    assert {*OF_ALL.split(), *OF_4_4[task].split()} <= known
    ours = {field.name for field in dataclasses.fields(scripts[task].AdaptedModelArguments)}
    glue = load_script("examples/text-classification/run_glue.py").ModelArguments
    theirs = {field.name for field in dataclasses.fields(glue)}
    only_glue = {"apply_rdrop", "apply_cutoff", "reg_loss_wgt", "masking_prob"}
    assert theirs - ours == only_glue


# ---- bad input ----


def test_heads_of_other_tasks_are_refused(learned, call, tiny_base, tmp_path):
    out, _ = learned("ner", "tiny_base")
    data = write_data("qa", tmp_path / "data")
    message = (
        "trained for token classification, and this script is for question answering: give it to"
    )
    for flags in (["--do_eval"], ["--do_train"], ["--do_train", "--estimate"]):
        with pytest.raises(ValueError, match=rf"{message} run_ner\.py$"):
            call("qa", "other", *data, *flags, "--lora_path", out)
    tags = [{**row, "ner_tags": ["O"] * len(row["tokens"])} for row in rows_of_words()]
    dev = write(tmp_path / "dev.json", tags)
    train = ["--train_file", dev, "--do_eval", "--validation_file", dev]
    glue = load_script("examples/text-classification/run_glue.py")
    flags = ["--do_predict", "--test_file", write(tmp_path / "texts.csv", [{"text": "a b"}])]
    with pytest.raises(
        ValueError, match=r"this script is for sequence class.*: give it to run_ner"
    ):
        glue.main([*map(str, command(tiny_base, tmp_path / "o", *flags, "--lora_path", out))])
    out = call("ner", "fine", *train, "--lora_path", out)  # a file may have fewer tags
    assert results(out)["eval_recall"] == 0


@pytest.mark.parametrize("task", SCRIPTS)
def test_a_base_with_another_head_is_given_a_new_one(call, tiny_base, tmp_path, task):
    """The columns and the task of the old head are not recorded for the new one."""
    base = shutil.copytree(tiny_base, tmp_path / "base")
    settings = json.loads((base / "config.json").read_text())
    own = {"text_columns": ["premise", "claim"], "finetuning_task": "rte"}
    (base / "config.json").write_text(json.dumps({**settings, **own}))
    flags = [*write_data(task, tmp_path / "data"), "--do_train", "--max_steps", "1"]
    out = call(task, "out", *flags, base=base)
    config = json.loads((out / "config.json").read_text())
    assert config["text_columns"] is None
    assert config["finetuning_task"] != "rte"
    assert read_adapter(out).metadata.text_columns is None


def rows_of_words() -> list[dict]:
    return sentence_rows(random.Random(1), 4)


def test_a_question_that_is_too_long_is_an_error(call, tmp_path):
    rows = question_rows(random.Random(0), 3)
    rows[1]["question"] = "where " * 40
    train = write(tmp_path / "train.json", rows)
    message = r"row 2: its question takes 23 or more tokens, so --max_seq_length 40 minus --doc_"
    with pytest.raises(ValueError, match=message):
        call("qa", "out", "--train_file", train, "--do_train")


BEST = ("--load_best_model_at_end", "--evaluation_strategy", "epoch", "--metric_for_best_model")


@pytest.mark.parametrize(
    ("task", "flags", "message"),
    [
        (
            "qa",
            ["--doc_stride", 40],
            "--doc_stride must be at least 0 and below --max_seq_length 40",
        ),
        ("qa", ["--n_best_size", 0], "--n_best_size must be at least 1, not 0"),
        ("qa", ["--null_score_diff_threshold", 1], "needs --version_2_with_negative"),
        ("ner", ["--cls_dropout", 0.1], "--cls_dropout is for text classifiers"),
        ("qa", ["--no_use_fast_tokenizer"], "only a fast tokenizer knows which words and char"),
        ("swag", ["--lora_path", "nowhere.bin"], "nowhere.bin: no such checkpoint file"),
        ("ner", ["--do_train", False], "nothing to do"),
        ("ner", ["--do_predict", "--prediction_loss_only"], "--prediction_loss_only leaves no pr"),
        ("qa", ["--do_predict", "--prediction_loss_only"], "--prediction_loss_only leaves no pr"),
        ("swag", ["--do_predict", "--prediction_loss_only"], "--prediction_loss_only leaves no "),
        ("qa", ["--label_smoothing_factor", 0.1], "smooths a single label, but an answer has two"),
        ("swag", ["--do_eval"], "this run needs --validation_file"),
        ("swag", [*BEST, "f1"], "gives eval_f1; known: loss, accuracy"),
        ("qa", [*BEST, "em"], "gives eval_em; known: loss, exact_match, f1"),
        ("ner", [*BEST, "f2"], "known: loss, precision, recall, f1, accuracy"),
        (
            "ner",
            [*BEST, "f1", "--return_entity_level_metrics"],
            "gives eval_f1; known: loss, ANI_precision, ANI_recall, ANI_f1, ANI_number, PLA_prec",
        ),
        (
            "qa",
            [*BEST, "f1", "--prediction_loss_only"],
            "gives eval_f1; known: loss",
        ),
    ],
)
def test_wrong_flags_are_errors(call, tmp_path, capsys, task, flags, message):
    data = write_data(task, tmp_path / "data")[:2]
    if set(BEST) & set(flags):
        data += ["--validation_file", data[1]]
    with pytest.raises((ValueError, OSError, TrainingError, SystemExit)) as raised:
        call(task, "out", *data, "--do_train", *flags)
    assert message in str(raised.value) + capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "score", "more"),
    [
        ("swag", "accuracy", []),
        ("qa", "eval_f1", []),
        ("qa", "HasAns_f1", ["--version_2_with_negative"]),
        ("ner", "f1", []),
        ("ner", "ANI_f1", ["--return_entity_level_metrics"]),
        ("ner", "loss", []),
    ],
)
def test_the_best_model_can_be_chosen_by_any_score_of_the_task(call, tmp_path, task, score, more):
    flags = "--do_train --do_eval --num_train_epochs 1 --evaluation_strategy epoch"
    best = ["--load_best_model_at_end", "--metric_for_best_model", score]
    call(task, "out", *write_data(task, tmp_path / "data")[:4], *flags.split(), *best, *more)


@pytest.mark.parametrize("task", SCRIPTS)
def test_a_base_is_not_overwritten(call, tiny_base, tmp_path, task):
    base = Path(shutil.copytree(tiny_base, tmp_path / "base"))
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    flags = [*write_data(task, tmp_path / "data")[:2], "--do_train", "--overwrite_output_dir"]
    message = "--model_name_or_path .*: training would overwrite it, as it is in --output_dir"
    with pytest.raises(ValueError, match=message):
        call(task, "base", *flags, base=base)
    after = {path.name: path.read_bytes() for path in base.iterdir() if path.suffix != ".lock"}
    assert after == before
