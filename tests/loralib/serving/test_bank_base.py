"""A bank checks that an adapter's base is its model, in families it does not know by name too."""

import copy
import gc
import logging
import threading
import weakref

import all_families  # noqa: F401
import pytest
import torch
from torch import nn

import loralib as lora
from loralib.adapters.adapter import Adapter
from loralib.adapters.families import in_known_backbone
from loralib.adapters.fingerprint import fingerprint
from loralib.adapters.metadata import LoraMetadata
from loralib.errors import CheckpointError
from loralib.nn import routing

WIDTH = 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.query(x) * self.value(x)


class Own(nn.Module):
    """A user's model, whose names the library does not know."""

    def __init__(self, seed=0):
        super().__init__()
        self.words = nn.Embedding(9, WIDTH)
        self.body = nn.ModuleList(Layer() for _ in range(2))
        self.score = nn.Linear(WIDTH, 3)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.body:
            x = layer(x)
        return self.score(x.mean(1))


def adapter(model, base_fingerprint, head=True, modules=("body.0.query", "body.1.value")):
    tensors = {}
    for name in modules:
        out_features, in_features = model.get_submodule(name).weight.shape
        tensors[f"{name}.lora_A"] = torch.randn(2, in_features)
        tensors[f"{name}.lora_B"] = torch.randn(out_features, 2)
    if head:
        tensors |= {"score.weight": torch.randn(3, WIDTH), "score.bias": torch.randn(3)}
    info = LoraMetadata(rank=2, alpha=4, targets=("query",), base_fingerprint=base_fingerprint)
    return Adapter(tensors, info, source="mine.safetensors")


def without_head(state):
    return {name: tensor for name, tensor in state.items() if not name.startswith("score.")}


# How the base's fingerprint may have been taken in training, and a tensor that it covers.
METHODS = {
    "without the head": (lambda state: fingerprint(without_head(state)), "words.weight"),
    "by its name": (lambda state: fingerprint(state, ["body."]), "body.1.query.weight"),
    "of the whole model": (fingerprint, "score.weight"),
}


def test_the_model_s_family_is_not_known():
    assert not any(in_known_backbone(name) for name in Own().state_dict())


@pytest.mark.parametrize("way", METHODS)
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_right_base_is_accepted_and_another_refused(way, head, dtype, caplog):
    take, part = METHODS[way]
    model = Own()
    mine = adapter(model, take(model.state_dict()), head)
    bank = lora.AdapterBank(copy.deepcopy(model).to(dtype))
    bank.add("mine", mine)
    assert bank.names == ("mine",)
    changed = copy.deepcopy(model)
    changed.get_parameter(part).data[0, 0] += 1
    for other in (Own(seed=1), changed):
        bank = lora.AdapterBank(other.to(dtype))
        with pytest.raises(CheckpointError, match=r"mine\.safetensors: was trained on another b"):
            bank.add("mine", mine)
        assert bank.names == ()
    assert not caplog.records


@pytest.mark.parametrize("way", ["without the head", "by its name"])
def test_the_model_s_head_may_differ_from_the_adapter_s(way):
    model = Own()
    mine = adapter(model, METHODS[way][0](model.state_dict()))
    nn.init.ones_(model.score.weight)
    lora.AdapterBank(model).add("mine", mine)


