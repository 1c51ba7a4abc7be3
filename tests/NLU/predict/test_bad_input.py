"""On bad lines and arguments, predict.py prints one line of error and writes nothing."""

import pytest
from predictions import (
    ADAPTERS,
    GOOD,
    adapted,
    common,
    failed_untouched,
    failure,
    named,
    read,
    some_lines,
    write,
)

from loralib.adapters.formats import write_adapter

BAD_LINES = {
    "no JSON": ("a dog", "line 2: is not JSON (Expecting value"),
    "blank": ("", "line 2: is blank; only lines at the end may be blank"),
    "half a line": (
        '{"adapter": "rte", "text": "a',
        "line 2: is not JSON (Unterminated string starting at); a line looks like "
        '{"adapter": "rte", ',
    ),
    "no object": ('["rte", "a dog"]', 'line 2: is not a JSON object (["rte", "a dog"])'),
    "no text": (
        '{"adapter": "rte", "review": "a"}',
        "line 2: has no text, only 'adapter', 'review': give a text as 'text' (a pair as 'text' "
        "and 'text_pair', words to tag as 'tokens'), whatever the column was called in training; "
        'a line looks like {"adapter": "rte", "text": "A dog runs."}',
    ),
    "nothing": ("{}", "line 2: has no text: give a text as 'text' (a pair as "),
    "text of another type": (
        '{"adapter": "rte", "text": 3}',
        "line 2: its text is not a string (3)",
    ),
    "null": ('{"adapter": "rte", "text": null}', "line 2: its text is not a string (null)"),
    "pair of another type": (
        '{"adapter": "rte", "text": "a", "text_pair": ["b"]}',
        'line 2: its text_pair is not a string (["b"])',
    ),
    "no Unicode": ('{"adapter": "rte", "text": "\\ud800"}', "line 2: is not JSON ('utf-8' codec"),
    "no UTF-8": (b'{"adapter": "rte", "text": "\xff"}', "line 2: is not JSON ('utf-8' codec"),
    "nested": ('{"adapter": "rte", "text": "a", "x": ' + "[" * 99999, "line 2: is not JSON ("),
    "unknown adapter": (
        '{"adapter": "rta", "text": "a"}',
        'line 2: unknown adapter "rta" (expected rte, mnli, stsb)',
    ),
    "adapter of another type": (
        '{"adapter": ["rte"], "text": "a"}',
        'line 2: its adapter is not a string (["rte"]), such as "rte", "mnli", "stsb"',
    ),
    "adapter as a number": (
        '{"adapter": 1, "text": "a"}',
        'line 2: its adapter is not a string (1), such as "rte", "mnli", "stsb"',
    ),
    "a key twice": (
        '{"adapter": "rte", "text": "a", "text": "b"}',
        'line 2: has the key \'text\' 2 times, and only one would be read: "a", "b"',
    ),
    "no adapter": ('{"text": "a"}', "line 2: does not name its adapter, one of rte, mnli, stsb"),
    **{
        key: (
            f'{{"adapter": "rte", "text": "a", "{key}": 1}}',
            f"line 2: has the key '{key}', which the answer needs: give it another name",
        )
        for key in ("label", "probabilities", "score")
    },
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_a_one_line_error(predict, bases, adapters, tmp_path, capsys, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    given = tmp_path / "in.jsonl"
    given.write_bytes(b"\n".join([GOOD.encode(), line, GOOD.encode(), b""]))
    found = failed_untouched(
        predict, capsys, tmp_path, [*common(bases["roberta"], given), *named(adapters["roberta"])]
    )
    assert f"in.jsonl: {message}" in found


BAD_ARGUMENTS = {
    "no adapter": ("", "the following arguments are required: NAME=ADAPTER"),
    "no name and no =": ("{rte}", "is not NAME=ADAPTER"),
    "an empty name": ("={rte}", "is not NAME=ADAPTER"),
    "an empty adapter": ("rte=", "'rte=' is not NAME=ADAPTER"),
    "a name twice": ("rte={rte} rte={mnli}", "two adapters have the name 'rte'"),
    "no such adapter": ("rte={tmp}/none.bin", "none.bin: no such checkpoint file"),
    "no adapter in it": ("rte={tmp}/texts.bin", "texts.bin: damaged"),
    "another family": (
        "rte={deberta}",
        "deberta_rte.safetensors: holds an adapter of DeBERTa-v2, but the layers of RoBERTa are",
    ),
    "another size": ("rte={tmp}/narrow.safetensors", "base of another size"),
    "another base": ("rte={tmp}/other.safetensors", "was trained on another base"),
    "another alpha than recorded": (
        "rte={rte} mnli={mnli} --lora_alpha 8",
        "was trained with alpha 6, but lora_alpha is 8: give 6, or leave lora_alpha out (--lora_a",
    ),
    "two labels of one name": ("rte={tmp}/twins.safetensors", "has two labels named yes"),
    "an alpha of 0": ("rte={tmp}/lone.bin --lora_alpha 0", "--lora_alpha must be"),
    "a model as an adapter": (
        "rte={base}",
        "is a model without LoRA, not an adapter",
    ),
    "a model's file as an adapter": (
        "rte={base}/pytorch_model.bin",
        "pytorch_model.bin: is a model without LoRA, not an adapter",
    ),
    "a folder as the input": ("rte={rte} --input_file {tmp}", "is a folder"),
    "too long": ("rte={rte} --max_seq_length 65", "--max_seq_length 65: the model has 64"),
    "too short": ("rte={rte} --max_seq_length 0", "--max_seq_length must be at"),
    "no room": ("rte={rte} --max_seq_length 3", "a text needs at least 4 tokens"),
    "no batch": ("rte={rte} --batch_size 0", "--batch_size must be at least 1, not 0"),
    "no input": ("rte={rte} --input_file {tmp}/none.jsonl", "none.jsonl"),
    "no model": ("rte={rte} --model_name_or_path {tmp}/none", "none"),
    "an adapted model": (
        "rte={rte} --model_name_or_path {tmp}/adapted",
        "adapted is not a base: its config.json has apply_lora",
    ),
    "a model with bottlenecks": (
        "rte={rte} --model_name_or_path {tmp}/bottlenecks",
        "bottlenecks is not a base: its config.json has apply_adapter",
    ),
    "unknown flag": ("rte={rte} --lora_r 8", "unrecognized arguments: --lora_r"),
    "run_glue.py's flag": ("rte={rte} --lora_path x", "as NAME=ADAPTER"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments_are_a_one_line_error(
    predict, bases, adapters, bad, tmp_path, capsys, arguments, message
):
    files = {name: adapters["roberta"][name] for name in ("rte", "mnli")}
    files |= {"base": bases["roberta"], "deberta": adapters["deberta"]["rte"], "tmp": bad}
    words = [word.format(**files) for word in arguments.split()]
    given = [*common(bases["roberta"], bad / "in.jsonl"), *words]
    assert message in failed_untouched(predict, capsys, tmp_path, given)


@pytest.mark.parametrize(
    ("step", "calls", "output"),
    [("answer", 0, "file"), ("answer", 5, "stdout"), ("_encoded", 20, "file")],
)
def test_an_error_midway_leaves_no_output(
    predict, bases, adapters, tmp_path, monkeypatch, capsys, step, calls, output
):
    """Each of the 14 lines is encoded once when read, and once when written."""
    given = write(tmp_path / "in.jsonl", some_lines())
    original, made = getattr(predict, step), []

    def fails(*args):
        if len(made) == calls:
            raise OSError("the disk is full")
        made.append(args)
        return original(*args)

    monkeypatch.setattr(predict, step, fails)
    arguments = [*common(bases["roberta"], given), *named(adapters["roberta"])]
    if output == "file":
        line = failed_untouched(predict, capsys, tmp_path, arguments)
    else:
        line = failure(predict, arguments, capsys)
    assert "the disk is full" in line


def test_an_output_that_is_the_input_is_refused(predict, bases, adapters, tmp_path, capsys):
    given = write(tmp_path / "in.jsonl", some_lines(1))
    arguments = [*common(bases["roberta"], given, given), *named(adapters["roberta"])]
    assert "in.jsonl: is an input as well" in failure(predict, arguments, capsys)
    assert len(read(given)) == 1


def test_an_output_that_is_a_folder_is_refused(predict, bases, adapters, tmp_path, capsys):
    given = write(tmp_path / "in.jsonl", some_lines(1))
    (tmp_path / "out").mkdir()
    arguments = [*common(bases["roberta"], given, tmp_path / "out"), *named(adapters["roberta"])]
    assert "out is a folder" in failure(predict, arguments, capsys)


def test_the_output_s_folder_is_created(predict, bases, adapters, tmp_path):
    given, out = write(tmp_path / "in.jsonl", some_lines(2)), tmp_path / "new" / "out.jsonl"
    predict.main([*common(bases["roberta"], given, out), *named(adapters["roberta"])])
    assert len(read(out)) == 2


@pytest.mark.parametrize(
    ("columns", "line", "message"),
    [
        (
            ("premise", "claim"),
            2,
            "has no text_pair, but {} was trained on rows of premise and claim",
        ),
        (("review",), 1, "has a text_pair, but {} was trained on rows of review"),
    ],
)
def test_single_texts_for_an_adapter_of_pairs_and_the_reverse_are_refused(
    predict, bases, tmp_path, capsys, columns, line, message
):
    path = tmp_path / "rte.safetensors"
    settings = {**ADAPTERS["rte"], "text_columns": columns}
    write_adapter(path, adapted(bases["roberta"], settings, 0).adapter())
    pair = {"adapter": "rte", "text": "a dog", "text_pair": "a cat"}
    given = write(tmp_path / "in.jsonl", [pair, {"adapter": "rte", "text": "a dog"}])
    arguments = [*common(bases["roberta"], given), f"rte={path}"]
    found = failed_untouched(predict, capsys, tmp_path, arguments)
    assert f"in.jsonl: line {line}: {message.format(path)}" in found
    # Without the other line there is nothing wrong.
    write(given, [pair] if line == 2 else [{"adapter": "rte", "text": "a dog"}])
    predict.main([*map(str, arguments), "--output_file", str(tmp_path / "out.jsonl")])
    assert len(read(tmp_path / "out.jsonl")) == 1
