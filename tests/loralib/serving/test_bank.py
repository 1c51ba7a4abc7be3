"""Tests that each adapter in a bank gives what a model of its own gives, in mixed batches too."""

import contextlib
import contextvars
import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from bank_models import (
    LAYER,
    TERMS,
    TRAINED,
    WIDTH,
    Head,
    Packed,
    base_of,
    batch_for,
    close,
    close_in_half,
    close_to_rows,
    hooks_of,
    make_adapter,
    make_batch,
    model_of,
    refuses,
    row_by_row,
)
from compare import rounding
from torch import nn

import loralib as lora
from loralib.adapters.adapter import Adapter
from loralib.adapters.deltas import deltas_of
from loralib.adapters.metadata import LoraMetadata
from loralib.functional import Delta
from loralib.nn import routing
from loralib.nn.routing import Routing, for_each_segment, in_effect
from loralib.serving.device_deltas import DeviceDelta
from loralib.serving.hooks import Hook
from loralib.serving.prepared import prepare

# One name per row, in any order.
MIXES = ["a", "aaa", "ba", "bacb", "abcde", "eedaae", "dcccbad"]

# ---- one adapter ----


@torch.no_grad()
@pytest.mark.parametrize("name", TRAINED)
def test_a_batch_with_one_adapter_equals_that_of_a_model_of_its_own(bank, model, model_class, name):
    batch = make_batch([4, 6, 1])
    with bank.use(name):
        ours = model(**batch)
    close(ours, model_of(model_class, name)(**batch))
    assert ours.shape == (3, TRAINED[name].labels or 3)
    assert ours.shape != model(**batch).shape or (ours - model(**batch)).abs().max() > 0.01


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Dynamo does not know")
@torch.no_grad()
def test_a_model_that_was_compiled_before_takes_adapters(bank, model):
    """A graph that was compiled without an adapter in use is not reused."""
    torch.compiler.reset()
    batch, compiled = make_batch([4, 6, 1]), torch.compile(model, backend="eager")
    close(compiled(**batch), model(**batch))
    for names in ("a", ["a", "b", "a"]):
        with bank.use(names):
            close(compiled(**batch), model(**batch))


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


def test_a_bank_copies_an_adapter_s_tensors(model, model_class):
    batch, adapter = make_batch([3, 2]), make_adapter(model_class, "a")
    bank = lora.AdapterBank(model)
    bank.add("a", adapter)
    for tensor in adapter.tensors.values():
        tensor.zero_()
    with bank.use("a"):
        close(model(**batch), model_of(model_class, "a")(**batch))


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda each: pickle.loads(pickle.dumps(each))}


@torch.no_grad()
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copied_or_pickled_adapter_can_be_added(model, model_class, copied):
    """For example one that comes from another process."""
    batch, bank = make_batch([3, 2]), lora.AdapterBank(model)
    bank.add("a", copied(make_adapter(model_class, "a")))
    with bank.use("a"):
        close(model(**batch), model_of(model_class, "a")(**batch))


def test_gradients_reach_the_model_but_not_an_adapter(bank, model):
    with bank.use("a"):
        logits = model(**make_batch([3, 2]))
    logits.sum().backward()  # adapters are constants in it
    assert any(p.grad is not None for p in model.parameters())
    assert all(p.grad is None for p in model.classifier.parameters())


def test_an_added_head_has_no_dropout(model, model_class):
    model.classifier.dropout = nn.Dropout(0.9)
    model.classifier.forward = lambda x: Head.forward(model.classifier, x)
    bank = lora.AdapterBank(model.train())
    bank.add("a", make_adapter(model_class, "a"))
    head = bank._adapters["a"].heads["classifier"]
    assert not any(module.training for module in head.modules())
    assert model.classifier.training
    assert (head.out_proj.out_features, model.classifier.out_proj.out_features) == (2, 3)


# ---- mixed batches ----


@torch.no_grad()
@pytest.mark.parametrize("names", MIXES)
def test_a_mixed_batch_equals_its_rows_one_adapter_at_a_time(bank, model, names):
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


def test_padded_outputs_keep_their_argmax_and_softmax(bank, model):
    names, batch = "bda", batch_for("bda")
    with torch.no_grad(), bank.use(list(names)):
        mixed = model(**batch)
    for ours, row in zip(mixed, row_by_row(bank, model, names, batch), strict=True):
        assert ours.argmax() == row.argmax()
        close(ours.softmax(0), F.pad(row.softmax(0), (0, 5 - len(row))))


@torch.no_grad()
def test_the_order_of_names_matters(bank, model):
    """Rows of different adapters differ by far more than the tests above allow."""
    batch = batch_for("aab")
    with bank.use(["a", "a", "b"]):
        right = model(**batch)
    with bank.use(["a", "b", "a"]):
        wrong = model(**batch)
    assert (right[:, :2] - wrong[:, :2])[1:].abs().amax(1).min() > 0.01


