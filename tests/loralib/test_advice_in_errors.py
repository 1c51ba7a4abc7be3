"""Tests that the advice in `add_lora`'s errors works, and of when it warns."""

import ast
import copy
import re

import pytest
import torch
from torch import nn

import loralib as lora

# ---- what errors suggest ----


def with_activations():
    return nn.ModuleDict({"up": nn.Linear(4, 4), "act": nn.ReLU(), "down": nn.Linear(4, 2)})


def with_lora():
    model = with_activations()
    lora.add_lora(model, "up", r=2)
    return model


def with_zeros():
    model = with_activations()
    nn.init.zeros_(model["up"].weight)
    return model


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.down = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.up = nn.Linear(4, 8, bias=False)
        self.up.weight = self.words.weight


# A model, a module that is refused there, the settings, and what to exclude from "*".
REFUSED = {
    "no layer": (with_activations, "act", {}, "act"),
    "adapted": (with_lora, "up", {}, ["up*", "act"]),
    "zeros": (with_zeros, "up", {"variant": "dora"}, ["up", "act"]),
    "tied": (Tied, "up", {}, ["up", "words"]),
}


@pytest.mark.parametrize(("build", "name", "settings", "exclude"), REFUSED.values(), ids=REFUSED)
def test_a_refused_module_is_left_out_of_targets_or_excluded(build, name, settings, exclude):
    settings = {"r": 2, **settings}
    advice = "leave it out of targets, or exclude it if its target matches more modules"
    for targets in ([name, "down"], "*"):
        with pytest.raises((ValueError, TypeError), match=advice):
            lora.add_lora(build(), targets, **settings)
    assert lora.add_lora(build(), ["down"], **settings) == ("down",)
    assert "down" in lora.add_lora(build(), "*", exclude=exclude, **settings)
    with pytest.raises(ValueError, match=f"'{name}' matches only .*: leave it out of targets as"):
        lora.add_lora(build(), [name, "down"], exclude=name, **settings)


class Widths(nn.Module):
    """Layers of the same name and of different widths."""

    def __init__(self):
        super().__init__()
        widths = (8, 8), (8, 4), (4, 2)
        self.layers = nn.ModuleList(nn.ModuleDict({"out": nn.Linear(*pair)}) for pair in widths)


def test_the_suggested_rank_pattern_lowers_ranks_that_are_too_large():
    ranks = {}
    for number, smallest in ((1, 4), (2, 2)):
        name = f"layers.{number}.out"
        message = rf"for {name}, .* {smallest}; lower it, or give rank_pattern=(.*)$"
        with pytest.raises(ValueError, match=message) as caught:
            lora.add_lora(Widths(), "out", r=8, rank_pattern=ranks)
        ranks |= ast.literal_eval(re.search(message, str(caught.value))[1])
    model = Widths()
    lora.add_lora(model, "out", r=8, rank_pattern=ranks)
    assert [layer["out"].r for layer in model.layers] == [8, 4, 2]


def test_a_suggested_regular_expression_matches_one_module_alone():
    def build():
        inner = nn.ModuleDict({"out": nn.Linear(8, 4)}), nn.ModuleDict({"out": nn.Linear(8, 8)})
        outer = {"a": inner[0], "b": nn.ModuleDict({"a": inner[1]}), "a_out": nn.Linear(8, 8)}
        return nn.ModuleDict(outer)

    message = r"for a\.out, .* 4; lower it, or give rank_pattern=(\{re\.compile.*\})$"
    with pytest.raises(ValueError, match=message) as caught:
        lora.add_lora(build(), ["out", "a_out"], r=8)
    ranks = eval(re.search(message, str(caught.value))[1], {"re": re})
    model = build()
    lora.add_lora(model, ["out", "a_out"], r=8, rank_pattern=ranks)
    assert (model["a"]["out"].r, model["b"]["a"]["out"].r, model["a_out"].r) == (4, 8, 8)