def test_the_weights_of_adapted_top_level_modules_are_compared():
    """Even if the fingerprint covers no others."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for taken in (fingerprint(state), fingerprint(state, ["0."])):
        mine = adapter(model, taken, head=False, modules=("0",))
        model.load_state_dict(state)
        lora.AdapterBank(model).add("mine", mine)
        model[0].weight.data.neg_()
        with pytest.raises(CheckpointError, match="another base"):
            lora.AdapterBank(model).add("mine", mine)


@pytest.mark.parametrize(
    ("dtype", "known", "message"),
    [
        (torch.float32, None, "its base's fingerprint: cannot check that its base is this model"),
        (torch.float32, "", "its base's fingerprint: cannot check that its base is this model"),
        (torch.float16, "feed" * 4, "a model in float16, or quantized or offloaded in part"),
    ],
)
def test_a_base_that_cannot_be_compared_is_warned_of_once(caplog, dtype, known, message):
    model = Own().to(dtype)
    bank, mine = lora.AdapterBank(model), adapter(model, known)
    with caplog.at_level(logging.WARNING):
        bank.add("mine", mine)
        with torch.no_grad(), bank.use("mine"):
            model(torch.tensor([[1, 2], [3, 4]]))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith("mine.safetensors")
    assert message in record.message


def test_the_fingerprint_of_an_unknown_family_is_of_its_weights():
    first, second = Own().state_dict(), Own(seed=1).state_dict()
    assert fingerprint(first) == fingerprint(Own().state_dict()) != fingerprint(second)
    assert len({fingerprint(first), fingerprint({}), fingerprint(without_head(first))}) == 3
    added = {**first, "body.0.query.lora_A": torch.ones(2, 2), "words.note": torch.arange(4)[None]}
    assert fingerprint(added) == fingerprint(first)


# ---- a base that changes after adapters were added ----

IDS = torch.tensor([[1, 2], [3, 4]])


def load_another(model):
    model.load_state_dict(Own(seed=1).state_dict())


def assign_another(model):
    model.load_state_dict(Own(seed=1).state_dict(), assign=True)


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS).square().sum().backward()
    optimizer.step()


def merge_into_it(model):
    lora.add_lora(model, "query", r=2)
    nn.init.ones_(model.body[0].query.lora_B)
    lora.merge(model)


@torch.no_grad()
def outputs(bank, model, names="a"):
    with bank.use(names):
        return model(IDS)


def bank_of(model):
    """A bank with an adapter that brings a head, and one that does not."""
    bank, known = lora.AdapterBank(model), fingerprint(without_head(model.state_dict()))
    bank.add("a", adapter(model, known))
    bank.add("headless", adapter(model, known, head=False))
    return bank


@pytest.mark.parametrize("change", [load_another, assign_another, train, merge_into_it])
def test_a_base_that_has_changed_since_is_refused(change):
    model = Own()
    bank = bank_of(model)
    outputs(bank, model)
    change(model)
    message = (
        r"^the weight of body\.0\.query has changed since an adapter was added to it: load the"
    )
    for refused in (
        lambda: bank.use("a").__enter__(),
        lambda: bank.use(["a", "headless"]).__enter__(),
        lambda: bank.add("b", adapter(model, None)),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    assert bank.names == ("a", "headless")
    bank.close()
    outputs(bank_of(model), model)  # a new bank accepts it


def replace_a_layer(model):
    model.body[0].query = nn.Linear(WIDTH, WIDTH)


def change_a_weight(model):
    nn.init.ones_(model.body[0].query.weight)


@pytest.mark.parametrize("change", [replace_a_layer, change_a_weight])
def test_a_layer_that_has_changed_is_refused_to_rows_with_an_adapter_of_it(change):
    model = Own()
    bank = lora.AdapterBank(model)
    for name in ("body.0.query", "body.1.value"):
        bank.add(name, adapter(model, None, head=False, modules=[name]))
    change(model)
    with pytest.raises(ValueError, match=r"body\.0\.query has "):
        outputs(bank, model, ["body.1.value", "body.0.query"])
    outputs(bank, model, ["body.1.value"] * 2)


class Served(nn.Module):
    """Computes with an adapter of its own bank."""

    def __init__(self, model):
        super().__init__()
        self.model, self.bank = model, bank_of(model)

    def forward(self, ids):
        with self.bank.use("a"):
            return self.model(ids)


@torch.no_grad()
def test_weights_that_vmap_gives_are_not_compared():
    served = Served(Own().double())  # the order of sums differs
    given = {name: torch.stack([p, 2 * p]) for name, p in served.named_parameters()}
    out = torch.vmap(lambda own: torch.func.functional_call(served, own, IDS))(given)
    torch.testing.assert_close(out[0], served(IDS))


def test_heads_with_buffers_that_no_adapter_holds_are_refused(tmp_path):
    def base():
        model = Own()
        normed = nn.BatchNorm1d(WIDTH, affine=False)
        model.score = nn.Sequential(normed, nn.Linear(WIDTH, 3, bias=False))
        return model

    trained = base()
    lora.add_lora(trained, "query", r=2, modules_to_train="score")
    lora.save_adapter(trained, tmp_path / "a.safetensors")
    bank = lora.AdapterBank(base())
    with pytest.raises(CheckpointError, match=r"its head lacks score\.0\..*, which the model's"):
        bank.add("a", lora.read_adapter(tmp_path / "a.safetensors"))
    assert bank.names == ()


def compile_it(model):
    return torch.compile(model, backend="eager")


def compile_its_layers(model):
    for layer in model.body:
        layer.compile(backend="eager")
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "modules"),
    [
        (compile_its_layers, ["body.0.query"]),
        (compile_its_layers, ["body.1.value"]),
        (compile_it, ["body.0.query", "body.1.value"]),
    ],
)
def test_compiled_layers_with_adapters_do_not_run_the_code_of_those_without(compiled, modules):
    """Dynamo compiles the code of a class once, and does not check each layer's hooks."""
    torch.compiler.reset()
    model = Own()
    bank = lora.AdapterBank(model)
    bank.add("a", adapter(model, None, head=False, modules=modules))
    with torch.no_grad():
        plain = model(IDS)
    expected = outputs(bank, model)
    model = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), plain)
    for _ in range(2):
        torch.testing.assert_close(outputs(bank, model), expected)
    assert (expected - plain).abs().max() > plain.abs().max() / 100


