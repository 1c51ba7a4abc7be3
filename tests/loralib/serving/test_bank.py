"""Several adapters beside one base: each gives what a model of its own gives, in mixed batches too.

Two small models: one of plain layers over padded batches, and one like GPT-2, whose merged
projections see packed tokens.
"""

import copy
import threading
from dataclasses import dataclass, replace
from functools import partial

import all_families  # noqa: F401
import pytest
import torch
import torch.nn.functional as F
from compare import assert_close_to_rounding, rounding
from torch import nn

import loralib as lora
from loralib.adapters.adapter import Adapter, adapter_tensors
from loralib.adapters.deltas import deltas_of
from loralib.adapters.fingerprint import fingerprint
from loralib.adapters.loading import load_into
from loralib.adapters.metadata import LoraMetadata
from loralib.errors import CheckpointError
from loralib.nn.packing import PackedRows, attend
from loralib.nn.routing import Routing, for_each_segment, in_effect
from loralib.serving.prepared import DeviceDelta
from transformers.adapter_kinds import BITFIT, BOTTLENECK, BiasMetadata, BottleneckMetadata

WIDTH = 8
# Of the sums that follow one another: two layers of four products, one of them with an update,
# and a head.
TERMS = 2 * 6 * WIDTH + 2 * WIDTH


@dataclass(frozen=True)
class Trained:
    """How an adapter was trained; without labels it has no head."""

    seed: int
    rank: int
    alpha: float
    labels: int | None
    targets: tuple[str, ...] = ("query", "value")


TRAINED = {
    "a": Trained(1, rank=2, alpha=8, labels=2),
    "b": Trained(2, rank=5, alpha=3, labels=5, targets=("query",)),
    "c": Trained(3, rank=1, alpha=2, labels=3, targets=("query", "key", "value")),
    "d": Trained(4, rank=3, alpha=6, labels=1, targets=("key", "value")),
    "e": Trained(5, rank=4, alpha=4, labels=None),
}
NO_LORA = Trained(0, rank=0, alpha=1, labels=3, targets=())
# One name a row, in any order.
MIXES = ["a", "aaa", "ba", "bacb", "abcde", "eedaae", "dcccbad"]


class Head(nn.Module):
    def __init__(self, labels):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.out_proj = nn.Linear(WIDTH, labels)

    def forward(self, x):
        return self.out_proj(torch.tanh(self.dense(x)))


