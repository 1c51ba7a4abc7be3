"""run_glue.py reports every error in its input as one line."""

import shutil
from pathlib import Path

import pytest
import torch
from glue_runs import common, failure, lora_of, on_rte, own_rows, write

pytestmark = pytest.mark.slow


@pytest.fixture
def bad(tmp_path, tiny_glue, trained):
    """Makes files with one error each; flags name their folder as {tmp}."""
    shutil.copytree(tiny_glue / "RTE", tmp_path / "columns" / "RTE")
    shutil.copytree(tiny_glue / "RTE", tmp_path / "labels" / "RTE")
    shutil.copytree(tiny_glue / "RTE", tmp_path / "empty" / "RTE")
    with (tmp_path / "columns" / "RTE" / "train.tsv").open("a") as file:
        file.write("45\tonly two\n")
    with (tmp_path / "labels" / "RTE" / "dev.tsv").open("a") as file:
        file.write("13\ta\tb\tentails\n")
    (tmp_path / "empty" / "RTE" / "train.tsv").write_text("index\tsentence1\tsentence2\tlabel\n")
    rows = own_rows(["yes", "no"])
    shutil.copytree(tiny_glue / "RTE", tmp_path / "QNLI")
    for path in (tmp_path / "QNLI").iterdir():
        path.write_text(
            path.read_text().replace("sentence1", "question").replace("sentence2", "sentence")
        )
    write(tmp_path / "integers.csv", [{"review": "a", "label": 0}, {"review": "b", "label": 1}])
    write(tmp_path / "floats.csv", [{"review": "a", "label": 0.0}, {"review": "b", "label": 1.0}])
    write(tmp_path / "scores.csv", [{"review": "a", "label": 0.5}, {"review": "b", "label": 1.0}])
    write(tmp_path / "good.csv", rows)
    write(tmp_path / "unknown.csv", [*rows, {**rows[0], "label": "perhaps"}])
    write(tmp_path / "blank.csv", [*rows, {**rows[0], "label": ""}])
    write(tmp_path / "null.json", [*rows, {**rows[0], "review": None}])
    write(tmp_path / "score.csv", [{"text": "a", "label": 0.5}, {"text": "b", "label": ""}])
    write(tmp_path / "unlabeled.csv", [{"review": "a"}, {"review": "b"}])
    write(tmp_path / "other.csv", [{"text": "a", "label": "yes"}])
    write(tmp_path / "textless.csv", [{"number": 1, "label": "yes"}])
    write(tmp_path / "three.csv", [{"a": "x", "b": "y", "c": "z", "label": 1}])
    (tmp_path / "repeated.csv").write_text("text,label,label\na,1,0\nb,0,1\n")
    (tmp_path / "repeated.json").write_text('{"text": "a", "label": 1, "label": 0}\n' * 2)
    (tmp_path / "shifted.csv").write_text("text,label\nx,a dog,1\ny,a cat,0\n")
    write(tmp_path / "ids.csv", [{"doc_id": "x", "n": 3, "label": n} for n in (0, 1)])
    write(tmp_path / "object.json", [{"text": {"a": "b"}, "label": n} for n in (0, 1)])
    write(tmp_path / "list.json", [{"text": ["a", "b"], "label": n} for n in (0, 1)])
    write(tmp_path / "mixed.json", [{"text": "a", "label": 0}, {"text": ["a"], "label": 1}])
    write(tmp_path / "labels.json", [{"text": "a", "label": ["x"]}, {"text": "b", "label": ["y"]}])
    write(tmp_path / "class.csv", own_rows(["yes"]))
    write(tmp_path / "textless_rows.csv", [{"review": " ", "label": n} for n in (0, 1)])
    swapped = [{"label": f"a text {n}", "review": "yes" if n % 2 else "no"} for n in range(24)]
    write(tmp_path / "swapped.csv", swapped)
    write(tmp_path / "constant.csv", own_rows([0.5]))
    for name in ("good.csv", "null.json"):
        content = (tmp_path / name).read_text()
        (tmp_path / f"utf16_{name}").write_text(content, encoding="utf-16")
    (tmp_path / "header.csv").write_text("review,label\n")
    (tmp_path / "zero.csv").write_text("")
    (tmp_path / "zero.json").write_text("")
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "ragged.csv").write_text("review,label\na,1\nb,2,3,4\n")
    (tmp_path / "broken.json").write_text('{"review": "a", "label": 1}\n{"review": ')
    (tmp_path / "broken_settings.json").write_text('{"task_name": ')
    (tmp_path / "settings.json").write_text('{"task_nane": "rte"}')
    for name in ("pytorch_model_lora.bin", "pytorch_model_lora.safetensors"):
        content = (trained / name).read_bytes()
        (tmp_path / f"truncated{Path(name).suffix}").write_bytes(content[: len(content) // 2])
    tensors = lora_of(trained)
    torch.save({f"x.{name}": t for name, t in tensors.items()}, tmp_path / "elsewhere.bin")
    torch.save(tensors, tmp_path / "lone.bin")
    nan = {name: tensor * float("nan") for name, tensor in tensors.items()}
    torch.save(nan, tmp_path / "nan.bin")
    head = {name: tensor for name, tensor in tensors.items() if "lora_" not in name}
    torch.save(head, tmp_path / "head.bin")
    shutil.copytree(trained / "checkpoint-4", tmp_path / "no_weights")
    (tmp_path / "no_weights" / "pytorch_model.bin").unlink()
    shutil.copytree(trained / "checkpoint-4", tmp_path / "half")
    content = (tmp_path / "half" / "pytorch_model.bin").read_bytes()
    (tmp_path / "half" / "pytorch_model.bin").write_bytes(content[:1000])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    return tmp_path


RTE = "--task_name rte --data_dir {glue}"
EVAL = f"{RTE} --do_eval --apply_lora --lora_path"
TRAIN_OWN = "--do_train --apply_lora --lora_r 4 --lora_alpha 8 --train_file {tmp}"
R4 = "--lora_r 4 --lora_alpha 8"
BAD = {
    "another rank": (
        f"{EVAL} {{trained}} --lora_r 2 --lora_alpha 8",
        "trained with rank 4, the model was built with 2 (--lora_r 4, or leave it out: the file",
    ),
    "another rank, .bin": (
        f"{EVAL} {{tmp}}/lone.bin --lora_r 2 --lora_alpha 8",
        "was trained with rank 4, the model was built with 2 (--lora_r 4, or leave it out",
    ),
    "another alpha": (
        f"{EVAL} {{trained}} --lora_alpha 16",
        "was trained with alpha 8, but lora_alpha is 16: give 8, or leave lora_alpha out (--lora_a",
    ),
    "another number of labels": (
        "--task_name mnli --data_dir {glue} --do_eval --apply_lora --lora_path {trained}",
        "was trained for rte, not for mnli",
    ),
    "another task": (
        "--task_name sst2 --data_dir {glue} --do_eval --apply_lora --lora_path {trained}",
        "was trained for rte, not for sst2",
    ),
    "tensors of no layer": (f"{EVAL} {{tmp}}/elsewhere.bin {R4}", "matches no layer of the model"),
    "no LoRA in the file": (f"{EVAL} {{tmp}}/head.bin {R4}", "none of its 4 tensors is LoRA's"),
    "not finite": (f"{EVAL} {{tmp}}/nan.bin {R4}", "not finite"),
    "missing": (f"{EVAL} {{tmp}}/none.bin {R4}", "none.bin: no such checkpoint file"),
    "truncated": (f"{EVAL} {{tmp}}/truncated.bin {R4}", "truncated.bin: damaged"),
    "truncated safetensors": (
        f"{EVAL} {{tmp}}/truncated.safetensors",
        "truncated.safetensors: damaged",
    ),
    "no alpha": (
        f"{EVAL} {{tmp}}/lone.bin",
        "lone.bin: does not record the alpha it was trained with; give it as lora_alpha",
    ),
    "no rank": (
        f"{RTE} --do_train --apply_lora --lora_alpha 8",
        "apply_lora needs lora_r: chosen for training",
    ),
    "rank alone": (f"{RTE} --do_train --lora_r 8", "--lora_r needs --apply_lora"),
    "adapter alone": (f"{RTE} --do_eval --lora_path {{trained}}", "needs --apply_lora"),
    "damaged model": (
        f"{RTE} --do_eval --apply_lora {R4} --model_name_or_path {{tmp}}/half",
        "half/pytorch_model.bin: damaged",
    ),
    "model without weights": (
        f"{RTE} --do_eval --model_name_or_path {{tmp}}/no_weights",
        "has no weights: neither model.safetensors nor pytorch_model.bin",
    ),
    "model with another rank": (
        f"{RTE} --do_eval --apply_lora --lora_r 2 --model_name_or_path {{trained}}",
        "was trained with lora_r 4, not 2",
    ),
    "untrained head": (f"{RTE} --do_eval", "has no trained classifier.dense.bias, …"),
    "no such model": (
        f"{RTE} --do_train --model_name_or_path {{tmp}}/nowhere",
        "nowhere': no such folder",
    ),
    "no model that can be reached": (
        f"{RTE} --do_train --model_name_or_path org/name",
        "'org/name' is not a local folder and cannot be fetched",
    ),
    "wrong column count": (
        "--task_name rte --data_dir {tmp}/columns --do_train",
        "RTE/train.tsv:47: expected 4 tab-separated columns, found 2",
    ),
    "unknown label": (
        "--task_name rte --data_dir {tmp}/labels --do_eval --model_name_or_path {trained}",
        "RTE/dev.tsv:15: unknown label 'entails' (expected entailment, not_entailment)",
    ),
    "empty set": (
        "--task_name rte --data_dir {tmp}/empty --do_train",
        "RTE/train.tsv: the file holds no rows",
    ),
    "max_train_samples 0": (
        f"{RTE} --do_train --max_train_samples 0",
        "--max_train_samples must be at least 1, not 0",
    ),
    "no such task": ("--task_name rta --do_train", "unknown GLUE task 'rta'"),
    "no such split": ("--task_name ax --do_eval", "ax has no split 'validation' (it has test)"),
    "no such data": (
        "--task_name rte --data_dir {tmp}/nowhere --do_train",
        "nowhere/RTE/train.tsv: no such file",
    ),
    "too long": (
        f"{RTE} --do_train --max_seq_length 65",
        "--max_seq_length 65: the model has 64 positions",
    ),
    "too short": (f"{RTE} --do_train --max_seq_length 0", "--max_seq_length must be at"),
    "another variant": (
        f"{EVAL} {{trained}} --lora_variant dora",
        "with variant lora, the model was built with dora (--lora_variant lora, or leave it",
    ),
    "another rank of one module": (
        f"{EVAL} {{trained}} --lora_rank_pattern layer.0.*.value=2",
        "self.value) (leave --lora_r, --lora_rank_pattern and --lora_alpha_pattern out: the file",
    ),
    "a model as an adapter": (
        f"{EVAL} {{base}}",
        "is a model without LoRA, not an adapter (--model_name_or_path {base}, and leave "
        "--apply_lora and every --lora_… flag out)",
    ),
    "a model's file as an adapter": (
        f"{EVAL} {{base}}/pytorch_model.bin {R4}",
        "is a model without LoRA, not an adapter (--model_name_or_path {base}, and leave "
        "--apply_lora and every --lora_… flag out)",
    ),
    "a model with LoRA as an adapter": (
        f"{EVAL} {{trained}}/pytorch_model.bin {R4}",
        "/out)",  # the folder instead of the file
    ),
    "adapter flags alone": (
        f"{RTE} --do_train --adapter_size 4",
        "--adapter_size needs --apply_adapter",
    ),
    "no such biases": (f"{RTE} --do_eval --bitfit_path x.bin", "x.bin: no such checkpoint file"),
    "no biases in the file": (
        f"{RTE} --do_eval --apply_bitfit --bitfit_path {{tmp}}/nan.bin",
        "nan.bin: none of its 12 tensors is BitFit's",
    ),
    "adapters of another kind": (
        f"{RTE} --do_eval --apply_adapter --adapter_path {{trained}}/pytorch_model_lora.bin",
        "pytorch_model_lora.bin: holds what --apply_lora has trained: give it as --apply_lora "
        "--lora_path, and leave --apply_adapter and every --adapter_… flag out",
    ),
    "adapters without their file": (
        f"{EVAL} {{trained}} --apply_adapter",
        "nothing to evaluate; give --adapter_path, or leave --apply_adapter and every --adapter_… "
        "flag out",
    ),
    "no such target": (
        f"{RTE} --do_train --apply_lora {R4} --lora_targets danse",
        "lora_targets: 'danse' matches no projection; similar names:",
    ),
    "other targets": (
        f"{EVAL} {{trained}} --lora_targets key",
        "was trained with targets query, value, the model was built with key (--lora_targets query "
        "value, or leave it out: the file records it)",
    ),
    "adapter size 0": (
        f"{RTE} --do_train --apply_adapter --adapter_size 0",
        "--adapter_size must be at least 1, not 0",
    ),
    "masking_prob above 1": (
        f"{RTE} --do_train --masking_prob 1.5",
        "masking_prob must lie in [0, 1], not 1.5",
    ),
    "consistency training of scores": (
        f"{TRAIN_OWN}/floats.csv --apply_rdrop",
        "a score has none: leave out --reg_loss_wgt",
    ),
    "consistency training with label smoothing": (
        f"{RTE} --do_train --apply_rdrop --label_smoothing_factor 0.1",
        "--label_smoothing_factor and consistency training",
    ),
    "save_lora_only of a model without adapters": (
        f"{RTE} --do_train --save_lora_only",
        "--save_lora_only needs a model with LoRA, adapters or BitFit",
    ),
    "labels that the model does not take": (
        f"{RTE} --do_train --label_names label",
        "--label_names: RobertaForSequenceClassification takes no label: leave the flag out",
    ),
    "do_predict with prediction_loss_only": (
        f"{RTE} --do_predict --prediction_loss_only",
        "--prediction_loss_only leaves no predictions for --do_predict",
    ),
    "no data": ("--do_train", "give --task_name, or --train_file"),
    "nothing to do": (RTE, "nothing to do: give --do_train, --do_eval or --do_predict"),
    "unknown flag": (f"{RTE} --do_train --lora_rank 8", "unrecognized arguments: --lora_rank"),
    "a TPU": (f"{RTE} --do_train --tpu_num_cores 8", "--tpu_num_cores has no meaning here"),
    "fp16": (f"{RTE} --do_train --fp16 --no_cuda", "fp16 needs a GPU"),
    "no set to evaluate": (
        f"{RTE} --do_train --do_eval False --evaluation_strategy epoch",
        "needs a set to evaluate on: add --do_eval, or give the Trainer an eval_dataset",
    ),
    "unknown metric": (
        f"{RTE} --do_train --evaluation_strategy epoch --save_strategy epoch "
        "--load_best_model_at_end --metric_for_best_model acuracy",
        "no evaluation gives eval_acuracy; known: loss, accuracy",
    ),
    "a learning rate that is too large": (
        f"{RTE} --do_train --learning_rate 1e39 --save_steps 1",
        "the weights are not finite after step 1; no checkpoint was saved before",
    ),
    "an infinite learning rate": (
        f"{RTE} --do_train --learning_rate inf",
        "--learning_rate must be",
    ),
    "a negative number of epochs": (
        f"{RTE} --do_train --num_train_epochs -2",
        "--num_train_epochs must be above 0",
    ),
    "alpha 0": (
        f"{RTE} --do_train --apply_lora --lora_r 4 --lora_alpha 0",
        "--lora_alpha must be at",
    ),
    "rank 0": (
        f"{RTE} --do_train --apply_lora --lora_r 0 --lora_alpha 8",
        "--lora_r must be at least 1, not 0",
    ),
    "cls_dropout": (f"{RTE} --do_train --cls_dropout 0.1", "a roberta model has no such dropout"),
    "another task's adapter": (
        "--task_name qnli --data_dir {tmp} --do_eval --apply_lora "
        "--lora_path {trained}/pytorch_model_lora.safetensors",
        "was trained for rte, not for qnli",
    ),
    "another task's model": (
        "--task_name qnli --data_dir {tmp} --do_eval --model_name_or_path {trained}",
        "was trained for rte, not for qnli",
    ),
    "no room for a text": (
        f"{TRAIN_OWN}/good.csv --max_seq_length 3",
        "--max_seq_length 3: a text needs at least 4 tokens, of which 2 are special ones",
    ),
    "no room for a pair": (
        f"{RTE} --do_train --max_seq_length 7",
        "--max_seq_length 7: a pair of texts needs at least 8 tokens, of which 4 are special ones",
    ),
    "text columns of a GLUE task": (
        f"{RTE} --do_train --text_columns sentence1",
        "--text_columns is for files of your own, not for --task_name",
    ),
    "own: repeated column": (
        f"{TRAIN_OWN}/repeated.csv",
        "repeated.csv: has the column 'label' 2 times; give each column a different name",
    ),
    "own: repeated key": (f"{TRAIN_OWN}/repeated.json", "line 1: has the key 'label' 2 times"),
    "own: more fields than columns": (
        f"{TRAIN_OWN}/shifted.csv",
        "shifted.csv: row 1: has 3 fields, the header names 2 columns",
    ),
    "own: identifiers and numbers": (
        f"{TRAIN_OWN}/ids.csv",
        "has 0 text columns (doc_id is named as an identifier, n is of int64)",
    ),
    "own: objects": (f"{TRAIN_OWN}/object.json", "0 text columns (text is an object in each row)"),
    "own: lists": (
        f"{TRAIN_OWN}/list.json",
        'text is a list of words in each row: write them as one text, such as "a b"',
    ),
    "own: an object in a text column": (
        f"{TRAIN_OWN}/object.json --text_columns text",
        'object.json: row 1: its text is an object, not a text ({"a": "b"})',
    ),
    "own: a list among texts": (
        f"{TRAIN_OWN}/mixed.json",
        'mixed.json: row 2: its text is a list, not a text (["a"])',
    ),
    "own: lists as labels": (
        f"{TRAIN_OWN}/labels.json",
        "labels.json: row 1: its label is a list, not a class or a score",
    ),
    "own: one class": (
        f"{TRAIN_OWN}/class.csv",
        "class.csv: all 24 rows have the label 'yes'; training needs at least two labels",
    ),
    "own: one class to train, more to evaluate": (
        f"{TRAIN_OWN}/class.csv --do_eval --validation_file {{tmp}}/good.csv",
        "class.csv: all 24 rows have the label 'yes'; training needs at least two labels",
    ),
    "own: texts and labels swapped": (
        f"{TRAIN_OWN}/swapped.csv --do_eval --validation_file {{tmp}}/swapped.csv",
        "review has 2 values: if they are swapped, give --text_columns label --label_column review",
    ),
    "own: no text in any row": (
        f"{TRAIN_OWN}/textless_rows.csv --text_columns review",
        "textless_rows.csv: no row has a text in review, so there is nothing to read",
    ),
    "own: one score": (f"{TRAIN_OWN}/constant.csv", "all 24 rows have the label '0.5'"),
    "own: UTF-16": (f"{TRAIN_OWN}/utf16_good.csv", "is UTF-16 text; save it as UTF-8"),
    "own: UTF-16 JSON": (f"{TRAIN_OWN}/utf16_null.json", "is UTF-16 text; save it as UTF-8"),
    "own: no such text column": (
        f"{TRAIN_OWN}/good.csv --text_columns words",
        "good.csv: has no column 'words'; its columns are 'number', 'review', 'label': --text",
    ),
    "own: no such label column": (
        f"{TRAIN_OWN}/good.csv --label_column gold",
        "good.csv: has no column 'gold'",
    ),
    "own: three columns asked for": (
        f"{TRAIN_OWN}/three.csv --text_columns a b c",
        "--text_columns takes one or two different columns",
    ),
    "own: a column twice": (
        f"{TRAIN_OWN}/three.csv --text_columns a a",
        "--text_columns takes one or two different columns",
    ),
    "own: two kinds of labels": (
        f"{TRAIN_OWN}/integers.csv --do_eval --validation_file {{tmp}}/floats.csv",
        "floats.csv; if they are classes, write them without a point, as in 0, 1",
    ),
    "own: two kinds of labels, not all whole": (
        f"{TRAIN_OWN}/scores.csv --do_eval --validation_file {{tmp}}/integers.csv",
        "integers.csv; if all are scores, write them with a point, as in 1.0",
    ),
    "own: no such file": (f"{TRAIN_OWN}/none.csv", "none.csv: no such file"),
    "own: another file type": (f"{TRAIN_OWN}/train.txt", "must end in .csv, .json or .jsonl"),
    "own: no file to evaluate": (
        f"{TRAIN_OWN}/good.csv --do_eval",
        "this run needs --validation_file",
    ),
    "own: header alone": (f"{TRAIN_OWN}/header.csv", "header.csv: holds no examples"),
    "own: empty CSV": (f"{TRAIN_OWN}/zero.csv", "zero.csv: is empty"),
    "own: empty JSON": (f"{TRAIN_OWN}/zero.json", "zero.json: holds no examples"),
    "own: JSON without rows": (f"{TRAIN_OWN}/none.json", "none.json: holds no examples"),
    "own: ragged": (
        f"{TRAIN_OWN}/ragged.csv",
        "ragged.csv: row 2: has 4 fields, the header names 2 columns: a text that holds a comma",
    ),
    "own: broken": (f"{TRAIN_OWN}/broken.json", "broken.json: line 2: is not JSON"),
    "own: no label column": (f"{TRAIN_OWN}/unlabeled.csv", "has no column 'label'"),
    "own: no text": (f"{TRAIN_OWN}/textless.csv", "has 0 text columns (number is of int64)"),
    "own: three texts": (f"{TRAIN_OWN}/three.csv", "has 3 text columns (a, b, c)"),
    "own: other columns": (
        f"{TRAIN_OWN}/good.csv --do_eval --validation_file {{tmp}}/other.csv",
        "other.csv: has no column 'review'; its columns are 'text', 'label': rename the one that "
        "is meant to 'review' in this file",
    ),
    "own: unknown label": (
        f"{TRAIN_OWN}/good.csv --do_eval --validation_file {{tmp}}/unknown.csv",
        "unknown.csv: row 25: unknown label 'perhaps' (expected 'no', 'yes')",
    ),
    "own: blank label": (f"{TRAIN_OWN}/blank.csv", "blank.csv: row 25: has no 'label'"),
    "own: blank score": (f"{TRAIN_OWN}/score.csv", "score.csv: row 2: has no 'label'"),
    "own: null text": (f"{TRAIN_OWN}/null.json", "null.json: row 25: has no 'review'"),
    "own: labels unknown": (
        "--do_eval --validation_file {tmp}/good.csv --apply_lora --lora_r 4 --lora_alpha 8 "
        "--lora_path {tmp}/lone.bin",
        " does not name its labels; give the --train_file",
    ),
    "own: other labels": (
        "--do_eval --validation_file {tmp}/good.csv --apply_lora --lora_path {trained}",
        "good.csv: row 1: unknown label 'yes' (expected 'entailment', 'not_entailment')",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_an_error_of_one_line(
    run_glue, tiny_base, tiny_glue, trained, bad, monkeypatch, capsys, flags, message
):
    if "org/name" in flags:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(bad)
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    files = {"tmp": bad, "glue": tiny_glue, "trained": trained, "base": tiny_base}
    given = [flag.format(**files) for flag in flags.split()]
    arguments = [*common(tiny_base), *given, "--output_dir", bad / "out"]
    line = failure(run_glue, arguments, monkeypatch, capsys)
    assert message.replace("{base}", str(tiny_base)) in line
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before
    assert not list((bad / "out").glob("*"))


@pytest.mark.slow
def test_an_adapter_of_another_family_is_an_error(
    run_glue, tiny_deberta_base, tiny_glue, trained, tmp_path, monkeypatch, capsys
):
    """The error is about the family, not about base, targets or positions, which differ as well."""
    given = ["--task_name", "rte", "--data_dir", tiny_glue, "--do_eval", "--apply_lora"]
    given += ["--lora_path", trained, "--output_dir", tmp_path / "out"]
    line = failure(run_glue, [*common(tiny_deberta_base), *given], monkeypatch, capsys)
    assert (
        "holds an adapter of RoBERTa, but the layers of DeBERTa-v2 are called deberta.encoder"
        in line
    )


@pytest.mark.parametrize(
    ("out", "message"),
    [("full", "is not empty and holds no checkpoint to resume from"), ("file", "file is a file")],
)
def test_an_output_folder_with_other_files_is_an_error(
    run_glue, tiny_base, tiny_glue, bad, monkeypatch, capsys, out, message
):
    arguments = [*common(tiny_base), *on_rte(tiny_glue, bad / out)]
    assert message in failure(run_glue, arguments, monkeypatch, capsys)
    assert (bad / "full" / "thesis.txt").read_text() == (bad / "file").read_text() == "mine"
    assert len(list((bad / "full").iterdir())) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "half/pytorch_model.bin: damaged"),
        (
            ["--lora_alpha", 16],
            "a run with --lora_alpha 8, but this run has 16: give the same",
        ),
        (["--lora_r", 2], "a run with --lora_r 4, but this run has 2: give the same setting to"),
        (
            ["--lora_targets", "key"],
            "built with key (give --lora_targets query value as when the run began, or give",
        ),
        (["--apply_lora", False], "--lora_r needs --apply_lora"),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed_is_left_as_it_is(
    run_glue, trained, tiny_base, tiny_glue, bad, monkeypatch, capsys, flags, message
):
    source = bad / "half" if not flags else trained / "checkpoint-4"
    copied = bad / "resumed" / "checkpoint-4"
    shutil.copytree(source, copied)
    arguments = [*common(tiny_base), *on_rte(tiny_glue, bad / "resumed"), *flags]
    line = failure(run_glue, arguments, monkeypatch, capsys)
    assert message.replace("half", "checkpoint-4") in line
    assert [path.name for path in (bad / "resumed").iterdir()] == ["checkpoint-4"]
    for path in source.iterdir():
        assert (copied / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken_settings.json", "broken_settings.json: not a JSON file"),
        ("settings.json", "unknown settings: task_nane"),
        ("absent.json", "absent.json: No such file"),
    ],
)
def test_errors_in_settings_files(run_glue, bad, monkeypatch, capsys, name, message):
    # torch.distributed.launch adds --local-rank.
    arguments = ["--local-rank=0", bad / name]
    assert message in failure(run_glue, arguments, monkeypatch, capsys)


def test_an_error_during_a_progress_bar_has_its_own_line(
    run_glue, tiny_base, tiny_glue, tmp_path, monkeypatch, capsys
):
    shown = [flag for flag in common(tiny_base) if flag != "--disable_tqdm"]
    flags = ["--learning_rate", "1e30", "--save_steps", 1, "--max_grad_norm", 0]
    flags += ["--disable_tqdm", "false"]  # stderr is not a terminal here
    arguments = [*shown, *on_rte(tiny_glue, tmp_path / "out"), *flags]
    line = failure(run_glue, arguments, monkeypatch, capsys)
    assert "not finite" in line
