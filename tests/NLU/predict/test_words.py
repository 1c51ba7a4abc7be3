"""predict.py tags words as each adapter's own model would."""

import json
import random

import pytest
import torch
from predictions import close, common, failed_untouched, read, write

from loralib.adapters.formats import write_adapter
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

TAGGERS = {
    "ner": {"lora_r": 2, "lora_alpha": 4, "id2label": {0: "O", 1: "B-PER", 2: "I-PER"}},
    "pos": {"lora_r": 4, "lora_alpha": 4, "id2label": dict(enumerate("ABCDE"))},
}


def adapted(base, settings, seed, auto=AutoModelForTokenClassification):
    """A model with LoRA and a head that both show in its logits."""
    config = AutoConfig.from_pretrained(base, apply_lora=True, **settings)
    torch.manual_seed(seed)
    model = auto.from_pretrained(base, config=config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or name in model.newly_initialized:
            parameter.data.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def taggers(bases, tmp_path_factory):
    """The models and files of `TAGGERS`, by the base's family and by name."""
    folder, found = tmp_path_factory.mktemp("taggers"), {}
    for family, base in bases.items():
        for seed, (name, settings) in enumerate(TAGGERS.items()):
            model, path = adapted(base, settings, seed), folder / f"{family}_{name}.safetensors"
            write_adapter(path, model.adapter())
            found.setdefault(family, {})[name] = (model, path)
    return found


def files_of(taggers, family):
    return [f"{name}={path}" for name, (_, path) in taggers[family].items()]


def some_lines(count=9):
    chance = random.Random(3)
    words = ["the", "dog", "sings", "a", "quiet", "song", "teacher", "window", "never", "reads"]
    return [
        {
            "adapter": chance.choice(list(TAGGERS)),
            "tokens": chance.choices(words, k=chance.randint(1, 9)),
            "id": number,
        }
        for number in range(count)
    ]


def alone(model, tokenizer, words):
    """A sentence's tags and their probabilities: each word gets its first token's."""
    start = {"add_prefix_space": True} if hasattr(tokenizer, "add_prefix_space") else {}
    pieces = [tokenizer(f" {word}" if start else word, add_special_tokens=False) for word in words]
    ids, firsts = [tokenizer.cls_token_id], []
    for piece in pieces:
        firsts.append(len(ids))
        ids += piece["input_ids"]
    with torch.no_grad():
        shares = model(torch.tensor([[*ids, tokenizer.sep_token_id]])).logits[0].softmax(-1)
    best = shares[firsts].max(dim=-1)
    names = model.config.id2label
    return [names[int(tag)] for tag in best.indices], best.values.tolist()


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("family", ["roberta", "deberta"])
def test_each_line_is_tagged_as_by_its_adapter_s_own_model(
    predict, bases, taggers, tmp_path, family, batch_size, monkeypatch
):
    monkeypatch.setattr(predict, "AT_ONCE", 4)
    lines, out = some_lines(), tmp_path / "out.jsonl"
    arguments = common(bases[family], write(tmp_path / "in.jsonl", lines), out)
    predict.main([*arguments, "--batch_size", str(batch_size), *files_of(taggers, family)])
    answers, tokenizer = read(out), AutoTokenizer.from_pretrained(bases[family])
    assert [line["adapter"] for line in answers] == [line["adapter"] for line in lines]
    for line, answer in zip(lines, answers, strict=True):
        tags, shares = alone(taggers[family][line["adapter"]][0], tokenizer, line["tokens"])
        assert answer.keys() == {*line, "tags", "probabilities"}
        assert answer["tags"] == tags
        assert dict(enumerate(answer["probabilities"])) == close(dict(enumerate(shares)))
    assert len({tag for answer in answers for tag in answer["tags"]}) > 2


def test_no_lines_are_no_rows(predict):
    """A tokenizer takes an empty list of split words for one row."""
    assert predict.tokenize_words([], None, 16) == ([], [], [])


@pytest.mark.parametrize("family", ["roberta", "deberta"])
def test_words_that_are_cut_off_have_no_tag(predict, bases, taggers, tmp_path, family, monkeypatch):
    monkeypatch.setattr(predict, "AT_ONCE", 1)
    words, out = ["dog"] * 30, tmp_path / "out.jsonl"
    lines = [{"adapter": "ner", "tokens": words}, {"adapter": "ner", "tokens": ["dog"]}]
    given = write(tmp_path / "in.jsonl", lines)
    arguments = ["--model_name_or_path", str(bases[family]), "--max_seq_length", "16"]
    arguments += ["--input_file", str(given), "--output_file", str(out)]
    predict.main([*arguments, *files_of(taggers, family)])
    cut, whole = read(out)
    assert cut["truncated"] is True
    assert "truncated" not in whole
    tags = [tag for tag in cut["tags"] if tag is not None]
    assert 0 < len(tags) < len(words) == len(cut["tags"]) == len(cut["probabilities"])
    assert cut["tags"][len(tags) :] == [None] * (len(words) - len(tags))
    assert [share is None for share in cut["probabilities"]] == [tag is None for tag in cut["tags"]]


BAD_LINES = {
    "a text": (
        {"adapter": "ner", "text": "a dog"},
        "line 2: has no tokens, which the adapters' to",
    ),
    "both": ({"adapter": "ner", "text": "a", "tokens": ["a"]}, "has both tokens and text"),
    "no list": (
        {"adapter": "ner", "tokens": "a dog"},
        "line 2: its tokens are not a list of words",
    ),
    "no words": (
        {"adapter": "ner", "tokens": []},
        "line 2: its tokens are not a list of words ([])",
    ),
    "a number": (
        {"adapter": "ner", "tokens": ["a", 3]},
        "line 2: token 2 is not a word (3)",
    ),
    "a blank": (
        {"adapter": "ner", "tokens": [" "]},
        'line 2: token 1 is not a word (" ")',
    ),
    "an answer": ({"adapter": "ner", "tokens": ["a"], "tags": []}, "has the key 'tags', which the"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_refused(predict, bases, taggers, tmp_path, capsys, line, message):
    given = tmp_path / "in.jsonl"
    good = {"adapter": "ner", "tokens": ["a", "dog"]}
    given.write_text("".join(f"{json.dumps(each)}\n" for each in (good, line, good)))
    arguments = [*common(bases["roberta"], given), *files_of(taggers, "roberta")]
    assert message in failed_untouched(predict, capsys, tmp_path, arguments)


def test_adapters_of_different_heads_are_refused(
    predict, bases, adapters, taggers, tmp_path, capsys
):
    given = write(tmp_path / "in.jsonl", [{"adapter": "rte", "text": "a dog"}])
    arguments = [*common(bases["roberta"], given), f"rte={adapters['roberta']['rte']}"]
    found = failed_untouched(
        predict, capsys, tmp_path, [*arguments, *files_of(taggers, "roberta")[:1]]
    )
    assert "for different heads: sequence_classification" in found
    assert "token_classification" in found


def test_words_for_an_adapter_of_texts_are_refused(predict, bases, adapters, tmp_path, capsys):
    given = write(tmp_path / "in.jsonl", [{"tokens": ["a", "dog"]}])
    arguments = [*common(bases["roberta"], given), f"rte={adapters['roberta']['rte']}"]
    found = failed_untouched(predict, capsys, tmp_path, arguments)
    assert (
        "in.jsonl: line 1: has no text, which the adapters' sequence_classification reads" in found
    )


def test_an_adapter_of_an_unsupported_head_is_refused(predict, bases, tmp_path, capsys):
    lora = {"lora_r": 2, "lora_alpha": 4}
    model = adapted(bases["roberta"], lora, 0, AutoModelForQuestionAnswering)
    write_adapter(tmp_path / "qa.safetensors", model.adapter())
    given = write(tmp_path / "in.jsonl", [{"text": "a dog"}])
    arguments = [*common(bases["roberta"], given), f"qa={tmp_path / 'qa.safetensors'}"]
    found = failed_untouched(predict, capsys, tmp_path, arguments)
    assert (
        "qa.safetensors: is for question_answering, but predict.py has only sequence_class" in found
    )