class PlainLayer(nn.Module):
    def __init__(self, trained):
        super().__init__()
        for name in ("query", "key", "value"):
            rank = trained.rank if name in trained.targets else 0
            layer = lora.Linear(WIDTH, WIDTH, r=rank, lora_alpha=trained.alpha)
            setattr(self, name, layer if rank else nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + torch.tanh(self.query(x)) * torch.sigmoid(self.key(x)) + self.value(x)


class Plain(nn.Module):
    """Knows nothing of packed rows: (batch, length, width), mask -> (batch, labels)."""

    def __init__(self, trained):
        super().__init__()
        layers = nn.ModuleList(PlainLayer(trained) for _ in range(2))
        self.roberta = nn.ModuleDict({"embed": nn.Embedding(20, WIDTH), "layer": layers})
        self.classifier = Head(trained.labels or 3)

    def forward(self, ids, mask):
        x = self.roberta["embed"](ids)
        for layer in self.roberta["layer"]:
            x = layer(x)
        return self.classifier((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class Block(nn.Module):
    def __init__(self, trained):
        super().__init__()
        c_attn = lora.MergedLinear(
            WIDTH,
            3 * WIDTH,
            r=trained.rank,
            lora_alpha=trained.alpha,
            enable_lora=[True, False, True],
            fan_in_fan_out=True,
        )
        self.attn = nn.ModuleDict({"c_attn": c_attn})

    def forward(self, x, rows):
        q, k, v = self.attn["c_attn"](x).chunk(3, dim=-1)
        return x + attend(q, k, v, rows, heads=2, causal=True)


class Packed(nn.Module):
    """Like GPT-2, with a head on each row's last token."""

    def __init__(self, trained):
        super().__init__()
        blocks = nn.ModuleList(Block(trained) for _ in range(2))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(20, WIDTH), "h": blocks})
        self.classifier = Head(trained.labels or 3)

    def forward(self, ids, mask):
        rows = PackedRows(mask)
        x = self.transformer["wte"](rows.pack(ids))
        for block in self.transformer["h"]:
            x = block(x, rows)
        return self.classifier(x[rows.first + torch.tensor(rows.lengths) - 1])


MODELS = (Plain, Packed)
LAYER = {Plain: "roberta.layer.0.query", Packed: "transformer.h.0.attn.c_attn"}


def draw(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    return model.eval()


def base_of(model_class):
    return draw(model_class(NO_LORA), 0)


def on_base(model_class, trained):
    """A model with LoRA on the base's weights; LoRA and head are yet to be loaded."""
    model = model_class(trained).eval()
    own, base = model.state_dict(), base_of(model_class).state_dict()
    model.load_state_dict({**own, **{n: t for n, t in base.items() if t.shape == own[n].shape}})
    return model


def make_adapter(model_class, name, **info):
    trained = TRAINED[name]
    tensors = adapter_tensors(draw(model_class(trained), trained.seed).state_dict())
    if trained.labels is None:
        tensors = {n: t for n, t in tensors.items() if "lora_" in n}
    about = LoraMetadata(rank=trained.rank, alpha=trained.alpha, targets=("some",), **info)
    return Adapter(tensors, about, f"{name}.safetensors")


def model_of(model_class, name):
    """A model that was built for one adapter, which is loaded into it."""
    model = on_base(model_class, TRAINED[name])
    adapter = make_adapter(model_class, name)
    head = {n: t for n, t in adapter_tensors(model.state_dict()).items() if "lora_" not in n}
    targets = tuple(sorted({n.split(".")[-2] for n in adapter.tensors if "lora_" in n}))
    info = replace(adapter.metadata, targets=targets)
    load_into(model, Adapter({**head, **adapter.tensors}, info, "here"))
    return model


def make_batch(lengths, seed=0):
    """Ragged rows, padded; what stands at padding is drawn as well."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"ids": torch.randint(20, mask.shape, generator=generator), "mask": mask}


def batch_for(names):
    return make_batch([(3, 6, 1, 5, 2, 4, 6)[row] for row in range(len(names))])


@pytest.fixture(params=MODELS, ids=lambda model_class: model_class.__name__.lower())
def model_class(request):
    return request.param


@pytest.fixture
def model(model_class):
    return base_of(model_class)


@pytest.fixture
def bank(model, model_class):
    bank = lora.AdapterBank(model)
    for name in TRAINED:
        bank.add(name, make_adapter(model_class, name))
    yield bank
    bank.close()


def close(ours, theirs):
    assert_close_to_rounding(ours, theirs, TERMS, theirs.dtype)


def close_in_half(ours, theirs, tolerance):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def refuses(error, *parts):
    """Expects an error of one line that holds all of `parts`."""
    lookaheads = "".join(f"(?=.*{part})" for part in parts)
    return pytest.raises(error, match=rf"^{lookaheads}[^\n]{{1,300}}$")


def hooks_of(model):
    return [hook for module in model.modules() for hook in module._forward_hooks.values()]


@torch.no_grad()
def row_by_row(bank, model, names, batch):
    """Each row's logits, from a forward of the whole batch with the adapter that it names."""
    rows = []
    for row, name in enumerate(names):
        with bank.use(name):
            rows.append(model(**batch)[row])
    return rows


def close_to_rows(mixed, rows, close=close):
    widest = max(len(row) for row in rows)
    assert mixed.shape == (len(rows), widest)
    for ours, theirs in zip(mixed, rows, strict=True):
        close(ours[: len(theirs)], theirs)
        assert (ours[len(theirs) :] == float("-inf")).all()


# ---- one adapter ----


@torch.no_grad()
@pytest.mark.parametrize("name", TRAINED)
def test_a_batch_with_one_adapter_is_that_of_a_model_of_its_own(bank, model, model_class, name):
    batch = make_batch([4, 6, 1])
    with bank.use(name):
        ours = model(**batch)
    close(ours, model_of(model_class, name)(**batch))
    assert ours.shape == (3, TRAINED[name].labels or 3)
    assert ours.shape != model(**batch).shape or (ours - model(**batch)).abs().max() > 0.01


def test_names_and_labels(model, model_class):
    bank = lora.AdapterBank(model)
    assert bank.names == ()
    bank.add("b", make_adapter(model_class, "b"))
    bank.add("a", make_adapter(model_class, "a", labels=("yes", "no")))
    bank.add("e", make_adapter(model_class, "e", labels=("of", "no", "use")))
    assert bank.names == ("b", "a", "e")
    assert bank.labels("a") == ("yes", "no")
    assert bank.labels("b") == tuple(f"LABEL_{n}" for n in range(5))
    assert bank.labels("e") == ()
    bank.remove("b")
    assert bank.names == ("a", "e")
    with refuses(ValueError, "no adapter 'b', only a, e"):
        bank.labels("b")


def test_what_is_added_is_a_copy(model, model_class):
    batch, adapter = make_batch([3, 2]), make_adapter(model_class, "a")
    bank = lora.AdapterBank(model)
    bank.add("a", adapter)
    for tensor in adapter.tensors.values():
        tensor.zero_()
    with bank.use("a"):
        close(model(**batch), model_of(model_class, "a")(**batch))


def test_a_forward_that_autograd_records(bank, model):
    with bank.use("a"):
        logits = model(**make_batch([3, 2]))
    logits.sum().backward()  # adapters are constants in it
    assert any(p.grad is not None for p in model.parameters())
    assert all(p.grad is None for p in model.classifier.parameters())


def test_an_added_head_does_not_drop_out(model, model_class):
    model.classifier.dropout = nn.Dropout(0.9)
    model.classifier.forward = lambda x: Head.forward(model.classifier, x)
    bank = lora.AdapterBank(model.train())
    bank.add("a", make_adapter(model_class, "a"))
    assert not any(module.training for module in bank._adapters["a"].heads["classifier"].modules())
    assert model.classifier.training


# ---- mixed batches ----


@torch.no_grad()
@pytest.mark.parametrize("names", MIXES)
def test_a_mixed_batch_is_its_rows_one_adapter_at_a_time(bank, model, names):
    batch = batch_for(names)
    with bank.use(list(names)):
        mixed = model(**batch)
    close_to_rows(mixed, row_by_row(bank, model, names, batch))


@torch.no_grad()
@pytest.mark.parametrize("names", ["bacb", "eedaae"])
def test_mixed_batches_in_bfloat16(bank, model, names):
    batch = batch_for(names)
    exact = row_by_row(bank, model, names, batch)
    with torch.autocast("cpu", torch.bfloat16):
        rows = row_by_row(bank, model, names, batch)
        with bank.use(list(names)):
            mixed = model(**batch)
    assert mixed.dtype == torch.bfloat16
    close_to_rows(mixed, rows, partial(close_in_half, tolerance=0.06))
    for ours, theirs in zip(rows, exact, strict=True):
        close_in_half(ours.float(), theirs, 0.15)


def test_a_model_in_float64(model_class):
    model = base_of(model_class).double()
    bank = lora.AdapterBank(model)
    for name in "ab":
        adapter = make_adapter(model_class, name)
        bank.add(
            name, replace(adapter, tensors={n: t.double() for n, t in adapter.tensors.items()})
        )
    batch = make_batch([3, 5, 2])
    with torch.no_grad(), bank.use(["a", "b", "a"]):
        mixed = model(**batch)
    expected = [
        model_of(model_class, name).double()(**batch)[row] for row, name in enumerate("aba")
    ]
    close_to_rows(mixed, expected)


def test_outputs_side_by_side_keep_their_argmax_and_softmax(bank, model):
    names, batch = "bda", batch_for("bda")
    with torch.no_grad(), bank.use(list(names)):
        mixed = model(**batch)
    for ours, row in zip(mixed, row_by_row(bank, model, names, batch), strict=True):
        assert ours.argmax() == row.argmax()
        close(ours.softmax(0), F.pad(row.softmax(0), (0, 5 - len(row))))


@torch.no_grad()
def test_the_order_of_names_counts(bank, model):
    """What the tests above compare differs by far more than they allow."""
    batch = batch_for("aab")
    with bank.use(["a", "a", "b"]):
        right = model(**batch)
    with bank.use(["a", "b", "a"]):
        wrong = model(**batch)
    assert (right[:, :2] - wrong[:, :2])[1:].abs().amax(1).min() > 0.01


@torch.no_grad()
def test_rows_that_are_cut_wrongly_show(bank, model, monkeypatch):
    names, batch = "aabb", batch_for("aabb")
    parts = Routing.parts

    def shifted(self, x):
        found = parts(self, x)
        if len(found) == 1:
            return found
        middle = found[0].stop - 1
        return [slice(0, middle), slice(middle, found[1].stop)]

    monkeypatch.setattr(Routing, "parts", shifted)
    with bank.use(list(names)):
        mixed = model(**batch)
    with pytest.raises(AssertionError):
        close_to_rows(mixed, row_by_row(bank, model, names, batch))


@torch.no_grad()
def test_several_batches_in_one_block(bank, model):
    first, second = make_batch([2, 6, 3]), make_batch([5, 1, 4], seed=1)
    with bank.use(["a", "b", "a"]):
        outputs = [model(**batch) for batch in (first, second, first)]
    for batch, output in zip((first, second), outputs, strict=False):
        close_to_rows(output, row_by_row(bank, model, "aba", batch))
    assert torch.equal(outputs[0], outputs[2])


@torch.no_grad()
def test_projections_of_what_is_no_batch(bank, model, model_class):
    layer, x = model.get_submodule(LAYER[model_class]), torch.randn(3, WIDTH)
    other, plain = nn.Linear(WIDTH, 4), layer(x)
    assert [torch.equal(out, plain) for out in for_each_segment(layer, x)] == [True]

    def of(name):
        with bank.use(name):
            return layer(x)

    # As many rows as the batch has, so that nothing but the call tells.
    with bank.use(["a", "d", "a"]):
        outputs, others = for_each_segment(layer, x), for_each_segment(other, x)
        assert in_effect().positions is False
    for name, out in zip("ada", outputs, strict=True):
        close(out, of(name))
    assert all(torch.equal(out, other(x)) for out in others)
    assert len(others) == 3
    for name in ("a", ["a", "a"]):
        with bank.use(name):
            (out,) = for_each_segment(layer, x)
        close(out, of("a"))


@torch.no_grad()
def test_casts_are_made_once_and_may_be_recorded_later(bank, model, model_class):
    batch = make_batch([3, 4])
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), bank.use("a"):
        expected = model(**batch)
    low_rank = bank._adapters["a"].deltas[LAYER[model_class]]
    assert isinstance(low_rank, DeviceDelta)
    assert low_rank._in(torch.bfloat16) is low_rank._in(torch.bfloat16)
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16), bank.use("a"):
        logits = model(**batch)
        logits.sum().backward()
    close_in_half(logits.detach(), expected, 0.06)


