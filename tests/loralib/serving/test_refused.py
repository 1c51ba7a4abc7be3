"""Tests that a bank refuses names, rows and adapters that do not fit, and then changes nothing."""

import contextlib
import copy
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from bank_models import (
    LAYER,
    TRAINED,
    WIDTH,
    close,
    hooks_of,
    make_adapter,
    make_batch,
    model_of,
    refuses,
)
from torch import nn

import loralib as lora
from loralib.adapters.adapter import Adapter
from loralib.adapters.fingerprint import fingerprint
from loralib.adapters.metadata import LoraMetadata
from loralib.errors import CheckpointError
from loralib.nn.packing import PackedRows
from loralib.nn.routing import in_effect
from loralib.serving.bank import Block
from transformers.adapter_kinds import BITFIT, BOTTLENECK, BiasMetadata, BottleneckMetadata


def test_a_model_with_lora_of_its_own_is_refused(model_class):
    with refuses(ValueError, f"{LAYER[model_class]} has LoRA already"):
        lora.AdapterBank(model_class(TRAINED["a"]))


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        ("x", ["no adapter 'x', only a, b, c, d, e"]),
        (["a", "x", "b"], ["no adapter 'x', only a, b, c, d, e"]),
        ("", ["no adapter ''"]),
        ([], ["no adapter is named; the bank has a, b, c, d, e"]),
        ((), ["no adapter is named"]),
        (1, ["a list of one for each row, got 1"]),
        (None, ["a list of one for each row, got None"]),
        (["a", 1], [r"for each row, got \['a', 1\]"]),
        ([["a"]], [r"for each row, got \[\['a'\]\]"]),
        ({"a", "b"}, ["for each row, got {'"]),
        (torch.ones(2), [r"for each row, got tensor\(\["]),
    ],
)
def test_unknown_and_invalid_names_are_refused(bank, model, names, parts):
    with refuses(ValueError, *parts), bank.use(names):
        pytest.fail("the block began")
    assert in_effect() is None
    assert lora.AdapterBank(model).names == ()
    with refuses(ValueError, "no adapter 'a': the bank is empty"):
        lora.AdapterBank(model).remove("a")
    empty = lora.AdapterBank(model)
    with refuses(ValueError, "no adapter is named; the bank has none"), empty.use([]):
        pytest.fail("the block began")


@pytest.mark.parametrize("name", [1, None, 1.5, "", b"a", ["a"], ("a",)])
def test_a_name_that_is_not_a_string_is_refused(bank, model, model_class, name):
    adapter = make_adapter(model_class, "a")
    new = lora.AdapterBank(model)
    with refuses(ValueError, "name has to be a string, not empty, got "):
        new.add(name, adapter)
    assert new.names == ()
    for asked in (bank.remove, bank.labels):
        with refuses(ValueError, "there is no adapter ", "only a, b, c, d, e"):
            asked(name)


def test_a_use_that_is_not_entered_is_warned_of(bank, caplog):
    bank.use("a")
    (record,) = caplog.records
    assert "by itself has no effect: write `with bank.use(…):`" in record.getMessage()


@torch.no_grad()
def test_uses_that_are_not_warned_of(bank, model, model_class, caplog):
    batch = make_batch([3, 2])

    @bank.use("a")
    def answer():
        return model(**batch)

    for _ in range(2):  # each call enters a new block
        close(answer(), model_of(model_class, "a")(**batch))
    block = bank.use("b")
    with block:
        close(model(**batch), model_of(model_class, "b")(**batch))
        with refuses(ValueError, "entered only once: call use again"), block:
            pytest.fail("the block began again")
        close(model(**batch), model_of(model_class, "b")(**batch))
    for names, message in ((1, "a list of one for each row"), ("x", "no adapter 'x'")):
        with refuses(ValueError, message), bank.use(names):
            pytest.fail("the block began")
    with contextlib.ExitStack() as stack:
        stack.enter_context(bank.use("a"))
    Block.__new__(Block)
    assert in_effect() is None
    del answer, block
    assert not [each for each in caplog.records if "no effect" in each.getMessage()]