@pytest.mark.slow
def test_a_block_in_compiled_code_compares_weights_too():
    torch.compiler.reset()
    model = Own()
    bank, state = bank_of(model), copy.deepcopy(model.state_dict())
    compiled = torch.compile(lambda: outputs(bank, model), backend="eager")
    expected = outputs(bank, model)
    for _ in range(3):
        torch.testing.assert_close(compiled(), expected)
        load_another(model)
        with pytest.raises(ValueError, match=r"^the weight of body\.0\.query has changed since"):
            compiled()
        model.load_state_dict(state)


def replace_a_layer(model):
    model.body[0] = copy.deepcopy(model.body[0])


def replace_a_projection(model):
    weights = model.body[1].value.state_dict()
    model.body[1].value = nn.Linear(WIDTH, WIDTH)
    model.body[1].value.load_state_dict(weights)


def replace_the_head(model):
    model.score = nn.Linear(WIDTH, 5)


def delete_the_head(model):
    del model.score


def remove_the_body(model):
    model.body = nn.Identity()


def reverse_the_body(model):
    model.body = nn.ModuleList(list(model.body)[::-1])


def repeat_layers(model):
    model.body = nn.Sequential(*model.body, *model.body)


def put_layers_into_a_module(model):
    layers = model.body
    model.body = nn.Module()
    for name, layer in layers.named_children():
        model.body.add_module(name, layer)


def share_a_projection(model):
    layer = Layer()
    layer.query = model.body[0].query
    model.body = nn.ModuleList([layer, model.body[1]])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (replace_a_layer, r"body\.0"),
        (replace_a_projection, r"body\.1\.value"),
        (replace_the_head, "score"),
        (delete_the_head, "score"),
        (remove_the_body, "body"),
        (reverse_the_body, "body"),
        (repeat_layers, "body"),
        (put_layers_into_a_module, "body"),
        (share_a_projection, "body"),
    ],
)
def test_a_module_that_has_replaced_an_adapted_one_is_refused(change, name):
    """A bank's hooks, which add an adapter's updates, are on the former module."""
    model = Own()
    bank, another = bank_of(model), adapter(model, None)
    modules = {each: model.get_submodule(each) for each, _ in model.named_modules() if each}
    change(model)
    message = rf"^{name} has been replaced since an adapter was added to it: put the module back"
    for refused in (lambda: outputs(bank, model), lambda: bank.add("b", another)):
        with pytest.raises(ValueError, match=message):
            refused()
    if change is replace_the_head:
        outputs(bank, model, "headless")  # this adapter brings no head
    for each, module in modules.items():  # as the error suggests
        setattr(model.get_submodule(each.rpartition(".")[0]), each.rpartition(".")[2], module)
    outputs(bank, model)