def test_parts_that_do_not_lie_one_behind_the_other_in_memory():
    """A layer may return its output in another order of dimensions."""

    class Turned(nn.Linear):
        def forward(self, x):
            return super().forward(x.transpose(0, 1)).transpose(0, 1)

    model = nn.ModuleDict({"layer": Turned(4, 4)})
    bank, x = lora.AdapterBank(model), torch.randn(3, 5, 4)
    A, B = torch.randn(2, 4), torch.randn(4, 2)
    info = LoraMetadata(rank=2, alpha=2.0, targets=("layer",))
    bank.add("a", Adapter({"layer.lora_A": A, "layer.lora_B": B}, info))
    bank.add("b", Adapter({"layer.lora_A": A, "layer.lora_B": -B}, info))
    plain = model["layer"](x)
    with bank.use(["a", "b", "a"]):
        mixed = model["layer"](x)
    signs = torch.tensor([1.0, -1.0, 1.0])[:, None, None]
    close(mixed, plain + signs * (x @ A.T @ B.T))


# ---- the base ----


@torch.no_grad()
def test_the_base_stays_as_it_is(model, model_class):
    batch = make_batch([3, 6, 1])
    before, state = model(**batch), copy.deepcopy(model.state_dict())

    def unchanged():
        assert torch.equal(model(**batch), before)
        assert model.state_dict().keys() == state.keys()
        assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
        assert [name for name, _ in model.named_modules()] == modules

    modules = [name for name, _ in model.named_modules()]
    bank = lora.AdapterBank(model)
    for name in TRAINED:
        bank.add(name, make_adapter(model_class, name))
        unchanged()
    for names in ("a", ["a", "b", "c"], "e"):
        with bank.use(names):
            model(**batch)
        unchanged()
    with pytest.raises(RuntimeError, match="on the way"), bank.use("a"):
        raise RuntimeError("on the way")
    unchanged()
    bank.remove("a")
    unchanged()
    assert hooks_of(model)
    bank.close()
    assert not hooks_of(model)
    assert not bank.names
    unchanged()


