"""The ways out that `add_lora` names, followed word by word; what it warns of."""

import ast
import copy
import re

import pytest
import torch
from torch import nn

import loralib as lora

# ---- ways out, as the messages say them ----


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


# A model, a module that is refused there, the settings; and what "*" has to leave out.
REFUSED = {
    "no layer": (with_activations, "act", {}, "act"),
    "adapted": (with_lora, "up", {}, ["up*", "act"]),
    "zeros": (with_zeros, "up", {"variant": "dora"}, ["up", "act"]),
    "tied": (Tied, "up", {}, ["up", "words"]),
}


@pytest.mark.parametrize(("build", "name", "settings", "exclude"), REFUSED.values(), ids=REFUSED)
def test_a_refused_module_is_left_out_of_targets_or_excluded(build, name, settings, exclude):
    settings = {"r": 2, **settings}
    way_out = "leave it out of targets, or exclude it if its target matches more modules"
    for targets in ([name, "down"], "*"):
        with pytest.raises((ValueError, TypeError), match=way_out):
            lora.add_lora(build(), targets, **settings)
    assert lora.add_lora(build(), ["down"], **settings) == ("down",)
    assert "down" in lora.add_lora(build(), "*", exclude=exclude, **settings)
    with pytest.raises(ValueError, match=f"'{name}' matches only .*: leave it out of targets as"):
        lora.add_lora(build(), [name, "down"], exclude=name, **settings)


class Widths(nn.Module):
    """Layers of one name and several widths."""

    def __init__(self):
        super().__init__()
        widths = (8, 8), (8, 4), (4, 2)
        self.layers = nn.ModuleList(nn.ModuleDict({"out": nn.Linear(*pair)}) for pair in widths)


def test_a_rank_that_is_too_large_is_answered_with_one_that_is_not():
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


def test_an_expression_that_is_suggested_means_one_module_alone():
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
def test_a_rank_of_a_pattern_that_is_too_large_is_answered_with_that_pattern(pattern):
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    message = f"whose largest possible rank is 4; lower it in rank_pattern, where '{text}' sets it"
    ranks = {"layers.2.out": 2, pattern: 8, "layers.*": 8}
    with pytest.raises(ValueError, match=re.escape(message)):
        lora.add_lora(Widths(), "out", r=2, rank_pattern=ranks)
    lora.add_lora(Widths(), "out", r=2, rank_pattern={**ranks, pattern: 4})


def test_what_has_nothing_to_train_beside_what_has_is_warned_of(caplog):
    model = nn.ModuleDict({"up": nn.Linear(4, 4), "act": nn.ReLU(), "down": nn.Linear(4, 2)})
    lora.add_lora(model, "up", r=2, modules_to_train=dict.fromkeys(["act", "down"]))
    assert model["down"].weight.requires_grad
    (record,) = caplog.records
    assert record.getMessage().startswith("modules_to_train names act, with no parameters")


def test_a_lazy_layer_is_called_once_before():
    model = nn.Sequential(nn.LazyLinear(8))
    with pytest.raises(TypeError, match=r"^module 0 has no shape yet: call the model once before"):
        lora.add_lora(model, "0", r=2)
    model(torch.ones(1, 4))
    assert lora.add_lora(model, "0", r=2) == ("0",)


def test_an_inference_tensors_model_is_copied():
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"adapt a copy of the model, copy\.deepcopy\(model\)$"):
        lora.add_lora(model, "0", r=2)
    assert lora.add_lora(copy.deepcopy(model), "0", r=2) == ("0",)


def test_what_was_built_with_lora_is_merged():
    model = nn.Sequential(lora.Linear(4, 4, r=2))
    with pytest.raises(ValueError, match=r"^module 0 was built .*: merge makes it plain"):
        lora.remove_lora(model)
    assert type(lora.merge(model)[0]) is nn.Linear


# ---- heads of upstream's models for a task ----


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


class WordsForMaskedLM(WordsForSequenceClassification):
    """Whose head a pretrained checkpoint has."""


class OwnForSequenceClassification(WordsForSequenceClassification):
    """Which does not say what its base is."""

    base_model_prefix = "model"


def said_of_heads(caplog):
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
@pytest.mark.parametrize("kind", [WordsForSequenceClassification, WordsForImageClassification])
def test_a_head_that_stays_frozen_unasked_is_named(caplog, kind, targets, settings, head):
    lora.add_lora(kind(), targets, r=2, **settings)
    (message,) = said_of_heads(caplog)
    assert message.startswith(f"the head of the {kind.__name__} stays frozen: if it is new, modu")
    caplog.clear()
    for way_out in re.findall(r"modules_to_train=(\[.*?\])", message):
        model, modules = kind(), ast.literal_eval(way_out)
        assert modules in (head, [])
        lora.add_lora(model, targets, r=2, **settings, modules_to_train=modules)
        trained = [p.requires_grad for n in modules for p in model.get_submodule(n).parameters()]
        assert all(trained)
    assert not said_of_heads(caplog)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        (WordsForMaskedLM, "up"),
        (OwnForSequenceClassification, "up"),
        (WordsForSequenceClassification, ["dense", "up", "out_proj", "pooler"]),
    ],
)
def test_a_head_that_is_trained_or_not_known_as_one_is_not_warned_of(caplog, kind, targets):
    lora.add_lora(kind(), targets, r=2)
    assert not said_of_heads(caplog)


def test_a_head_is_said_to_be_frozen_once(caplog):
    model = WordsForSequenceClassification()
    lora.add_lora(model, "words.dense", r=2)
    lora.add_lora(model, "up", r=2)
    assert len(said_of_heads(caplog)) == 1


# ---- modules whose names are numbers ----


def nested():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


@pytest.mark.parametrize(
    ("targets", "names", "warns"),
    [
        ("0", ("0", "1.0"), True),
        (["0", re.compile("0")], ("0", "1.0"), True),
        (re.compile("0"), ("0",), False),
        (["0", "1.*"], None, None),
        (["0", "*.0"], ("0", "1.0"), False),
        (["0", "1.0"], ("0", "1.0"), False),
        ("1.0", ("1.0",), False),
        ("*0", ("0", "1.0"), False),
    ],
)
def test_a_number_as_a_target_is_warned_of_where_it_means_more(caplog, targets, names, warns):
    if names is None:
        with pytest.raises(TypeError, match=r"^module 1\.1 is a .*ReLU"):
            lora.add_lora(nested(), targets, r=2)
        return
    assert lora.add_lora(nested(), targets, r=2) == names
    said = [r.getMessage() for r in caplog.records if "every module whose name ends" in r.message]
    assert len(said) == warns
    for message in said:
        assert message.endswith("here 1.0 as well: re.compile('0') means that one alone")


def test_a_number_that_is_excluded_or_alone_is_not_warned_of(caplog):
    lora.add_lora(nested(), "0", r=2, exclude="1.0")
    lora.add_lora(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "0", r=2)
    lora.add_lora(nn.ModuleList([nested()]), "0.0", r=2)
    assert not caplog.records
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert lora.add_lora(model, ["0", "all-linear"], r=2) == ("0", "1")
    assert "every module whose name ends" not in caplog.text
    message = r"'2' matches no module of the model; it has 0, 1, 1\.0, 1\.1; "
    with pytest.raises(ValueError, match=message):
        lora.add_lora(nested(), "2", r=2)
