"""predict.py answers each line as its adapter's own model would, in mixed batches too."""

import os
import random
import threading
from functools import partial
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
import torch
from predictions import ADAPTERS, FAMILIES, assert_close, common, named, read, some_lines, write

from transformers import AutoModelForSequenceClassification, RobertaForSequenceClassification


@pytest.mark.parametrize("asked", [True, False])
def test_tf32_follows_its_flag(predict, bases, adapters, tmp_path, device_settings, asked):
    device_settings.write(not asked, not asked, True, False)
    given, out = write(tmp_path / "in.jsonl", some_lines()), tmp_path / "out.jsonl"
    more = ["--tf32"] if asked else []
    predict.main([*common(bases["roberta"], given, out), *more, *named(adapters["roberta"])])
    device_settings.expect(tf32=asked)


@pytest.mark.parametrize("batch_size", [1, 3, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_line_is_answered_as_by_its_adapter_s_own_model(
    predict, bases, adapters, expected, tmp_path, family, batch_size
):
    given, out = write(tmp_path / "in.jsonl", some_lines()), tmp_path / "out.jsonl"
    arguments = [*common(bases[family], given, out), "--batch_size", str(batch_size)]
    predict.main([*arguments, *named(adapters[family])])
    assert_close(read(out), expected(family))
    # The expected answers differ between adapters, and between labels.
    answers = expected(family)
    assert {line["adapter"] for line in answers} == set(ADAPTERS)
    assert len({line.get("label") for line in answers}) > 2


@pytest.fixture
def loaded(monkeypatch) -> list:
    """A list of the models that are loaded during the test."""
    models, load = [], AutoModelForSequenceClassification.from_pretrained

    def recorded(*args, **kwargs):
        models.append(load(*args, **kwargs))
        return models[-1]

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", recorded)
    return models


@pytest.mark.parametrize(("flags", "dtype"), [(["--bf16"], torch.bfloat16), ([], torch.float32)])
def test_the_base_is_loaded_in_its_final_dtype(
    predict, bases, adapters, tmp_path, monkeypatch, flags, dtype
):
    """Weights that a file has in this dtype are then mapped; see tests/NLU/test_mapped_base.py."""
    asked, load = [], AutoModelForSequenceClassification.from_pretrained

    def recorded(*args, held_in, **kwargs):
        asked.append(held_in)
        return load(*args, held_in=held_in, **kwargs)

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", recorded)
    given, out = write(tmp_path / "in.jsonl", some_lines()), tmp_path / "out.jsonl"
    base, own = bases["roberta"], named(adapters["roberta"])
    predict.main([*common(base, given, out), *flags, *own])
    assert asked == [dtype]


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_answers_differ_by_rounding_alone(
    predict, bases, adapters, expected, tmp_path, loaded, family, monkeypatch
):
    answers, chosen = expected(family), []
    loaded.clear()
    given, out = write(tmp_path / "in.jsonl", some_lines()), tmp_path / "out.jsonl"
    monkeypatch.setattr(predict, "choose_products", lambda *a, **how: chosen.append((a[1], how)))
    predict.main([*common(bases[family], given, out), "--bf16", *named(adapters[family])])
    assert chosen == [(torch.bfloat16, {"world_size": 1, "backward": False})]
    differences = [
        abs(ours["probabilities"][label] - share)
        for ours, theirs in zip(read(out), answers, strict=True)
        for label, share in theirs.get("probabilities", {}).items()
    ]
    # bfloat16 has steps of 2^-8: the mean error is a few of them, and more at some logits.
    assert 1e-6 < fmean(differences) < 4 * 2**-8
    # As in training, the base is in half precision, and heads are not.
    (model,) = loaded
    assert {parameter.dtype for parameter in model.base_model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.classifier.parameters()} == {torch.float32}


def test_one_base_computes_batches_of_several_adapters(
    predict, bases, adapters, tmp_path, loaded, monkeypatch
):
    shapes, compute = [], RobertaForSequenceClassification.forward

    def recorded(self, input_ids, **others):
        shapes.append(tuple(input_ids.shape))
        return compute(self, input_ids, **others)

    monkeypatch.setattr(RobertaForSequenceClassification, "forward", recorded)
    given, out = write(tmp_path / "in.jsonl", some_lines()), tmp_path / "out.jsonl"
    arguments = [*common(bases["roberta"], given, out), "--batch_size", "6"]
    predict.main([*arguments, *named(adapters["roberta"])])
    assert len(loaded) == 1
    assert [rows for rows, _ in shapes] == [6, 6, 2]
    lengths = [length for _, length in shapes]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) == 3


def test_answers_of_a_row(predict):
    """Numbers have the digits of float32; columns of padding get no label."""
    logits = np.array([1, 2.5, 0, -np.inf], "float32")
    found = predict.answer(logits, ("a", "b", "c"))
    assert found["label"] == "b"
    assert list(found["probabilities"]) == ["a", "b", "c"]
    shares = list(found["probabilities"].values())
    assert np.array_equal(np.array(shares, "float32"), torch.tensor(logits[:3]).softmax(0).numpy())
    assert max(len(f"{share}") for share in shares) <= len("0.") + 9
    score = np.array([3.2, -np.inf], "float32")
    assert predict.answer(score, ("LABEL_0",)) == {"score": 3.2}


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_batches_hold_rows_of_similar_length_grouped_by_adapter(predict, size):
    chance = random.Random(size)
    lengths = [chance.randint(1, 9) for _ in range(23)]
    adapters = [chance.choice("abc") for _ in lengths]
    made = list(predict.batches(lengths, adapters, size))
    assert sorted(index for batch in made for index in batch) == list(range(23))
    assert all(len(batch) == size for batch in made[:-1])
    for batch, following in pairwise(made):
        assert min(lengths[i] for i in batch) >= max(lengths[i] for i in following)
    for batch in made:
        assert [adapters[i] for i in batch] == sorted(adapters[i] for i in batch)


def test_adapters_may_stand_anywhere_among_the_flags(predict):
    words = ["a=x/y", "--model_name_or_path", "base", "b=1=2", "--bf16", "c=z", "--lora_alpha", "8"]
    args = predict.parse_arguments(words)
    assert args.adapters == {"a": "x/y", "b": "1=2", "c": "z"}
    assert (args.model_name_or_path, args.bf16, args.lora_alpha) == ("base", True, 8)
    assert (args.input_file, args.output_file) == ("-", "-")
    assert (args.batch_size, args.max_seq_length) == (32, None)


@pytest.mark.parametrize(
    ("lines", "expected_warnings"),
    [
        ([{"text": ""}, {"text": "a"}, {"text": " "}], ["2 of 3 rows have an empty text, row 1"]),
        ([{"text": "a", "text_pair": ""}], ["1 of 1 rows have an empty text_pair, row 1 first"]),
        ([{"text": "a"}], []),
    ],
)
def test_empty_texts_are_counted(
    predict, bases, adapters, tmp_path, caplog, lines, expected_warnings
):
    given, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    predict.main([*common(bases["roberta"], given, out), f"rte={adapters['roberta']['rte']}"])
    assert len(read(out)) == len(lines)
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == len(expected_warnings)
    for message, part in zip(warned, expected_warnings, strict=True):
        assert f"in.jsonl: {part}" in message


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no such files")
def test_an_input_may_be_a_pipe_or_a_device(predict, bases, adapters, tmp_path):
    """A pipe is what a shell makes of <(…); the device is always empty."""
    (tmp_path / "link").symlink_to(os.devnull)
    out = tmp_path / "out.jsonl"
    given = f"rte={adapters['roberta']['rte']}"
    predict.main([*common(bases["roberta"], tmp_path / "link", out), given])
    assert out.read_bytes() == b""
    os.mkfifo(tmp_path / "pipe")
    write_line = partial((tmp_path / "pipe").write_text, '{"text": "a dog"}\n')
    writer = threading.Thread(target=write_line, daemon=True)  # blocks until the pipe is read
    writer.start()
    predict.main([*common(bases["roberta"], tmp_path / "pipe", out), given])
    writer.join(60)
    assert [line["text"] for line in read(out)] == ["a dog"]
