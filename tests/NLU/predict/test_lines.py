"""How predict.py reads lines, truncates texts, and uses adapters without an alpha or a head."""

import io
import json
import shutil
import subprocess
import sys

import pytest
from predictions import (
    ADAPTERS,
    FAMILIES,
    SCRIPT,
    adapted,
    alone,
    as_answer,
    assert_close,
    close,
    common,
    failure,
    named,
    read,
    some_lines,
    write,
)

from loralib.adapters.adapter import Adapter
from loralib.adapters.formats import write_adapter
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer


def test_a_single_adapter_need_not_be_named(predict, bases, adapters, expected, tmp_path):
    lines = [line for line in some_lines() if line["adapter"] == "mnli"]
    unnamed = [{key: line[key] for key in line if key != "adapter"} for line in lines]
    unnamed[0] = {"meta": {"tags": ["ä", None]}, **unnamed[0]}
    given, out = write(tmp_path / "in.jsonl", unnamed), tmp_path / "out.jsonl"
    predict.main([*common(bases["roberta"], given, out), *named(adapters["roberta"], ["mnli"])])
    theirs = [line for line in expected("roberta") if line["adapter"] == "mnli"]
    theirs[0] = theirs[0] | {"meta": {"tags": ["ä", None]}}
    assert_close(read(out), theirs)
    first = read(out)[0]
    assert list(first) == [*unnamed[0], "adapter", "label", "probabilities"]
    assert "ä" in out.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_pipe_and_an_adapter_from_the_hub(bases, adapters, expected, hub_server, tmp_path):
    """stdout has the answers and nothing else; the hub's adapter is in PEFT's format."""
    adapter = adapted(bases["roberta"], ADAPTERS["mnli"], 1).adapter()
    write_adapter(hub_server.root / "someone" / "mnli", adapter, "peft")
    given = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in some_lines())
    arguments = [*named(adapters["roberta"], ["rte", "stsb"]), "mnli=someone/mnli", "--no_cuda"]
    arguments += ["--cache_dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [sys.executable, SCRIPT, *common(bases["roberta"]), *arguments],
        env=hub_server.environment(tmp_path / "home"),
        input=given.encode(),
        capture_output=True,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert_close(answers, expected("roberta"))
    assert list((tmp_path / "cache").rglob("adapter_model.safetensors"))
    assert b"14 lines for 3 adapters" in done.stderr
    assert b"someone/mnli does not record its base's fingerprint: cannot check" not in done.stderr


@pytest.mark.parametrize("content", [b"", b"\n \r\n"])
def test_empty_input_gives_empty_output(
    predict, bases, adapters, tmp_path, monkeypatch, capsys, content
):
    (tmp_path / "in.jsonl").write_bytes(content)
    arguments = [*common(bases["roberta"]), *named(adapters["roberta"])]
    files = ["--input_file", tmp_path / "in.jsonl", "--output_file", tmp_path / "out.jsonl"]
    predict.main([*arguments, *map(str, files)])
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    predict.main(arguments)
    assert capsys.readouterr().out == ""


def test_blank_lines_at_the_end_are_ignored(predict, bases, adapters, tmp_path):
    given, out = write(tmp_path / "in.jsonl", some_lines()), tmp_path / "out.jsonl"
    arguments = [*common(bases["roberta"], given, out), *named(adapters["roberta"])]
    predict.main(arguments)
    before = out.read_bytes()
    with given.open("a") as file:
        file.write("\n\n  \n")
    predict.main(arguments)
    assert out.read_bytes() == before


def test_answers_to_truncated_texts_are_marked(
    predict, bases, adapters, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(predict, "AT_ONCE", 3)
    # A text of 8 tokens, including RoBERTa's two special ones, fits; one of 9 does not.
    tokenizer = AutoTokenizer.from_pretrained(bases["roberta"])
    texts = ["the" + " dog" * count for count in (4, 5, 6, 50)]
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    lines = [{"text": text} for text in texts] + [{"text": texts[0], "text_pair": texts[3]}]
    given, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    arguments = common(bases["roberta"], given, out)
    arguments[arguments.index("60")] = str(lengths[1])
    predict.main([*arguments, f"rte={adapters['roberta']['rte']}"])
    assert lengths[0] < lengths[1] < lengths[2] < lengths[3]
    answers = read(out)
    assert [answer.get("truncated") for answer in answers] == [None, None, True, True, True]
    assert all("label" in answer for answer in answers)
    messages = [record.message for record in caplog.records if "cut to" in record.message]
    assert messages == [f"texts were cut to {lengths[1]} tokens: 3 of 5 in the input"]


def test_the_default_length_is_limited_to_the_base_s_positions(
    predict, bases, adapters, tmp_path, caplog
):
    given, out = write(tmp_path / "in.jsonl", some_lines()), tmp_path / "out.jsonl"
    arguments = common(bases["roberta"], given, out)
    del arguments[2:4]
    with caplog.at_level("INFO"):
        predict.main([*arguments, *named(adapters["roberta"])])
    assert "the model has 64 positions: longer texts are cut to that" in caplog.text


def test_long_texts_are_cut(predict, bases, adapters, tmp_path):
    long = {"text": "dog " * 300, "text_pair": "cat " * 300}
    cut = {"text": "dog " * 290, "text_pair": "cat " * 310}
    given, out = write(tmp_path / "in.jsonl", [long, cut]), tmp_path / "out.jsonl"
    predict.main([*common(bases["roberta"], given, out), *named(adapters["roberta"], ["rte"])])
    answers = read(out)
    assert answers[0]["probabilities"] == close(answers[1]["probabilities"])


def test_an_alpha_equal_to_the_recorded_one_is_accepted(predict, bases, adapters, tmp_path, caplog):
    given, out = write(tmp_path / "in.jsonl", [{"text": "a"}]), tmp_path / "out.jsonl"
    arguments = [*common(bases["roberta"], given, out), *named(adapters["roberta"], ["rte"])]
    with caplog.at_level("INFO"):
        predict.main([*arguments, "--lora_alpha", "8"])
    assert "1 line for 1 adapter, on " in caplog.text
    assert len(read(out)) == 1


def test_alpha_is_for_adapters_that_do_not_record_theirs(
    predict, bases, adapters, expected, tmp_path, capsys, caplog
):
    """Others, which record another alpha, keep their own."""
    files = dict(adapters["roberta"])
    release = tmp_path / "release.bin"
    tensors = adapted(bases["roberta"], ADAPTERS["mnli"], 1).adapter().tensors
    write_adapter(release, Adapter(tensors, None))
    files["mnli"] = release
    given, out = write(tmp_path / "in.jsonl", some_lines()), tmp_path / "out.jsonl"
    arguments = [*common(bases["roberta"], given, out), *named(files)]
    assert "give it as lora_alpha (--lora_alpha)" in failure(predict, arguments, capsys)
    assert not out.exists()
    caplog.clear()
    predict.main([*arguments, "--lora_alpha", "6"])
    assert caplog.text.count("does not record its base's fingerprint: cannot check") == 1
    labels = [{**line, "label": "x"} if "label" in line else line for line in expected("roberta")]
    found = [{**line, "label": "x"} if "label" in line else line for line in read(out)]
    # A file without metadata does not name its labels either.
    for line in labels:
        if line["adapter"] == "mnli":
            shares = line["probabilities"].values()
            line["probabilities"] = {f"LABEL_{n}": share for n, share in enumerate(shares)}
    assert_close(found, labels)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_without_a_head_uses_the_base_s(predict, bases, tmp_path, capsys, family):
    settings = {"lora_r": 2, "lora_alpha": 4, "id2label": {0: "bad", 1: "good", 2: "neither"}}
    model = adapted(bases[family], settings, 7)
    whole = model.adapter()
    lora = {name: tensor for name, tensor in whole.tensors.items() if "lora_" in name}
    path = tmp_path / "lora.safetensors"
    write_adapter(path, Adapter(lora, whole.metadata))
    lines = [{"text": line["text"]} for line in some_lines(5)]
    given, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    line = failure(predict, [*common(bases[family], given, out), f"a={path}"], capsys)
    assert "has no classifier." in line
    assert "there is nothing to predict with" in line
    assert "there is nothing to predict with" in line
    assert not out.exists()

    with_head = tmp_path / "with_head"
    shutil.copytree(bases[family], with_head)
    config = AutoConfig.from_pretrained(bases[family], id2label=settings["id2label"])
    base = AutoModelForSequenceClassification.from_pretrained(bases[family], config=config)
    base.load_state_dict(
        {name: tensor for name, tensor in whole.tensors.items() if name not in lora}, strict=False
    )
    base.save_pretrained(with_head)
    predict.main([*common(with_head, given, out), f"a={path}"])
    logits = alone(bases[family], whole, settings, lines)
    labels = list(settings["id2label"].values())
    answers = [
        {**line, "adapter": "a", **as_answer(row, labels)}
        for line, row in zip(lines, logits, strict=True)
    ]
    assert_close(read(out), answers)


def test_an_adapter_that_lacks_the_pooler_is_refused(predict, bases, tmp_path, capsys):
    """PEFT saves DeBERTa's classifier, but not the pooler before it, unless told to."""
    whole = adapted(bases["deberta"], {"lora_r": 2, "lora_alpha": 4}, 7).adapter()
    left = {name: t for name, t in whole.tensors.items() if not name.startswith("pooler")}
    write_adapter(tmp_path / "lora.safetensors", Adapter(left, whole.metadata))
    given = write(tmp_path / "in.jsonl", [{"text": "a dog sings"}])
    arguments = common(bases["deberta"], given, tmp_path / "out.jsonl")
    line = failure(predict, [*arguments, f"a={tmp_path / 'lora.safetensors'}"], capsys)
    assert "has no pooler.dense." in line
    assert not (tmp_path / "out.jsonl").exists()