@torch.no_grad()
def test_rows_in_a_wrong_segment_are_detected_by_these_tests(bank, model, monkeypatch):
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
def test_for_each_segment_computes_positions_with_each_adapter(bank, model, model_class):
    layer, x = model.get_submodule(LAYER[model_class]), torch.randn(3, WIDTH)
    other, plain = nn.Linear(WIDTH, 4), layer(x)
    assert [torch.equal(out, plain) for out in for_each_segment(layer, x)] == [True]

    def of(name):
        with bank.use(name):
            return layer(x)

    # As many positions as rows in the batch: only the call shows that these are positions.
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
def test_casts_are_made_once_and_autograd_may_record_them_later(bank, model, model_class):
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


@torch.no_grad()
def test_an_adapter_is_cast_to_the_model_s_dtype_when_it_is_added(model, model_class, monkeypatch):
    """In a compiled model, the result would be its graph's, or an inference tensor."""
    bank = lora.AdapterBank(model.bfloat16())
    bank.add("a", make_adapter(model_class, "a"))
    monkeypatch.setattr(Delta, "to", lambda *_: pytest.fail("cast in a block"))
    with bank.use("a"):
        assert model(**make_batch([3, 4])).dtype == torch.bfloat16


def test_autograd_may_record_an_adapter_that_was_added_in_inference_mode(model, model_class):
    batch, bank = make_batch([3, 4]), lora.AdapterBank(model)
    with torch.inference_mode():
        bank.add("a", make_adapter(model_class, "a"))
    with bank.use("a"):
        model(**batch).sum().backward()
    assert model.get_submodule(LAYER[model_class]).weight.grad.any()


def test_segments_that_are_not_contiguous_in_memory():
    """A layer that returns a transposed output has such segments."""

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


class Calls(nn.Module):
    """Calls its layer with all that it is given."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *inputs):
        return self.layer(*inputs)


def test_other_modules_of_an_adapted_one_s_name_may_be_of_any_kind():
    """They get hooks, too, for Dynamo."""
    layers = [nn.Linear(4, 4), nn.Bilinear(4, 4, 2), nn.Identity()]
    model, x = nn.ModuleList(map(Calls, layers)), torch.randn(3, 4)
    bank = lora.AdapterBank(model)
    tensors = {"0.layer.lora_A": torch.ones(2, 4), "0.layer.lora_B": torch.ones(4, 2)}
    bank.add("a", Adapter(tensors, LoraMetadata(rank=2, alpha=2.0, targets=("layer",))))
    assert all(len(module.layer._forward_hooks) == 1 for module in model)
    expected = model[1](x, x)
    with bank.use(["a"] * 3):
        assert torch.equal(model[1](x, x), expected)
        assert model[2](None) is None


@pytest.mark.parametrize("is_first", [True, False])
def test_other_hooks_get_the_adapted_output(is_first):
    """Whether they are registered before the bank's or after, as on a layer with LoRA."""
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    tensors = {"layer.lora_A": torch.ones(2, 4), "layer.lora_B": torch.ones(4, 2)}
    adapter = Adapter(tensors, LoraMetadata(rank=2, alpha=2.0, targets=("layer",)))
    if is_first:
        layer.register_forward_hook(lambda *given: given[-1] * -2)
    bank = lora.AdapterBank(Calls(layer))
    bank.add("a", adapter)
    if not is_first:
        layer.register_forward_hook(lambda *given: given[-1] * -2)
    with torch.no_grad(), bank.use("a"):
        torch.testing.assert_close(layer(x), -2 * (layer.forward(x) + x @ torch.full((4, 4), 2.0)))


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
    """It is not replaced either, because other threads may be computing."""

    def handles():
        return [(*each._forward_pre_hooks, *each._forward_hooks) for each in model.modules()]

    before = handles()
    bank.remove("a")
    bank.add("a", make_adapter(model_class, "a"))
    bank.add("again", make_adapter(model_class, "a"))
    assert handles() == before
    model.register_forward_hook(lambda *_: None)
    bank.close()
    assert len(hooks_of(model)) == 1  # registered by someone else


@pytest.fixture
def meeting(monkeypatch):
    """Makes a thread wait before it registers its first hook, for another one to get there too."""
    both, register = threading.Barrier(2), Hook.register

    def registering(hook, module):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.3)
        return register(hook, module)

    monkeypatch.setattr(Hook, "register", registering)


@torch.no_grad()
def test_threads_that_add_adapters_at_once_register_a_hook_once(model, model_class, meeting):
    bank, batch = lora.AdapterBank(model), make_batch([3, 2])
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: bank.add(name, make_adapter(model_class, name)), "ab"))
    hooks = hooks_of(model)
    assert len(hooks) == len(set(hooks))
    for name in "ab":
        with bank.use(name):
            close(model(**batch), model_of(model_class, name)(**batch))


def test_of_threads_that_add_the_same_name_all_but_one_are_refused(model, model_class, meeting):
    bank = lora.AdapterBank(model)

    def add(name):
        try:
            bank.add("same", make_adapter(model_class, name))
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor() as pool:
        messages = list(pool.map(add, "ab"))
    assert [each for each in messages if each] == [
        "the bank already has an adapter 'same' (it has same)"
    ]