def test_a_hook_is_registered_once(bank, model, model_class):
    count = len(hooks_of(model))
    bank.remove("a")
    bank.add("a", make_adapter(model_class, "a"))
    bank.add("again", make_adapter(model_class, "a"))
    assert len(hooks_of(model)) == count
    model.register_forward_hook(lambda *_: None)
    bank.close()
    assert len(hooks_of(model)) == 1  # somebody else's


@torch.no_grad()
def test_an_adapter_that_is_removed_in_use_is_used_to_the_end(bank, model):
    batch = make_batch([3, 2])
    with bank.use("a"):
        before = model(**batch)
        bank.remove("a")
        assert torch.equal(model(**batch), before)
    with refuses(ValueError, "no adapter 'a'"), bank.use("a"):
        pass


@torch.no_grad()
def test_a_copy_of_the_model_is_a_plain_one(bank, model):
    batch = make_batch([3, 2])
    expected = model(**batch)
    sidecar = copy.deepcopy(model)
    with bank.use("a"):
        assert not torch.allclose(model(**batch)[:, :2], expected[:, :2], atol=1e-3)
        assert torch.equal(sidecar(**batch), expected)


# ---- blocks ----


@torch.no_grad()
def test_of_nested_blocks_the_innermost_counts(bank, model):
    batch = make_batch([3, 2])
    with bank.use("a"):
        outer = model(**batch)
        with bank.use(["b", "c"]):
            inner = model(**batch)
        assert torch.equal(model(**batch), outer)
    close_to_rows(inner, row_by_row(bank, model, "bc", batch))