def load_it_again(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def assign_it_again(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def load_another_and_it_again(model):
    state = copy.deepcopy(model.state_dict())
    load_another(model)
    model.load_state_dict(state)


def load_it_into_bfloat16(model):
    state = copy.deepcopy(model.state_dict())
    model.bfloat16().load_state_dict(state)


def train_another(model):
    train(Own(seed=1))


def compile_a_layer(model):
    model.body[0] = torch.compile(model.body[0], backend="eager")


class Wrapper(nn.Module):
    """A wrapper of another package, which the library does not know."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def wrap_a_projection(model):
    model.body[0].query = Wrapper(model.body[0].query)
    model.body[1] = Wrapper(model.body[1])


def put_it_into_another_list(model):
    model.body = nn.ModuleList(list(model.body))
    model.body = nn.ModuleList([torch.compile(layer, backend="eager") for layer in model.body])


def replace_what_no_adapter_touches(model):
    model.body[1].query = nn.Linear(WIDTH, WIDTH)
    model.words = nn.Embedding(9, WIDTH)


def change_what_no_adapter_touches(model):
    with torch.no_grad():
        model.body[0].value.weight.add_(1)
        model.score.weight.add_(1)


@pytest.mark.parametrize(
    "change",
    [
        load_it_again,
        assign_it_again,
        load_another_and_it_again,
        load_it_into_bfloat16,
        train_another,
        compile_a_layer,
        put_it_into_another_list,
        replace_what_no_adapter_touches,
        change_what_no_adapter_touches,
    ],
)
def test_changes_that_affect_no_adapter_in_use_are_accepted(change):
    model = Own()
    bank = bank_of(model)
    change(model)
    for _ in range(2):
        outputs(bank, model, "headless")
    bank.add("b", adapter(model, None))


def compile_alone(module):
    return torch.compile(module, backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrap", "before"),
    [
        ("body.0.query", compile_alone, True),
        ("score", compile_alone, False),
        ("body.0.query", lambda x: Wrapper(compile_alone(x)), False),
    ],
)
def test_a_projection_that_is_compiled_alone_is_refused(name, wrap, before):
    """It could run the compiled code of another layer of its class, without an adapter.

    Whether it is wrapped before its adapter is added, or after.
    """
    model = Own()
    bank, own = lora.AdapterBank(model), adapter(model, None)
    another = lora.AdapterBank(like := copy.deepcopy(model))
    another.add("a", own)
    expected = outputs(another, like)
    owner, _, last = name.rpartition(".")
    owner, module = model.get_submodule(owner), model.get_submodule(name)
    if before:
        setattr(owner, last, wrap(module))
    bank.add("a", own)
    setattr(owner, last, wrap(module))
    with pytest.raises(
        ValueError, match=rf"^{name} is wrapped by torch\.compile on its own, where"
    ):
        bank.use("a").__enter__()
    setattr(owner, last, module)
    for each in model.modules():  # as the error suggests
        if isinstance(each, nn.Linear):
            each.compile(backend="eager")
    for _ in range(2):
        torch.testing.assert_close(outputs(bank, model), expected)


def test_a_head_may_be_replaced_by_an_identity_to_get_features():
    model = Own()
    bank = bank_of(model)
    seen = []
    model.score.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    outputs(bank, model)
    bank.add("of the head", adapter(model, None, head=False, modules=["score"]))
    model.score = nn.Identity()
    assert torch.equal(outputs(bank, model), seen[0])
    for names in ("of the head", ["a", "of the head", "a"]):
        with pytest.raises(ValueError, match=r"^score has been replaced since"):
            bank.use(names).__enter__()


def test_a_projection_that_is_compiled_alone_is_refused_in_a_new_container_too():
    model = Own()
    model.body[0].query = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    bank = lora.AdapterBank(model)
    bank.add("a", adapter(model, None, head=False, modules=["body.0.query.0"]))
    model.body[0].query = nn.Sequential(compile_alone(model.body[0].query[0]))
    with pytest.raises(
        ValueError, match=r"^body\.0\.query is wrapped by torch\.compile on its own"
    ):
        bank.use("a").__enter__()


def test_a_block_may_end_while_its_thread_adds_an_adapter(monkeypatch):
    """As when the garbage collector meanwhile closes a generator that is in a block."""
    model = Own()
    bank = bank_of(model)
    block = bank.use("a")
    block.__enter__()
    note = bank._seen.note

    def noting(*given):
        block.__exit__(None, None, None)
        note(*given)

    monkeypatch.setattr(bank._seen, "note", noting)
    bank.add("b", adapter(model, None))
    assert bank._key.blocks == 0


def test_a_block_may_end_while_its_thread_counts_blocks():
    """The garbage collector may run right after Python 3.14 has taken a lock for a `with`."""
    bank = bank_of(Own())

    def counting():
        block = bank.use("a")
        block.__enter__()
        with routing._blocks_lock:
            block.__exit__(None, None, None)

    thread = threading.Thread(target=counting, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_an_adapted_module_may_be_wrapped():
    model = Own()
    bank = bank_of(model)
    expected = outputs(bank, model, "headless")
    wrap_a_projection(model)
    assert torch.equal(outputs(bank, model, "headless"), expected)


def test_a_model_may_be_made_in_inference_mode():
    """PyTorch does not count writes to its weights."""
    found = []
    for mode in (torch.inference_mode, torch.no_grad):
        torch.manual_seed(0)
        with mode():
            model = Own()
            found.append(outputs(bank_of(model), model))
    assert torch.equal(*found)


def test_a_weight_that_no_adapter_in_use_changes_does_not_matter():
    model = Own()
    bank = bank_of(model)
    bank.add("first", adapter(model, None, modules=["body.0.query"]))
    with torch.no_grad():
        model.body[1].value.weight.add_(1)
    outputs(bank, model, "first")
    with pytest.raises(ValueError, match=r"the weight of body\.1\.value has changed"):
        bank.use("a").__enter__()
    bank.remove("a")
    bank.remove("headless")
    bank.add("again", adapter(model, None))
    outputs(bank, model, "again")


def test_a_bank_can_be_used_under_transforms():
    torch.manual_seed(0)
    model = Own()
    bank = bank_of(model)

    def loss(state):
        with bank.use("a"):
            return torch.func.functional_call(model, state, (IDS,)).sum()

    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.func.grad(loss)(state)
    several = {name: torch.stack([value, value]) for name, value in state.items()}
    found = torch.func.vmap(loss)(several)
    # A sum of many numbers, rounded in another order.
    torch.testing.assert_close(found[0], loss(state), rtol=1e-4, atol=1e-4)


def test_a_part_without_an_adapter_may_be_replaced_by_a_traced_one():
    model = Own()
    bank = bank_of(model)
    expected = outputs(bank, model)
    model.body[0].value = torch.jit.trace(model.body[0].value, torch.ones(2, WIDTH))
    torch.testing.assert_close(outputs(bank, model), expected)


def test_a_bank_whose_adapters_were_removed_accepts_another_base():
    model = Own()
    bank = bank_of(model)
    before = outputs(bank, model)
    for name in bank.names:
        bank.remove(name)
    model.body = Own(seed=1).body
    mine = adapter(model, fingerprint(without_head(model.state_dict())))
    bank.add("a", mine)
    found = outputs(bank, model)
    again = lora.AdapterBank(copy.deepcopy(model))
    again.add("a", mine)
    assert torch.equal(found, outputs(again, again._model))
    assert not torch.equal(found, before)


@pytest.mark.parametrize("drop", [lambda bank: bank.close(), lambda bank: bank.remove("a")])
def test_a_bank_holds_no_references_that_no_adapter_needs(drop):
    model = Own()
    bank = lora.AdapterBank(model)
    bank.add("a", adapter(model, None))
    outputs(bank, model)
    layer = model.body[0]
    held = (layer, layer.query, layer.query.weight, model.score, bank._adapters["a"])
    refs = [weakref.ref(each) for each in held]
    drop(bank)
    del held
    model.body[0], model.score, layer = Layer(), nn.Linear(WIDTH, 3), None
    gc.collect()
    assert [each() for each in refs] == [None] * len(refs)


def test_after_a_removal_the_modules_of_other_adapters_are_still_compared():
    model = Own()
    bank = bank_of(model)
    bank.add("first", adapter(model, None, head=False, modules=["body.0.query"]))
    bank.remove("a")
    bank.remove("headless")
    model.score = nn.Linear(WIDTH, 3)  # for which a removed adapter had a head
    outputs(bank, model, "first")
    with torch.no_grad():
        model.body[0].query.weight.add_(1)
    with pytest.raises(ValueError, match=r"the weight of body\.0\.query has changed"):
        bank.use("first").__enter__()
    model.body[0] = Layer()
    with pytest.raises(ValueError, match=r"body\.0 has been replaced"):
        bank.use("first").__enter__()