def test_an_adapter_is_removed_while_another_one_is_added(bank, model_class, monkeypatch):
    """By a finalizer, for example, that runs in a thread for whose compilation `add` waits."""
    removal = threading.Thread(target=bank.remove, args=("a",))

    def preparing(*given):
        removal.start()
        removal.join(timeout=10)
        assert not removal.is_alive()
        return prepare(*given)

    monkeypatch.setattr("loralib.serving.bank.prepare", preparing)
    bank.add("new", make_adapter(model_class, "a"))
    assert bank.names == ("b", "c", "d", "e", "new")


@torch.no_grad()
@pytest.mark.parametrize(
    ("drop", "message"),
    [
        (lambda bank: bank.remove("a"), "no adapter 'a'"),
        (lambda bank: bank.close(), "the bank is closed"),
    ],
    ids=["remove", "close"],
)
def test_an_adapter_that_is_dropped_in_a_block_is_used_until_its_end(bank, model, drop, message):
    batch = make_batch([3, 2])
    with bank.use("a"):
        before = model(**batch)
        with bank.use("b"):
            drop(bank)
        with refuses(ValueError, message), bank.use("a"):
            pass
        assert torch.equal(model(**batch), before)
    with refuses(ValueError, message), bank.use("a"):
        pass
    assert bool(hooks_of(model)) == bool(bank.names)


@torch.no_grad()
def test_a_copy_of_the_model_is_a_plain_one(bank, model):
    batch = make_batch([3, 2])
    expected = model(**batch)
    copied = copy.deepcopy(model)
    with bank.use("a"):
        assert not torch.allclose(model(**batch)[:, :2], expected[:, :2], atol=1e-3)
        assert torch.equal(copied(**batch), expected)


@torch.no_grad()
def test_the_hooks_of_a_copy_may_be_registered_on_other_modules(bank, model, model_class):
    """torch.ao's quantization does this, and registers them without keywords."""
    batch, copied = make_batch([3, 2]), copy.deepcopy(model)
    expected = model(**batch)
    name = LAYER[model_class]
    old, new = copied.get_submodule(name), copy.deepcopy(model.get_submodule(name))
    new._forward_hooks.clear()
    for hook in old._forward_hooks.values():
        new.register_forward_hook(hook)
    copied.set_submodule(name, new)
    assert torch.equal(copied(**batch), expected)
    with bank.use("a"):
        assert torch.equal(copied(**batch), expected)


# ---- blocks ----


@torch.no_grad()
def test_the_innermost_of_nested_blocks_applies(bank, model):
    batch, open_blocks = make_batch([3, 2]), routing._blocks
    with bank.use("a"):
        outer = model(**batch)
        with bank.use(["b", "c"]):
            inner = model(**batch)
        assert torch.equal(model(**batch), outer)
    assert routing._blocks == open_blocks  # or else compiled code would go on looking for blocks
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


@torch.no_grad()
def streamed(bank, model, name, batch):
    """A generator that computes each step in one block, which it leaves only at its end."""
    with bank.use(name):
        for _ in range(2):
            yield model(**batch)


@torch.no_grad()
def test_generators_that_take_turns_within_their_blocks_are_refused(bank, model):
    """The last block that was entered is in effect in both of them."""
    batch = make_batch([3, 2])
    first, second = (streamed(bank, model, name, batch) for name in "ab")
    for generator in (first, second, first, second):
        next(generator)
    with refuses(RuntimeError, "left in another order", "in a generator, leave it before each"):
        next(first)
    second.close()
    assert in_effect() is None


@torch.no_grad()
def test_a_generator_that_leaves_its_block_in_another_thread_is_refused(bank, model):
    """So a server may iterate over a generator: with a thread of its pool for each step."""
    steps = streamed(bank, model, "a", make_batch([3, 2]))
    with ThreadPoolExecutor() as pool:
        pool.submit(next, steps).result()
    next(steps)
    with refuses(RuntimeError, "left in another order, thread or task than it was entered"):
        next(steps)


@torch.no_grad()
def test_a_generator_that_is_collected_in_an_inner_block_does_not_end_the_outer_one(bank, model):
    batch = make_batch([3, 2])
    with bank.use("a"):
        expected, generator = model(**batch), streamed(bank, model, "b", batch)
        next(generator)
        with bank.use("c"), refuses(RuntimeError, "left in another order"):
            generator.close()
        assert torch.equal(model(**batch), expected)
    assert in_effect() is None


@torch.no_grad()
def test_after_its_end_a_block_has_no_effect_in_copies_of_its_context(bank, model):
    """Such as those of tasks that were created in the block; whether or not another one began."""
    batch = make_batch([3, 2])
    base = model(**batch)
    with bank.use("a"):
        inside, copied = model(**batch), contextvars.copy_context()
        assert torch.equal(copied.run(model, **batch), inside)
    for block in (contextlib.nullcontext(), bank.use("b")):
        with block:
            assert torch.equal(copied.run(model, **batch), base)


# ---- slices ----


def test_slices_without_updates_are_bit_exact():
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