@torch.no_grad()
def test_two_banks_on_one_model(bank, model, model_class):
    batch, second = make_batch([3, 2]), lora.AdapterBank(model)
    second.add("a", make_adapter(model_class, "b"))
    with second.use("a"):
        ours = model(**batch)
        with refuses(ValueError, "another bank's adapters are in use"), bank.use("a"):
            pass
        assert torch.equal(model(**batch), ours)
    close(ours, model_of(model_class, "b")(**batch))
    second.close()
    with bank.use("a"):
        close(model(**batch), model_of(model_class, "a")(**batch))


@torch.no_grad()
def test_threads_do_not_disturb_each_other(bank, model):
    rows = make_batch([3, 6, 2])
    jobs = [("a", rows), (["b", "c", "a"], rows), ("e", make_batch([5])), (["d", "d", "b"], rows)]

    def compute(names, batch):
        with torch.no_grad(), bank.use(names):
            return model(**batch)

    expected, base = [compute(*job) for job in jobs], model(**rows)
    barrier, wrong = threading.Barrier(len(jobs) + 1), []

    def work(number):
        for _ in range(25):
            barrier.wait(timeout=30)
            output = compute(*jobs[number])
            allowed = rounding(expected[number], TERMS)
            if not torch.allclose(output, expected[number], rtol=0, atol=allowed):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for _ in range(25):
        barrier.wait(timeout=30)
        if not torch.equal(model(**rows), base):
            wrong.append("base")
    for thread in threads:
        thread.join()
    assert not barrier.broken
    assert not wrong


