"""predict.py: many adapters on one base, from its command line to its file."""

import importlib.util
import io
import json
import random
import shutil
import subprocess
import sys
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from compare import rounding
from encoder_options import ENCODER_TERMS

from loralib.adapters.adapter import Adapter
from loralib.adapters.formats import write_adapter
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaForSequenceClassification,
)
from transformers.utils.cli import run

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "text-classification" / "predict.py"

# Of several ranks, scales, targets and heads; the last one gives scores.
ADAPTERS = {
    "rte": {
        **{"lora_r": 4, "lora_alpha": 8, "lora_targets": ["query", "value"]},
        "id2label": {0: "entailment", 1: "not_entailment"},
    },
    "mnli": {
        **{"lora_r": 2, "lora_alpha": 6, "lora_targets": ["key", "attention_output", "output"]},
        "id2label": {0: "entailment", 1: "neutral", 2: "contradiction"},
    },
    "stsb": {
        **{"lora_r": 3, "lora_alpha": 3, "lora_targets": ["intermediate", "query"]},
        "id2label": {0: "LABEL_0"},
    },
}
FAMILIES = ["roberta", "deberta"]


@pytest.fixture(scope="module")
def predict() -> ModuleType:
    """The script; `predict.main(arguments)` runs it in this process."""
    spec = importlib.util.spec_from_file_location("nlu_tests_predict", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bases(tiny_base, tiny_deberta_base) -> dict[str, Path]:
    return {"roberta": tiny_base, "deberta": tiny_deberta_base}


def adapted(base: Path, settings: dict, seed: int):
    """A model with LoRA and a head that both show in its logits."""
    config = AutoConfig.from_pretrained(base, apply_lora=True, **settings)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(base, config=config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or name in model.newly_initialized:
            parameter.data.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def adapters(bases, tmp_path_factory) -> dict[str, dict[str, Path]]:
    """Files of `ADAPTERS`, by the base's family and their name."""
    folder, files = tmp_path_factory.mktemp("adapters"), {}
    for family, base in bases.items():
        for seed, (name, settings) in enumerate(ADAPTERS.items()):
            path = folder / f"{family}_{name}.safetensors"
            write_adapter(path, adapted(base, settings, seed).adapter())
            files.setdefault(family, {})[name] = path
    return files


def some_lines(count: int = 14) -> list[dict]:
    """Lines for `ADAPTERS` in mixed order, texts and pairs, of several lengths."""
    chance = random.Random(4)
    words = [
        "the",
        "dog",
        "sings",
        "a",
        "quiet",
        "song",
        "under",
        "this",
        "window",
        "and",
        "never",
        "reads",
    ]
    lines = []
    for number in range(count):
        texts = [" ".join(chance.choices(words, k=chance.randint(1, 12))) for _ in range(2)]
        line = {"id": number, "adapter": chance.choice(list(ADAPTERS)), "text": texts[0]}
        lines.append(line | ({"text_pair": texts[1]} if number % 3 else {}))
    return lines


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def alone(base: Path, adapter: Adapter, settings: dict, lines: list[dict]) -> list[torch.Tensor]:
    """Each line's logits from a model that was built with LoRA, a line at a time."""
    config = AutoConfig.from_pretrained(base, apply_lora=True, **settings)
    model = AutoModelForSequenceClassification.from_pretrained(base, config=config)
    model.load_adapters([adapter])
    tokenizer = AutoTokenizer.from_pretrained(base)
    encoded = [
        tokenizer(line["text"], line.get("text_pair"), max_length=60, truncation=True)
        for line in lines
    ]
    with torch.no_grad():
        rows = [{name: torch.tensor([ids]) for name, ids in row.items()} for row in encoded]
        return [model(**row)["logits"][0] for row in rows]


@pytest.fixture(scope="module")
def expected(bases):
    """The answers to `some_lines`, each from its adapter's own model, by family."""

    @cache
    def answers(family: str) -> list[dict]:
        lines = some_lines()
        found: list[dict] = [{}] * len(lines)
        for seed, (name, settings) in enumerate(ADAPTERS.items()):
            adapter = adapted(bases[family], settings, seed).adapter()
            own = [line for line in lines if line["adapter"] == name]
            for line, logits in zip(own, alone(bases[family], adapter, settings, own), strict=True):
                found[line["id"]] = line | as_answer(logits, list(settings["id2label"].values()))
        return found

    return answers


def as_answer(logits: torch.Tensor, labels: list[str]) -> dict:
    if len(labels) == 1:
        return {"score": logits.item()}
    shares = logits.softmax(0)
    named = {label: share.item() for label, share in zip(labels, shares, strict=True)}
    return {"label": labels[int(shares.argmax())], "probabilities": named}


def close(value: float | dict[str, float]):
    largest = max(map(abs, value.values() if isinstance(value, dict) else [value]))
    return pytest.approx(value, abs=rounding(largest, ENCODER_TERMS), rel=0)


def assert_close(found: list[dict], expected: list[dict]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            of_numbers = key in ("probabilities", "score")
            assert ours[key] == (close(value) if of_numbers else value)


def named(files: dict[str, Path], names=tuple(ADAPTERS)) -> list[str]:
    return [f"{name}={files[name]}" for name in names]


def common(base: Path, *paths: Path) -> list[str]:
    """The arguments of a call but for the adapters; with an input and an output file, or none."""
    arguments = ["--model_name_or_path", str(base), "--max_seq_length", "60"]
    for flag, path in zip(("--input_file", "--output_file"), paths, strict=False):
        arguments += [flag, str(path)]
    return arguments


# ---- answers ----


@pytest.mark.parametrize("asked", [True, False])
def test_settings_of_the_device(predict, bases, adapters, tmp_path, device_settings, asked):
    device_settings.write(not asked, not asked, True, False)
    given, out = write(tmp_path / "in.jsonl", some_lines()), tmp_path / "out.jsonl"
    more = ["--tf32"] if asked else []
    predict.main([*common(bases["roberta"], given, out), *more, *named(adapters["roberta"])])
    device_settings.expect(tf32=asked)


@pytest.mark.parametrize("batch_size", [1, 3, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_line_as_its_own_model_answers_it(
    predict, bases, adapters, expected, tmp_path, family, batch_size
):
    given, out = write(tmp_path / "in.jsonl", some_lines()), tmp_path / "out.jsonl"
    arguments = [*common(bases[family], given, out), "--batch_size", str(batch_size)]
    predict.main([*arguments, *named(adapters[family])])
    assert_close(read(out), expected(family))
    # The answers tell the adapters apart, and the labels.
    answers = expected(family)
    assert {line["adapter"] for line in answers} == set(ADAPTERS)
    assert len({line.get("label") for line in answers}) > 2


@pytest.fixture
def loaded(monkeypatch) -> list:
    """The models that are loaded from here on."""
    models, load = [], AutoModelForSequenceClassification.from_pretrained

    def recorded(*args, **kwargs):
        models.append(load(*args, **kwargs))
        return models[-1]

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", recorded)
    return models


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16(predict, bases, adapters, expected, tmp_path, loaded, family):
    answers = expected(family)
    loaded.clear()
    given, out = write(tmp_path / "in.jsonl", some_lines()), tmp_path / "out.jsonl"
    predict.main([*common(bases[family], given, out), "--bf16", *named(adapters[family])])
    differences = [
        abs(ours["probabilities"][label] - share)
        for ours, theirs in zip(read(out), answers, strict=True)
        for label, share in theirs.get("probabilities", {}).items()
    ]
    assert 1e-6 < max(differences) < 0.05
    # As in training: the base is held in half precision, heads are not.
    (model,) = loaded
    assert {parameter.dtype for parameter in model.base_model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.classifier.parameters()} == {torch.float32}


def test_one_base_and_batches_of_several_adapters(
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
    """Numbers are written with the digits that float32 has; padding on the right is no label."""
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
def test_batches(predict, size):
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


# ---- lines ----


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
    """stdout has the answers and nothing else; the hub's adapter is PEFT's format."""
    adapter = adapted(bases["roberta"], ADAPTERS["mnli"], 1).adapter()
    write_adapter(hub_server.root / "someone" / "mnli", adapter, "peft")
    given = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in some_lines())
    arguments = [*named(adapters["roberta"], ["rte", "stsb"]), "mnli=someone/mnli", "--no_cuda"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *common(bases["roberta"]), *arguments],
        env=hub_server.environment(tmp_path / "home"),
        input=given.encode(),
        capture_output=True,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert_close(answers, expected("roberta"))
    assert b"14 lines for 3 adapters" in done.stderr
    assert b"someone/mnli does not say its base's fingerprint: unverified" not in done.stderr


@pytest.mark.parametrize("content", [b"", b"\n \r\n"])
def test_no_lines_are_no_answers(predict, bases, adapters, tmp_path, monkeypatch, capsys, content):
    (tmp_path / "in.jsonl").write_bytes(content)
    arguments = [*common(bases["roberta"]), *named(adapters["roberta"])]
    files = ["--input_file", tmp_path / "in.jsonl", "--output_file", tmp_path / "out.jsonl"]
    predict.main([*arguments, *map(str, files)])
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    predict.main(arguments)
    assert capsys.readouterr().out == ""


def test_blank_lines_at_the_end_are_no_texts(predict, bases, adapters, tmp_path):
    given, out = write(tmp_path / "in.jsonl", some_lines()), tmp_path / "out.jsonl"
    arguments = [*common(bases["roberta"], given, out), *named(adapters["roberta"])]
    predict.main(arguments)
    before = out.read_bytes()
    with given.open("a") as file:
        file.write("\n\n  \n")
    predict.main(arguments)
    assert out.read_bytes() == before


def test_answers_to_cut_texts_are_marked(predict, bases, adapters, tmp_path, caplog):
    # A text of 8 tokens with RoBERTa's two special ones is whole, one of 9 is not.
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
    said = [record.message for record in caplog.records if "cut to" in record.message]
    assert said == [f"texts were cut to {lengths[1]} tokens: 3 of 5 in the input"]


def test_the_usual_length_adapts_itself_to_the_base(predict, bases, adapters, tmp_path, caplog):
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


# ---- adapters of other formats ----


def test_alpha_is_for_those_that_do_not_say_theirs(
    predict, bases, adapters, expected, tmp_path, capsys, caplog
):
    """Beside one that says another."""
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
    assert caplog.text.count("does not say its base's fingerprint: unverified") == 1
    labels = [{**line, "label": "x"} if "label" in line else line for line in expected("roberta")]
    found = [{**line, "label": "x"} if "label" in line else line for line in read(out)]
    # A file that does not say its alpha does not name its labels either.
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
    assert "brings no classifier." in line
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


def test_a_pooler_that_nobody_trained(predict, bases, tmp_path, capsys):
    """PEFT saves DeBERTa's classifier, and not the pooler before it, unless it is told to."""
    whole = adapted(bases["deberta"], {"lora_r": 2, "lora_alpha": 4}, 7).adapter()
    left = {name: t for name, t in whole.tensors.items() if not name.startswith("pooler")}
    write_adapter(tmp_path / "lora.safetensors", Adapter(left, whole.metadata))
    given = write(tmp_path / "in.jsonl", [{"text": "a dog sings"}])
    arguments = common(bases["deberta"], given, tmp_path / "out.jsonl")
    line = failure(predict, [*arguments, f"a={tmp_path / 'lora.safetensors'}"], capsys)
    assert "brings no pooler.dense." in line
    assert not (tmp_path / "out.jsonl").exists()


# ---- what is wrong ----


def failure(predict, arguments: list[str], capsys) -> str:
    """The one line that a call ends with, which must fail."""
    argv = sys.argv
    sys.argv = [str(SCRIPT)]
    try:
        with pytest.raises(SystemExit) as ended:
            run(partial(predict.main, list(map(str, arguments))))
    finally:
        sys.argv = argv
    assert ended.value.code in (1, 2)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert lines[0].startswith("predict.py: error: ")
    return lines[0]


GOOD = '{"adapter": "rte", "text": "a dog"}'
BAD_LINES = {
    "no JSON": ("a dog", "line 2: is not JSON (Expecting value"),
    "blank": ("", "line 2: is blank; only lines at the end may be"),
    "half": (
        '{"adapter": "rte", "text": "a',
        "line 2: is not JSON (Unterminated string starting at)",
    ),
    "no object": ('["rte", "a dog"]', 'line 2: is not a JSON object (["rte", "a dog"])'),
    "no text": ('{"adapter": "rte", "id": 3}', "line 2: has no text"),
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
        'line 2: unknown adapter ["rte"] (expected rte, mnli, stsb)',
    ),
    "no adapter": ('{"text": "a"}', "line 2: does not say its adapter, one of rte, mnli, stsb"),
    **{
        key: (
            f'{{"adapter": "rte", "text": "a", "{key}": 1}}',
            f"line 2: has the key '{key}', which the answer needs: give it another name",
        )
        for key in ("label", "probabilities", "score")
    },
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_one_line(predict, bases, adapters, tmp_path, capsys, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    given = tmp_path / "in.jsonl"
    given.write_bytes(b"\n".join([GOOD.encode(), line, GOOD.encode(), b""]))
    found = failed_untouched(
        predict, capsys, tmp_path, [*common(bases["roberta"], given), *named(adapters["roberta"])]
    )
    assert f"in.jsonl: {message}" in found


def failed_untouched(predict, capsys, folder: Path, arguments: list[str]) -> str:
    """As `failure`, and an output file that was there keeps its content, without another beside."""
    out = folder / "out.jsonl"
    out.write_text("mine")
    before = sorted(folder.iterdir())
    line = failure(predict, [*arguments, "--output_file", str(out)], capsys)
    assert out.read_text() == "mine"
    assert sorted(folder.iterdir()) == before
    return line


BAD_ARGUMENTS = {
    "no adapter": ("", "the following arguments are required: NAME=ADAPTER"),
    "no name and no =": ("{rte}", "is not NAME=ADAPTER"),
    "an empty name": ("={rte}", "is not NAME=ADAPTER"),
    "an empty adapter": ("rte=", "'rte=' is not NAME=ADAPTER"),
    "two of one name": ("rte={rte} rte={mnli}", "two adapters have the name 'rte'"),
    "no such adapter": ("rte={tmp}/none.bin", "none.bin: no such checkpoint file"),
    "no adapter in it": ("rte={tmp}/texts.bin", "texts.bin: damaged"),
    "another family": ("rte={deberta}", "deberta_rte.safetensors: "),
    "another size": ("rte={tmp}/narrow.safetensors", "base of another size"),
    "another base": ("rte={tmp}/other.safetensors", "was trained on another base"),
    "an alpha that is none": ("rte={tmp}/lone.bin --lora_alpha 0", "--lora_alpha"),
    "too long": ("rte={rte} --max_seq_length 65", "--max_seq_length 65: the model has 64"),
    "too short": ("rte={rte} --max_seq_length 0", "--max_seq_length 0"),
    "no room": ("rte={rte} --max_seq_length 3", "a text needs at least 4 tokens"),
    "no batch": ("rte={rte} --batch_size 0", "--batch_size must be at least 1, not 0"),
    "no input": ("rte={rte} --input_file {tmp}/none.jsonl", "none.jsonl"),
    "no model": ("rte={rte} --model_name_or_path {tmp}/none", "none"),
    "an adapted model": (
        "rte={rte} --model_name_or_path {tmp}/adapted",
        "adapted is not a base, its config.json says apply_lora",
    ),
    "a model with bottlenecks": (
        "rte={rte} --model_name_or_path {tmp}/bottlenecks",
        "bottlenecks is not a base, its config.json says apply_adapter",
    ),
    "unknown flag": ("rte={rte} --lora_r 8", "unrecognized arguments: --lora_r"),
}


@pytest.fixture(scope="module")
def bad(bases, make_classifier, tmp_path_factory) -> Path:
    """A folder with the files of `BAD_ARGUMENTS`."""
    folder, rte = tmp_path_factory.mktemp("bad"), ADAPTERS["rte"]
    (folder / "in.jsonl").write_text(GOOD)
    (folder / "texts.bin").write_text("a dog")
    lora = {"apply_lora": True, **rte}
    narrow = make_classifier("roberta", hidden_size=16, **lora)
    write_adapter(folder / "narrow.safetensors", narrow.adapter())
    adapter = adapted(bases["roberta"], rte, 0).adapter()
    write_adapter(folder / "lone.bin", Adapter(adapter.tensors, None))
    shutil.copytree(bases["roberta"], folder / "other")
    other = AutoModelForSequenceClassification.from_pretrained(folder / "other")
    torch.nn.init.normal_(other.roberta.encoder.layer[0].output.dense.weight)
    other.save_pretrained(folder / "other")
    model = adapted(folder / "other", {k: v for k, v in rte.items() if k != "id2label"}, 0)
    write_adapter(folder / "other.safetensors", model.adapter())
    for name, switches in (("adapted", lora), ("bottlenecks", {"apply_adapter": True})):
        config = AutoConfig.from_pretrained(bases["roberta"], **switches)
        shutil.copytree(bases["roberta"], folder / name)
        RobertaForSequenceClassification(config).save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments_are_one_line(
    predict, bases, adapters, bad, tmp_path, capsys, arguments, message
):
    files = {name: adapters["roberta"][name] for name in ("rte", "mnli")}
    words = arguments.format(tmp=bad, deberta=adapters["deberta"]["rte"], **files).split()
    given = [*common(bases["roberta"], bad / "in.jsonl"), *words]
    assert message in failed_untouched(predict, capsys, tmp_path, given)


@pytest.mark.parametrize(
    ("step", "calls", "output"),
    [("answer", 0, "file"), ("answer", 5, "stdout"), ("_encoded", 20, "file")],
)
def test_an_error_on_the_way_leaves_nothing(
    predict, bases, adapters, tmp_path, monkeypatch, capsys, step, calls, output
):
    """The 14 lines are encoded when they are read, and when they are written."""
    given = write(tmp_path / "in.jsonl", some_lines())
    right, made = getattr(predict, step), []

    def fails(*args):
        if len(made) == calls:
            raise OSError("the disk is full")
        made.append(args)
        return right(*args)

    monkeypatch.setattr(predict, step, fails)
    arguments = [*common(bases["roberta"], given), *named(adapters["roberta"])]
    if output == "file":
        line = failed_untouched(predict, capsys, tmp_path, arguments)
    else:
        line = failure(predict, arguments, capsys)
    assert "the disk is full" in line


def test_an_output_that_is_a_folder(predict, bases, adapters, tmp_path, capsys):
    given = write(tmp_path / "in.jsonl", some_lines(1))
    (tmp_path / "out").mkdir()
    arguments = [*common(bases["roberta"], given, tmp_path / "out"), *named(adapters["roberta"])]
    assert "out is a folder" in failure(predict, arguments, capsys)


def test_the_output_s_folder_is_made(predict, bases, adapters, tmp_path):
    given, out = write(tmp_path / "in.jsonl", some_lines(2)), tmp_path / "new" / "out.jsonl"
    predict.main([*common(bases["roberta"], given, out), *named(adapters["roberta"])])
    assert len(read(out)) == 2