@pytest.mark.parametrize("pattern", ["layers.1.out", "out", "*.out", re.compile(r"layers\..*")])
def test_the_error_for_too_large_a_rank_in_rank_pattern_names_the_key(pattern):
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    message = f"whose largest possible rank is 4; lower it in rank_pattern, where '{text}' sets it"
    ranks = {"layers.2.out": 2, pattern: 8, "layers.*": 8}
    with pytest.raises(ValueError, match=re.escape(message)):
        lora.add_lora(Widths(), "out", r=2, rank_pattern=ranks)
    lora.add_lora(Widths(), "out", r=2, rank_pattern={**ranks, pattern: 4})


def test_a_module_without_parameters_in_modules_to_train_is_warned_of(caplog):
    model = nn.ModuleDict({"up": nn.Linear(4, 4), "act": nn.ReLU(), "down": nn.Linear(4, 2)})
    lora.add_lora(model, "up", r=2, modules_to_train=dict.fromkeys(["act", "down"]))
    assert model["down"].weight.requires_grad
    (record,) = caplog.records
    assert record.getMessage().startswith("modules_to_train names act, with no parameters")


def test_a_lazy_layer_is_adapted_once_the_model_has_been_called():
    model = nn.Sequential(nn.LazyLinear(8))
    with pytest.raises(TypeError, match=r"^module 0 has no shape yet: call the model once before"):
        lora.add_lora(model, "0", r=2)
    model(torch.ones(1, 4))
    assert lora.add_lora(model, "0", r=2) == ("0",)


def test_a_copy_of_a_model_of_inference_tensors_is_adapted():
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"adapt a copy of the model, copy\.deepcopy\(model\)$"):
        lora.add_lora(model, "0", r=2)
    assert lora.add_lora(copy.deepcopy(model), "0", r=2) == ("0",)


def test_a_model_built_with_lora_is_made_plain_by_merge():
    model = nn.Sequential(lora.Linear(4, 4, r=2))
    with pytest.raises(ValueError, match=r"^module 0 was built .*: merge makes it plain"):
        lora.remove_lora(model)
    with pytest.raises(ValueError, match=r"^module 0 was built as a LoRA layer: leave it out"):
        lora.add_lora(model, "0", r=2)
    assert type(lora.merge(model)[0]) is nn.Linear


# ---- heads of Hugging Face's models for a task ----


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.dropout, self.out_proj = nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2)


class WordsForSequenceClassification(nn.Module):
    base_model_prefix = "words"

    def __init__(self):
        super().__init__()
        self.words = nn.ModuleDict({"dense": nn.Linear(4, 4), "up": nn.Linear(4, 4)})
        self.pooler, self.dropout, self.classifier = nn.Linear(4, 4), nn.Dropout(), Head()


class WordsForImageClassification(WordsForSequenceClassification):
    pass


class WordsForMultipleChoice(WordsForSequenceClassification):
    pass


class WordsForQuestionAnswering(WordsForSequenceClassification):
    pass


HEADS = [WordsForSequenceClassification, WordsForImageClassification]
HEADS += [WordsForMultipleChoice, WordsForQuestionAnswering]


class WordsForMaskedLM(WordsForSequenceClassification):
    """A model whose head is part of pretrained checkpoints."""


class OwnForSequenceClassification(WordsForSequenceClassification):
    """A model whose base_model_prefix is the name of none of its modules."""

    base_model_prefix = "model"


class AdaptedForSequenceClassification(WordsForSequenceClassification):
    """A model without two of its parts, as `model.pooler = None` leaves it."""

    def __init__(self):
        super().__init__()
        self.pooler = self.classifier = None


def warnings_of_heads(caplog):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("the head of")]