# ---- what is refused ----


def test_a_model_with_updates_of_its_own(model_class):
    with refuses(ValueError, f"{LAYER[model_class]} has LoRA of its own"):
        lora.AdapterBank(model_class(TRAINED["a"]))


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        ("x", ["no adapter 'x', only a, b, c, d, e"]),
        (["a", "x", "b"], ["no adapter 'x', only a, b, c, d, e"]),
        ("", ["no adapter ''"]),
        ([], ["no adapter is named; there are a, b, c, d, e"]),
        ((), ["no adapter is named"]),
    ],
)
def test_names_that_there_are_not(bank, model, names, parts):
    with refuses(ValueError, *parts), bank.use(names):
        pytest.fail("the block began")
    assert in_effect() is None
    assert lora.AdapterBank(model).names == ()
    with refuses(ValueError, "no adapter 'a', only none"):
        lora.AdapterBank(model).remove("a")


@pytest.mark.parametrize("names", [["a", "b"], ["a", "a"], ["a"], ["b"] * 4])
def test_another_number_of_rows(bank, model, names):
    with refuses(ValueError, "3", str(len(names)), "rows"), bank.use(names):
        model(**make_batch([2, 4, 1]))
    assert in_effect() is None


def test_rows_that_cannot_be_told(bank, model, model_class):
    layer = model.get_submodule(LAYER[model_class])
    for shape in [(5, WIDTH), (WIDTH,), (2, 3, WIDTH)]:
        x = torch.randn(shape)
        with refuses(ValueError, "named for 3 rows, a layer is given"), bank.use(["a", "b", "a"]):
            layer(x)
        with bank.use("a"):
            assert layer(x).shape[:-1] == x.shape[:-1]
    with refuses(ValueError, "named for 3 rows of 7 tokens"), bank.use(["a", "b", "a"]):
        PackedRows(make_batch([2, 4, 1])["mask"])
        layer(torch.randn(6, WIDTH))


def changed(**tensors):
    """Replaces tensors by name, dots written as two underscores; None takes one out."""

    def change(adapter):
        new = {**adapter.tensors, **{n.replace("__", "."): t for n, t in tensors.items()}}
        return replace(adapter, tensors={n: t for n, t in new.items() if t is not None})

    return change


def informed(**info):
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


MERGE = r"merge it into its base \(merge_into\)"
MISFITS = {
    "bottleneck": (
        of_kind(BOTTLENECK, BottleneckMetadata(adapter_type="houlsby", adapter_size=2)),
        ["holds adapter weights, a bank takes LoRA's", "apply_adapter"],
    ),
    "bitfit": (of_kind(BITFIT, BiasMetadata()), ["holds BitFit weights", "apply_bitfit"]),
    "biases": (informed(bias="lora_only"), ["brings biases of its own", MERGE]),
    "trained_with": (informed(trained_with=("apply_bitfit",)), ["apply_bitfit as well", MERGE]),
    "no info": (lambda adapter: replace(adapter, metadata=None), ["give it as lora_alpha"]),
    "other base": (
        informed(base="their/base", base_fingerprint="feed" * 4),
        ["another base", "'their/base'", "feedfeedfeedfeed"],
    ),
    "labels": (informed(labels=("a", "b", "c")), ["names 3 labels, its head has 2 outputs"]),
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
    "no such head": (changed(score__weight=torch.ones(2, 8)), ["no 'score' to take"]),
    "no module at all": (changed(scale=torch.ones(2)), ["no 'scale' to take"]),
    "half a head": (changed(classifier__dense__bias=None), [r"lacks classifier\.dense\.bias"]),
    "more than a head": (
        changed(classifier__norm__bias=torch.ones(8)),
        [r"unknown to the model, classifier\.norm\.bias"],
    ),
    "an update of its head": (with_update("classifier.dense"), ["adapts classifier.dense", MERGE]),
    "head of another shape": (
        changed(classifier__dense__weight=torch.ones(6, 8)),
        [r"classifier\.dense\.weight is \(6, 8\) in the file, \(8, 8\) is needed"],
    ),
    "projection of another width": (
        changed(classifier__out_proj__weight=torch.ones(2, 7)),
        [r"out_proj\.weight is \(2, 7\) in the file, \(2, 8\) is needed"],
    ),
    "bias of another number of labels": (
        changed(classifier__out_proj__bias=torch.ones(3)),
        [r"out_proj\.bias is \(3,\) in the file, \(2,\) is needed"],
    ),
    "a projection that is none": (
        changed(classifier__out_proj__weight=torch.ones(2)),
        [r"out_proj\.weight is \(2,\) in the file, \(3, 8\) is needed"],
    ),
}