def test_a_block_is_silent_when_the_interpreter_ends():
    lines = [
        "import torch, loralib as lora",
        "bank = lora.AdapterBank(torch.nn.Sequential(torch.nn.Linear(2, 2)))",
        "kept, of_module, lora.kept = bank.use('a'), {'a': bank.use('a')}, bank.use('a')",
        "torch.kept = bank.use('a')",
    ]
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert "ignored" not in ended.stderr  # "Exception ignored in: …"


def generator():
    yield


async def coroutine():
    pass


async def asynchronous_generator():
    yield


class CalledLater:
    async def __call__(self):
        pass


@pytest.mark.parametrize(
    "function", [generator, coroutine, asynchronous_generator, partial(generator), CalledLater()]
)
def test_generators_and_coroutines_cannot_be_decorated(bank, caplog, function):
    with refuses(
        ValueError,
        f"{getattr(function, '__name__', 'the function')} is a generator or a coroutine",
        "inside it, around no yield",
    ):
        bank.use("a")(function)
    assert not caplog.records  # no warning that the refused block has no effect


def test_a_block_that_was_not_entered_cannot_be_exited(bank):
    block = bank.use("a")
    with pytest.raises(RuntimeError, match="was not entered"):
        block.__exit__(None, None, None)
    with block:
        pass


def test_exchanged_arguments_are_refused(bank, model_class):
    adapter = make_adapter(model_class, "a")
    with refuses(TypeError, "the name comes first"):
        bank.add(adapter, "f")
    with refuses(TypeError, "adapter 'f' has to be what lora.read_adapter", "returns, got "):
        bank.add("f", model_class(TRAINED["a"]))
    with refuses(ValueError, "there is no adapter Adapter"):
        bank.remove(adapter)


def test_a_path_is_refused_as_an_adapter(model):
    bank = lora.AdapterBank(model)
    with refuses(TypeError, "adapter 'a'", "lora.read_adapter", "got 'f'"):
        bank.add("a", "f")
    assert bank.names == ()


@pytest.mark.parametrize("names", [["a", "b"], ["a", "a"], ["a"], ["b"] * 4])
def test_another_number_of_rows_is_refused(bank, model, names):
    with refuses(ValueError, "3", str(len(names)), "row"), bank.use(names):
        model(**make_batch([2, 4, 1]))
    assert in_effect() is None


def test_a_layer_s_input_with_another_number_of_rows_is_refused(bank, model, model_class):
    layer = model.get_submodule(LAYER[model_class])
    for shape in [(5, WIDTH), (WIDTH,), (2, 3, WIDTH)]:
        x = torch.randn(shape)
        with (
            refuses(ValueError, "given for 3 rows, but a layer received"),
            bank.use(["a", "b", "a"]),
        ):
            layer(x)
        with bank.use("a"):
            assert layer(x).shape[:-1] == x.shape[:-1]
    with refuses(ValueError, "given for 8 rows, but a layer received"), bank.use(["a"] * WIDTH):
        layer(torch.randn(WIDTH))  # one row, with as many features
    with refuses(ValueError, "given for 3 rows of 7 tokens"), bank.use(["a", "b", "a"]):
        PackedRows(make_batch([2, 4, 1])["mask"]).routed()
        layer(torch.randn(6, WIDTH))


def changed(**tensors):
    """Replaces tensors by name, with two underscores for each dot. None removes one."""

    def change(adapter):
        new = {**adapter.tensors, **{n.replace("__", "."): t for n, t in tensors.items()}}
        return replace(adapter, tensors={n: t for n, t in new.items() if t is not None})

    return change


def with_metadata(**info):
    return lambda adapter: replace(adapter, metadata=replace(adapter.metadata, **info))


def of_kind(kind, info):
    return lambda adapter: replace(adapter, kind=kind, metadata=info)


def with_update(name):
    A, B = torch.ones(2, WIDTH), torch.ones(WIDTH, 2)
    return changed(**{f"{name}.lora_A": A, f"{name}.lora_B": B})