@pytest.mark.parametrize(
    ("targets", "settings", "head"),
    [
        ("up", {}, ["pooler", "classifier"]),
        ("up", {"bias": "all"}, ["pooler", "classifier"]),
        (["dense", "up"], {}, ["pooler", "classifier.out_proj"]),
        (["up", "out_proj", "pooler"], {}, ["classifier.dense"]),
    ],
)
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_stays_frozen_by_default_is_warned_of(caplog, kind, targets, settings, head):
    lora.add_lora(kind(), targets, r=2, **settings)
    (message,) = warnings_of_heads(caplog)
    assert message.startswith(f"the head of the {kind.__name__} stays frozen: if it is new, modu")
    caplog.clear()
    for advice in re.findall(r"modules_to_train=(\[.*?\])", message):
        model, modules = kind(), ast.literal_eval(advice)
        assert modules in (head, [])
        lora.add_lora(model, targets, r=2, **settings, modules_to_train=modules)
        trained = [p.requires_grad for n in modules for p in model.get_submodule(n).parameters()]
        assert all(trained)
    assert not warnings_of_heads(caplog)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        (WordsForMaskedLM, "up"),
        (OwnForSequenceClassification, "up"),
        (WordsForSequenceClassification, ["dense", "up", "out_proj", "pooler"]),
        (AdaptedForSequenceClassification, "up"),
    ],
)
def test_a_head_that_is_adapted_or_not_known_as_one_is_not_warned_of(caplog, kind, targets):
    lora.add_lora(kind(), targets, r=2)
    assert not warnings_of_heads(caplog)


@pytest.mark.parametrize("names", [("student", "teacher"), ("teacher", "student")])
def test_a_frozen_head_within_a_wrapper_is_warned_of_if_its_model_is_adapted(caplog, names):
    models = {"student": WordsForSequenceClassification(), "teacher": WordsForImageClassification()}
    model = nn.ModuleDict({name: models[name] for name in names})
    lora.add_lora(model, "student.words.up", r=2)
    (message,) = warnings_of_heads(caplog)
    assert message.startswith("the head of the WordsForSequenceClassification stays frozen")
    assert "modules_to_train=['student.pooler', 'student.classifier'] trains" in message


def test_a_frozen_head_is_warned_of_once(caplog):
    model = WordsForSequenceClassification()
    lora.add_lora(model, "words.dense", r=2)
    lora.add_lora(model, "up", r=2)
    assert len(warnings_of_heads(caplog)) == 1


# ---- modules whose names are numbers ----


def nested():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


@pytest.mark.parametrize(
    ("targets", "names", "warns"),
    [
        ("0", ("0", "1.0"), True),
        (["0", re.compile("0")], ("0", "1.0"), True),
        ([re.compile("0"), "0"], ("0", "1.0"), True),
        (re.compile("0"), ("0",), False),
        (["0", "1.*"], None, None),
        (["0", "*.0"], ("0", "1.0"), False),
        (["0", "1.0"], ("0", "1.0"), False),
        (["0", "all-linear"], ("0", "1.0"), False),
        ("1.0", ("1.0",), False),
        ("*0", ("0", "1.0"), False),
    ],
)
def test_a_number_as_a_target_is_warned_of_if_it_matches_more(caplog, targets, names, warns):
    if names is None:
        with pytest.raises(TypeError, match=r"^module 1\.1 is a .*ReLU"):
            lora.add_lora(nested(), targets, r=2)
        return
    assert lora.add_lora(nested(), targets, r=2) == names
    warnings = [
        r.getMessage() for r in caplog.records if "every module whose name ends" in r.message
    ]
    assert len(warnings) == warns
    for message in warnings:
        assert message.endswith("here 1.0 as well: re.compile('0') means that one alone")


def test_a_word_as_a_target_may_match_several_modules(caplog):
    model = nn.ModuleDict({"up": nn.Linear(4, 4), "0": nn.ModuleDict({"up": nn.Linear(4, 4)})})
    assert lora.add_lora(model, "up", r=2) == ("up", "0.up")
    assert not caplog.records


def test_a_number_that_is_excluded_or_alone_is_not_warned_of(caplog):
    lora.add_lora(nested(), "0", r=2, exclude="1.0")
    lora.add_lora(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "0", r=2)
    lora.add_lora(nn.ModuleList([nested()]), "0.0", r=2)
    lora.add_lora(nn.ModuleDict({"a": nested(), "b": nn.Sequential(nn.Linear(4, 4))}), "0", r=2)
    assert not caplog.records
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert lora.add_lora(model, ["0", "all-linear"], r=2) == ("0", "1")
    assert "every module whose name ends" not in caplog.text
    message = r"'2' matches no module of the model; it has 0, 1, 1\.0, 1\.1; "
    with pytest.raises(ValueError, match=message):
        lora.add_lora(nested(), "2", r=2)