@torch.no_grad()
@pytest.mark.parametrize(("change", "parts"), MISFITS.values(), ids=MISFITS)
def test_a_misfit_leaves_everything_as_it_was(model, model_class, change, parts):
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


def test_the_bases_fingerprint(model, model_class):
    """A copy in bfloat16 is the same base; one in float16 cannot be told from others."""
    own = fingerprint(model.state_dict())
    same = make_adapter(model_class, "a", base_fingerprint=own)
    other = make_adapter(model_class, "a", base_fingerprint="feed" * 4)
    for dtype in (torch.float32, torch.bfloat16):
        bank = lora.AdapterBank(copy.deepcopy(model).to(dtype))
        bank.add("same", same)
        with refuses(CheckpointError, "another base", own):
            bank.add("other", other)
        assert bank.names == ("same",)
    lora.AdapterBank(model.half()).add("other", other)


def test_a_name_used_twice(bank, model, model_class):
    with refuses(ValueError, "an adapter 'a' already, among a, b, c, d, e"):
        bank.add("a", make_adapter(model_class, "b"))
    batch = make_batch([2])
    with torch.no_grad(), bank.use("a"):
        close(model(**batch), model_of(model_class, "a")(**batch))


def test_a_closed_bank(bank, model_class):
    bank.close()
    bank.close()
    with refuses(ValueError, "the bank is closed"):
        bank.add("a", make_adapter(model_class, "a"))
    with refuses(ValueError, "the bank is closed"), bank.use("a"):
        pass


def test_slices_that_are_not_updated_keep_their_bits():
    model = base_of(Packed)
    bank, adapter = lora.AdapterBank(model), make_adapter(Packed, "a")
    bank.add("a", adapter)
    layer, x = model.get_submodule(LAYER[Packed]), torch.randn(4, WIDTH)
    with bank.use("a"):
        query, key, value = layer(x).chunk(3, dim=1)
    plain = layer(x).chunk(3, dim=1)
    assert torch.equal(key, plain[1])
    for part, ours, theirs in zip(
        deltas_of(adapter)[LAYER[Packed]].blocks(),
        (query, value),
        (plain[0], plain[2]),
        strict=True,
    ):
        close(ours, theirs + 8 / 2 * x @ part.A.T @ part.B.T)


def test_a_module_that_is_never_called():
    """Attention takes its output projection's weight: a hook on the projection would not act."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    tensors = {"attention.out_proj.lora_A": torch.ones(2, 8)}
    tensors["attention.out_proj.lora_B"] = torch.ones(8, 2)
    adapter = Adapter(
        tensors, LoraMetadata(rank=2, alpha=4, targets=("out_proj",)), "a.safetensors"
    )
    with refuses(CheckpointError, "nn.MultiheadAttention never calls", "merge_into"):
        lora.AdapterBank(model).add("a", adapter)