def with_nan(adapter):
    name = next(name for name in adapter.tensors if name.endswith("lora_B"))
    tensor = adapter.tensors[name].clone()
    tensor[0, 0] = float("nan")
    return changed(**{name: tensor})(adapter)


MERGE = "merge it into its base"
MISFITS = {
    "bottleneck": (
        of_kind(BOTTLENECK, BottleneckMetadata(adapter_type="houlsby", adapter_size=2)),
        ["holds adapter weights, but a bank takes only LoRA", "apply_adapter"],
    ),
    "bitfit": (of_kind(BITFIT, BiasMetadata()), ["holds BitFit weights", "apply_bitfit"]),
    "a copy of bitfit's": (of_kind(copy.deepcopy(BITFIT), BiasMetadata()), ["holds BitFit we"]),
    "biases": (with_metadata(bias="lora_only"), ["brings biases of its own", MERGE]),
    "trained_with": (
        with_metadata(trained_with=("apply_bitfit",)),
        ["apply_bitfit as well", MERGE],
    ),
    "no info": (lambda adapter: replace(adapter, metadata=None), ["give it as lora_alpha"]),
    "other base": (
        with_metadata(base="their/base", base_fingerprint="feed" * 4),
        ["another base", "'their/base'", "feedfeedfeedfeed"],
    ),
    "labels": (
        with_metadata(labels=("a", "b", "c")),
        ["names 3 labels, but its head has 2 outputs"],
    ),
    "not finite": (with_nan, ["lora_B holds values that are not finite"]),
    "head not finite": (
        changed(classifier__out_proj__bias=torch.tensor([0.0, float("inf")])),
        [r"classifier\.out_proj\.bias holds values that are not finite"],
    ),
    "no such module": (with_update("elsewhere.query"), [r"no elsewhere\.query"]),
    "no linear module": (with_update("roberta.embed"), ["embed"]),
    "another width": (
        changed(**{"roberta.layer.0.query.lora_A": torch.ones(2, WIDTH + 1)}),
        ["0.query"],
    ),
    "half an update": (changed(**{"classifier.dense.lora_A": torch.ones(2, 8)}), ["other half"]),
    "something else of LoRA's": (
        changed(**{"roberta.layer.0.query.lora_magnitude": torch.ones(8)}),
        ["query.lora_magnitude belongs neither to LoRA nor to a head", MERGE],
    ),
    "a backbone's": (
        changed(**{"roberta.layer.0.query.bias": torch.ones(8)}),
        [r"query\.bias belongs neither to LoRA nor to a head", MERGE],
    ),
    "GPT-2's backbone": (
        changed(**{"transformer.h.0.attn.c_attn.bias": torch.ones(24)}),
        [r"c_attn\.bias belongs neither"],
    ),
    "no such head": (changed(score__weight=torch.ones(2, 8)), ["no 'score', to which"]),
    "no module at all": (changed(scale=torch.ones(2)), ["no 'scale', to which"]),
    "half a head": (changed(classifier__dense__bias=None), [r"lacks classifier\.dense\.bias"]),
    "more than a head": (
        changed(classifier__norm__bias=torch.ones(8)),
        [r"its head has classifier\.norm\.bias, which the model\'s head lacks"],
    ),
    "an update of its head": (
        with_update("classifier.dense"),
        [r"has LoRA in classifier and also the full tensor classifier\.dense\.weight: a", MERGE],
    ),
    "head of another shape": (
        changed(classifier__dense__weight=torch.ones(6, 8)),
        [r"classifier\.dense\.weight is \(6, 8\) in the file, but \(8, 8\) is needed"],
    ),
    "projection of another width": (
        changed(classifier__out_proj__weight=torch.ones(2, 7)),
        [r"out_proj\.weight is \(2, 7\) in the file, but \(2, 8\) is needed"],
    ),
    "bias of another number of labels": (
        changed(classifier__out_proj__bias=torch.ones(3)),
        [r"out_proj\.bias is \(3,\) in the file, but \(2,\) is needed"],
    ),
    "a projection of no outputs": (
        changed(classifier__out_proj__weight=torch.ones(0, 8)),
        [r"out_proj\.weight is \(0, 8\) in the file, but \(3, 8\) is needed"],
    ),
    "a projection that is none": (
        changed(classifier__out_proj__weight=torch.ones(2)),
        [r"out_proj\.weight is \(2,\) in the file, but \(3, 8\) is needed"],
    ),
}


@torch.no_grad()
@pytest.mark.parametrize(("change", "parts"), MISFITS.values(), ids=MISFITS)
def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(
    model, model_class, change, parts
):
    bank, batch = lora.AdapterBank(model), make_batch([3, 2])
    bank.add("b", make_adapter(model_class, "b"))
    hooks, state = hooks_of(model), copy.deepcopy(model.state_dict())
    sound = make_adapter(model_class, "a")
    with refuses(CheckpointError, r"a\.safetensors: ", *parts):
        bank.add("a", change(sound))
    assert bank.names == ("b",)
    assert hooks_of(model) == hooks
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    with bank.use("b"):
        close(model(**batch), model_of(model_class, "b")(**batch))
    bank.add("a", sound)
    with bank.use("a"):
        close(model(**batch), model_of(model_class, "a")(**batch))


def test_an_adapter_whose_base_has_another_fingerprint_is_refused(model, model_class):
    """A copy in bfloat16 has the same fingerprint. One in float16 has none, and is accepted.

    Each adapter is compared with the model as it is then.
    """
    own = fingerprint(model.state_dict())
    same = make_adapter(model_class, "a", base_fingerprint=own)
    other = make_adapter(model_class, "a", base_fingerprint="feed" * 4)
    for dtype in (torch.float32, torch.bfloat16):
        base = copy.deepcopy(model).to(dtype)
        bank = lora.AdapterBank(base)
        bank.add("same", same)
        with refuses(CheckpointError, "another base", own):
            bank.add("other", other)
        assert bank.names == ("same",)
        nn.init.ones_(next(base.parameters()))  # the embedding's, which no adapter changes
        with refuses(CheckpointError, "another base", own):
            bank.add("again", same)
    lora.AdapterBank(model.half()).add("other", other)


def test_a_name_that_is_taken_is_refused(bank, model, model_class):
    with refuses(ValueError, "already has an adapter 'a' .it has a, b, c, d, e."):
        bank.add("a", make_adapter(model_class, "b"))
    batch = make_batch([2])
    with torch.no_grad(), bank.use("a"):
        close(model(**batch), model_of(model_class, "a")(**batch))


def test_a_closed_bank_can_only_be_closed_again(bank, model_class):
    bank.close()
    bank.close()
    with refuses(ValueError, "the bank is closed"):
        bank.add("a", make_adapter(model_class, "a"))
    with refuses(ValueError, "the bank is closed"), bank.use("a"):
        pass


def test_an_adapter_of_a_module_that_is_never_called_is_refused():
    """An attention computes with the weight of out_proj, whose hooks would have no effect."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    tensors = {"attention.out_proj.lora_A": torch.ones(2, 8)}
    tensors["attention.out_proj.lora_B"] = torch.ones(8, 2)
    adapter = Adapter(
        tensors, LoraMetadata(rank=2, alpha=4, targets=("out_proj",)), "a.safetensors"
    )
    with refuses(CheckpointError, "nn.MultiheadAttention never calls", "merge it into its base"):
        lora.AdapterBank(model).add("a", adapter)


def test_an_adapter_of_an_attention_s_own_projections_is_refused(tmp_path):
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    trained = copy.deepcopy(model)
    lora.add_lora(trained, "attention", r=2, exclude="out_proj")
    lora.save_adapter(trained, tmp_path / "a.safetensors")
    with refuses(CheckpointError, "adapts projections inside attention", "merge it into its base"):
        lora.AdapterBank(model).add("a", lora.read_adapter(tmp_path / "a.safetensors"))
