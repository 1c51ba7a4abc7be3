"""Models as other people write, wrap, compile and call them: right, or an error of one line."""

import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from compare import assert_same_bits
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

import loralib as lora
from loralib.adapters.deltas import merge_into
from loralib.errors import CheckpointError, NeedsMergingError, UnsupportedLayerError
from loralib.wrappers import unwrapped


class Net(nn.Module):
    """Two layers and a head, which may be given more than its input."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


def drawn(model, targets, **settings):
    """A copy of the model with updates that are not zero, in evaluation mode."""
    model = copy.deepcopy(model)
    lora.add_lora(model, targets, r=2, **settings)
    for name, parameter in model.named_parameters():
        if name.endswith(("lora_A", "lora_B")):
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def bank_of(model, *paths):
    bank = lora.AdapterBank(model)
    for number, path in enumerate(paths):
        bank.add(f"a{number}", lora.read_adapter(path))
    return bank


# ---- names ----


class NamedModule(nn.Module):
    """A model with a part called `module`, as DDP calls a whole model, beside one of its names."""

    def __init__(self):
        super().__init__()
        self.lin, self.module = nn.Linear(4, 4), nn.ModuleDict({"lin": nn.Linear(4, 4)})

    def forward(self, x):
        return self.module["lin"](torch.tanh(self.lin(x)))


@pytest.mark.parametrize("name", ["a.safetensors", "a"])
@pytest.mark.parametrize("target", ["module.lin", "lin"])
@torch.no_grad()
def test_a_part_called_module_is_no_wrapper(tmp_path, name, target):
    base, x = NamedModule().eval(), torch.randn(2, 4)
    model = drawn(base, [target])
    lora.save_adapter(model, tmp_path / name)
    plain = copy.deepcopy(base)
    assert lora.load_adapter(plain, tmp_path / name) == tuple(
        name for name, _ in base.named_modules() if name.endswith(target)
    )
    close(plain.eval()(x), model(x))
    with bank_of(base, tmp_path / name).use("a0"):
        close(base(x), model(x))


def test_where_a_part_called_module_cannot_be_told_from_a_wrapper(tmp_path):
    model = drawn(NamedModule(), ["module.lin"])
    with pytest.raises(NeedsMergingError, match=r"'module.', which readers of this format take"):
        lora.save_adapter(model, tmp_path / "a.bin")


def test_a_file_of_a_wrapped_model_is_of_the_model(tmp_path):
    model = drawn(Net(), ["a"])
    state = {f"module.{n}": tensor for n, tensor in lora.lora_state_dict(model).items()}
    torch.save(state, tmp_path / "a.bin")
    read = lora.read_adapter(tmp_path / "a.bin", lora_alpha=16)
    assert_same_bits(read.tensors, lora.lora_state_dict(model))


# ---- modules in several places ----


class Repeated(nn.Module):
    """One block in three places, as ALBERT has it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh())] * 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@torch.no_grad()
def test_an_update_that_a_file_has_under_several_names_is_added_once(tmp_path):
    base, x = Repeated().eval(), torch.randn(2, 6)
    model = drawn(base, ["layers.*.0"])
    torch.save(lora.lora_state_dict(model), tmp_path / "a.bin")
    adapter = lora.read_adapter(tmp_path / "a.bin", lora_alpha=16)
    assert len(adapter.tensors) == 6
    bank = lora.AdapterBank(base)
    bank.add("a", adapter)
    with bank.use("a"):
        close(base(x), model(x))
    merged = copy.deepcopy(base)
    merge_into(merged, adapter)
    close(merged(x), model(x))
    adapter.tensors["layers.1.0.lora_B"] = torch.ones(6, 2)
    with pytest.raises(CheckpointError, match=r"layers.1.0 and layers.0.0 are one module"):
        merge_into(copy.deepcopy(base), adapter)


# ---- wrappers ----


@pytest.mark.parametrize("wrap", [nn.DataParallel, AveragedModel, torch.compile])
@pytest.mark.parametrize("name", ["a.safetensors", "a"])
@torch.no_grad()
def test_wrapped_models_are_saved_loaded_and_served(tmp_path, wrap, name):
    base, x = Net().eval(), torch.randn(2, 6)
    model = drawn(base, ["a"])
    lora.save_adapter(wrap(model), tmp_path / name)
    again, served = wrap(drawn(base, ["a"])), wrap(copy.deepcopy(base))
    assert lora.load_adapter(again, tmp_path / name) == ("a",)
    close(unwrapped(again).eval()(x), model(x))
    with pytest.raises(ValueError, match="is wrapped or compiled already"):
        lora.load_adapter(served, tmp_path / name)
    if wrap is nn.DataParallel:
        with pytest.raises(ValueError, match="DataParallel computes in its own threads"):
            lora.AdapterBank(served)
        served = unwrapped(served)
    with bank_of(served, tmp_path / name).use("a0"):
        close(unwrapped(served).eval()(x), model(x))


@torch.no_grad()
def test_a_bank_refuses_the_replicas_of_its_model(tmp_path):
    """`nn.DataParallel` makes them, with the model's hooks, and calls them in other threads."""
    base, x = Net().eval(), torch.randn(2, 6)
    lora.save_adapter(drawn(base, ["a"]), tmp_path / "a")
    bank, replica = bank_of(base, tmp_path / "a"), base.a._replicate_for_data_parallel()
    replica.weight, replica.bias = base.a.weight.detach(), base.a.bias.detach()
    with bank.use("a0"), ThreadPoolExecutor() as pool:
        with pytest.raises(ValueError, match="DataParallel computes in its own threads"):
            pool.submit(replica, x).result()
        copied = copy.deepcopy(base)
        replica_of_copy = copied.a._replicate_for_data_parallel()
        replica_of_copy.weight, replica_of_copy.bias = replica.weight, replica.bias
        pool.submit(replica_of_copy, x).result()
    close(replica(x), base.a(x))
    lora.AdapterBank(pickle.loads(pickle.dumps(base)))


@pytest.mark.parametrize("way", ["outside", "in place", "another one of its class"])
@torch.no_grad()
def test_a_bank_for_a_model_that_was_compiled_and_run(tmp_path, way):
    base, x = Net().eval(), torch.randn(2, 6)
    model, run = drawn(base, ["a"]), base
    plain = model(x), base(x)
    lora.save_adapter(model, tmp_path / "a")
    if way == "in place":
        base.compile(backend="eager")
    else:
        run = torch.compile(base, backend="eager")
    (torch.compile(Net(), backend="eager") if way.startswith("another") else run)(x)
    bank = bank_of(base, tmp_path / "a")
    with bank.use("a0"):
        close(run(x), plain[0])
    close(run(x), plain[1])


# ---- calls ----


class Head(nn.Linear):
    def forward(self, input, scale=1.0, shift=0.0):
        return super().forward(input) * scale + shift


class Calls(Net):
    """Calls its layers by keywords, and its head with more than the input."""

    def __init__(self):
        super().__init__()
        self.head = Head(6, 3)

    def forward(self, x, shift=0.0):
        h = torch.tanh(self.b(input=torch.tanh(self.a(input=x))))
        return self.head(h, 3.0, shift=shift)


@torch.no_grad()
def test_layers_and_heads_are_called_as_the_model_calls_them(tmp_path):
    base, x = Calls().eval(), torch.randn(3, 6)
    models = [drawn(base, ["a", "b"], modules_to_train=["head"]) for _ in range(2)]
    for number, model in enumerate(models):
        nn.init.normal_(model.head.weight)
        lora.save_adapter(model, tmp_path / f"{number}.safetensors")
    bank = bank_of(base, *(tmp_path / f"{number}.safetensors" for number in range(2)))
    with bank.use("a1"):
        close(base(x, torch.ones(3)), models[1](x, torch.ones(3)))
    with bank.use(["a0", "a1", "a1"]):
        close(base(x), torch.cat([models[0](x[:1]), models[1](x[1:])]))
        with pytest.raises(ValueError, match="head is given several tensors: use one adapter"):
            base(x, torch.ones(3))


@pytest.mark.parametrize("build", [nn.Linear, nn.Conv1d, nn.Embedding])
def test_an_input_may_be_a_keyword(build):
    model = nn.ModuleDict({"a": build(6, 6, 1) if build is nn.Conv1d else build(6, 6)})
    x = torch.randint(6, (2, 6)) if build is nn.Embedding else torch.randn(2, 6, 6)
    before = model["a"](input=x)
    lora.add_lora(model, ["a"], r=2)
    close(model["a"](input=x), before)


@pytest.mark.parametrize("build", [nn.Conv1d, nn.Conv2d])
@torch.no_grad()
def test_an_unbatched_input_of_a_convolution_in_a_bank(tmp_path, build):
    """With as many channels as there are positions, which broadcast just as well."""
    base = nn.ModuleDict({"a": build(6, 6, 3, padding=1)}).eval()
    x = torch.randn(*[6] * base["a"].weight.dim())[0]
    model = drawn(base, ["a"], variant="dora")
    model["a"].lora_magnitude_vector.mul_(1.3)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    with bank_of(base, tmp_path / "a.safetensors").use("a0"):
        close(base["a"](x), model["a"](x))


@torch.no_grad()
def test_a_nested_tensor_is_refused_by_a_bank(tmp_path):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    base = nn.TransformerEncoder(layer, 1).eval()
    lora.save_adapter(drawn(base, ["linear1"]), tmp_path / "a")
    bank, x = bank_of(base, tmp_path / "a"), torch.randn(2, 3, 8)
    padding = torch.tensor([[False, False, False], [False, False, True]])
    with bank.use("a0"):
        with pytest.raises(ValueError, match="turn use_nested_tensor of the model's"):
            base(x, src_key_padding_mask=padding)
        base.use_nested_tensor = False
        base(x, src_key_padding_mask=padding)


@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_rows_of_a_model_that_has_tokens_first(tmp_path, batch_first):
    """As many tokens as rows: the shapes do not tell."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    for base in (layer, nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 1)})):
        model, folder = drawn(base.eval(), ["linear1"]), tmp_path / type(base).__name__
        lora.save_adapter(model, folder)
        bank, x = bank_of(base, folder, folder), torch.randn(3, 3, 8)
        call = base.encoder if base is not layer else base
        with bank.use("a0"):
            close(call(x), (model.encoder if base is not layer else model)(x))
        if batch_first:
            with bank.use(["a0", "a1", "a0"]):
                close(call(x), (model.encoder if base is not layer else model)(x))
        else:
            message = r"linear1 is given as many tokens as rows, .* name one adapter for all"
            with bank.use(["a0", "a1", "a0"]), pytest.raises(ValueError, match=message):
                call(x)


class Pooled(nn.Module):
    """Rows come first, but for the attention, which has them second."""

    def __init__(self):
        super().__init__()
        self.a, self.pool = nn.Linear(8, 8), nn.MultiheadAttention(8, 2)

    def forward(self, x):
        h = torch.tanh(self.a(x)).transpose(0, 1)
        return self.pool(h, h, h)[0].transpose(0, 1)


@torch.no_grad()
def test_rows_before_an_attention_that_has_tokens_first(tmp_path):
    base, x = Pooled().eval(), torch.randn(3, 5, 8)
    models = [drawn(base, ["a"]) for _ in range(2)]
    for number, model in enumerate(models):
        lora.save_adapter(model, tmp_path / f"{number}")
    with bank_of(base, tmp_path / "0", tmp_path / "1").use(["a0", "a1", "a1"]):
        close(base(x), torch.cat([models[0](x[:1]), models[1](x[1:])]))


# ---- attributes and weights ----


@pytest.mark.parametrize("name", ["scaling", "r", "merged", "base"])
def test_what_a_model_has_set_on_its_layer_is_not_written_over(name):
    model = Net()
    setattr(model.a, name, 0.5)
    with pytest.raises(UnsupportedLayerError, match=f"a has an attribute '{name}'"):
        lora.add_lora(model, ["a", "b"], r=2)
    assert type(model.b) is nn.Linear
    lora.add_lora(model, ["b"], r=2)


def normed(layer):
    parametrizations.weight_norm(layer)


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.3)


@pytest.mark.parametrize("change", [normed, pruned])
def test_weights_that_are_computed_from_others(tmp_path, change):
    model = drawn(Net(), ["a"])
    lora.save_adapter(model, tmp_path / "a")
    base = Net()
    change(base.a)
    for attempt in (
        lambda: lora.load_adapter(base, tmp_path / "a"),
        lambda: lora.AdapterBank(base).add("a", lora.read_adapter(tmp_path / "a")),
    ):
        with pytest.raises(CheckpointError, match="weight of a is computed from other tensors"):
            attempt()
    change(model.a)
    for undo in (lora.merge, lora.remove_lora):
        with pytest.raises(ValueError, match="a has been parametrized or pruned since"):
            undo(model)
    model(torch.randn(2, 6))


def test_a_model_without_weights_is_refused(tmp_path):
    model = drawn(Net(), ["a"])
    lora.save_adapter(model, tmp_path / "a")
    model.a.to("meta")
    for refused in (
        lambda: lora.load_adapter(Net().to("meta"), tmp_path / "a"),
        lambda: lora.AdapterBank(Net().to("meta")).add("a", lora.read_adapter(tmp_path / "a")),
        lambda: lora.save_adapter(model, tmp_path / "b"),
        lambda: lora.merge(model),
    ):
        with pytest.raises(ValueError, match=r"a(.weight)? is on the meta device: load .* first"):
            refused()


def test_a_forward_that_was_set_can_be_deleted_as_the_error_says():
    model = drawn(Net(), ["a"])
    forward, x = model.a.forward, torch.randn(2, 6)
    expected = model(x)
    model.a.forward = lambda x: 2 * forward(x)
    with pytest.raises(ValueError, match=r"\(del model\.get_submodule\('a'\)\.forward\)$"):
        lora.merge(model)
    del model.get_submodule("a").forward
    close(lora.merge(model)(x), expected)


def test_a_layer_whose_forward_hooks_have_replaced_is_not_made_plain():
    """As accelerate's do that offload weights: they keep the LoRA layer's forward."""
    model = drawn(Net(), ["a"])
    model.a.forward = functools.partial(model.a.forward)
    for undo in (lora.merge, lora.remove_lora):
        with pytest.raises(ValueError, match=r"a has a forward of its own, set .*: delete it"):
            undo(model)
    model.a._hf_hook = object()
    for undo in (lora.merge, lora.remove_lora):
        with pytest.raises(ValueError, match=r"a has a forward of its own, .*: remove these"):
            undo(model)
        assert isinstance(model.a, lora.LoRALayer)
    x = torch.randn(2, 6)
    model.a.forward = model.a.forward.func  # what these hooks leave behind
    expected = model(x)
    lora.merge(model)
    assert "forward" not in vars(model.a)
    close(model(x), expected)
    model.a.forward = model.a.forward
    lora.add_lora(model, "a", r=2)
    nn.init.normal_(model.a.lora_B)
    assert not torch.allclose(model(x), expected, atol=1e-3)


class WithState(Net):
    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        assert state == {"version": 1}


@torch.no_grad()
def test_a_state_that_is_no_tensor(tmp_path):
    base, x = WithState().eval(), torch.randn(2, 6)
    model = drawn(base, ["a"])
    lora.save_adapter(model, tmp_path / "a")
    lora.load_adapter(base, tmp_path / "a")
    assert torch.equal(base.eval()(x), model(x))


def test_a_kernel_in_channels_last_starts_from_its_weight():
    layer = lora.Conv2d(4, 4, 3, r=2, initialization="pissa")
    expected = copy.deepcopy(layer)
    layer.conv.to(memory_format=torch.channels_last)
    for each in (layer, expected):
        each.start_from_weight()
    close(layer._delta().product(), expected._delta().product())


# ---- transforms ----


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 4}])
@pytest.mark.parametrize("exclude", [[], ["out_proj"]])
def test_functional_calls_and_several_adapters_of_an_attention(sizes, exclude):
    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2, batch_first=True, **sizes)})
    # An update of moderate size: softmax multiplies the rounding of large scores.
    model = drawn(model, ["a"], exclude=exclude, lora_alpha=2)["a"]
    query = torch.randn(2, 3, 8)
    key, value = (torch.randn(2, 3, sizes.get(n, 8)) for n in ("kdim", "vdim"))
    call = (query, key, value)
    close(torch.func.functional_call(model, dict(model.named_parameters()), call), model(*call))
    updates = {n: p.detach() for n, p in model.named_parameters() if "lora_" in n}
    stacked = {n: torch.stack([p, 2 * p]) for n, p in updates.items()}
    both, _ = torch.vmap(lambda own: torch.func.functional_call(model, own, call))(stacked)
    for number in range(2):
        own = {n: tensor[number] for n, tensor in stacked.items()}
        close(both[number], torch.func.functional_call(model, own, call)[0])


def test_vectorized_jacobians():
    model = drawn(Net(), ["a", "b"])
    x = torch.randn(2, 6)
    jacobian = torch.autograd.functional.jacobian
    close(jacobian(model, x, vectorize=True), jacobian(model, x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_model_can_be_saved(tmp_path):
    model, x = drawn(Net(), ["a"]), torch.randn(2, 6)
    torch.jit.trace(model, x).save(tmp_path / "a.pt")
    close(torch.jit.load(tmp_path / "a.pt")(x), model(x))


# ---- subclasses of plain layers ----


class Called(nn.Linear):
    def __call__(self, input):
        return 2 * super().__call__(input)


class Computed(nn.Linear):
    def __getattr__(self, name):
        return super().__getattr__("weight") * 2 if name == "doubled" else super().__getattr__(name)


class Shown(nn.Linear):
    """One that changes nothing of what a model computes with it."""

    __slots__ = ()
    note: int

    def __init__(self, *args):
        super().__init__(*args)

    def __repr__(self):
        return "Shown()"


@pytest.mark.parametrize("kind", [Called, Computed])
def test_a_subclass_that_is_called_or_asked_in_another_way(kind):
    with pytest.raises(UnsupportedLayerError, match=f"0 is a .*{kind.__name__}, which has no LoRA"):
        lora.add_lora(nn.Sequential(kind(6, 4)), "0", r=2)


def test_a_subclass_that_only_shows_itself_in_another_way():
    assert lora.add_lora(nn.Sequential(Shown(6, 4)), "0", r=2) == ("0",)


# ---- the meta device ----

STARTS = [
    {},
    {"variant": "dora"},
    {"initialization": "pissa"},
    {"initialization": "orthogonal"},
    {"freeze_A": True},
]


@pytest.fixture
def empty_memory_shows():
    torch.use_deterministic_algorithms(True)  # memory that is not filled holds NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("settings", STARTS, ids=str)
@torch.no_grad()
def test_a_model_that_is_adapted_before_it_has_memory(empty_memory_shows, settings):
    base, x = Net().eval(), torch.randn(2, 6)
    with torch.device("meta"):
        model = Net()
    lora.add_lora(model, ["a", "b"], r=2, **settings)
    model.to_empty(device="cpu")
    model.load_state_dict({**model.state_dict(), **base.state_dict()})  # as FSDP's loading does
    lora.start_from_weights(model)
    close(model(x), base(x))
    nn.init.normal_(model.a.lora_B)
    before = model.a.lora_B.clone()
    if not settings.get("initialization"):
        lora.start_from_weights(model)  # there are values now
        assert torch.equal(model.a.lora_B, before)


@pytest.mark.parametrize("way", ["state", "assigned state", "adapter"])
@torch.no_grad()
def test_what_was_loaded_into_such_a_model_stays(empty_memory_shows, tmp_path, way):
    base = Net()
    trained = drawn(base, ["a"])
    lora.save_adapter(trained, tmp_path / "a")
    with torch.device("meta"):
        model = Net()
    lora.add_lora(model, ["a"], r=2)
    if way != "assigned state":
        model.to_empty(device="cpu")
    if way == "adapter":
        model.load_state_dict(base.state_dict(), strict=False)
        lora.load_adapter(model, tmp_path / "a")
    else:
        model.load_state_dict(trained.state_dict(), assign=way == "assigned state")
    assert b"_Content" not in pickle.dumps(model)  # what was noted is no part of what is saved
    lora.start_from_weights(model)
    assert_same_bits(model.state_dict(), trained.state_dict())


def without_memory_before(**settings):
    with torch.device("meta"):
        model = Net()
    lora.add_lora(model, ["a"], r=2, **settings)
    return model.to_empty(device="cpu")


def fill_in_place(state, values):
    """As torch.distributed.checkpoint.load does."""
    for name, tensor in state.items():
        tensor.copy_(values[name])


@pytest.mark.parametrize(
    "way", ["state", "own state", "half", "copied", "pickled", "by hand", "by data"]
)
@torch.no_grad()
def test_what_was_written_into_such_a_model_stays(empty_memory_shows, way):
    trained, model = drawn(Net(), ["a"]), without_memory_before()
    state = model.state_dict()
    if way == "state":
        model.load_state_dict(trained.state_dict())
    elif way == "by hand":
        for own, theirs in zip(model.parameters(), trained.parameters(), strict=True):
            own.copy_(theirs)
    elif way == "by data":
        for own, theirs in zip(model.parameters(), trained.parameters(), strict=True):
            own.data.copy_(theirs)
        model.a.lora_A = model.a.lora_A
    else:
        fill_in_place(state, trained.state_dict())
    if way == "own state":
        model.load_state_dict(state)
    elif way == "half":
        model, trained = model.half(), trained.half()
    elif way == "copied":
        model = copy.deepcopy(model)
    elif way == "pickled":
        model = pickle.loads(pickle.dumps(model))
    lora.start_from_weights(model)
    assert_same_bits(model.state_dict(), trained.state_dict())


@pytest.mark.parametrize("way", ["function", "own state", "copied", "pickled", "half"])
@torch.no_grad()
def test_what_an_incomplete_state_is_filled_up_with_is_no_value(empty_memory_shows, way):
    base, model, x = Net(), without_memory_before(), torch.randn(2, 6)
    if way == "function":
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(model, base.state_dict(), options=options)
    else:
        model.load_state_dict({**model.state_dict(), **base.state_dict()})
    if way == "copied":
        model = copy.deepcopy(model)
    elif way == "pickled":
        model = pickle.loads(pickle.dumps(model))
    elif way == "half":
        model = model.half().float()
        base = base.half().float()
    lora.start_from_weights(model)
    close(model(x), base(x))


RANDOM = ["kaiming_uniform_", "normal_", "uniform_"]


@contextmanager
def built_as_in_transformers(version):
    """5 and late 4 build on the meta device, early 4 with initializations that do nothing.

    Quantizers leave out random ones.
    """
    functions = {
        "4.40": ["constant_", "kaiming_uniform_", "normal_", "uniform_"],
        "quantizer": RANDOM,
    }.get(version, [])
    with pytest.MonkeyPatch.context() as patch, torch.device("cpu" if functions else "meta"):
        for name in functions:
            patch.setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
        yield


def load_as_transformers_does(model, state, version, initialize=lambda module: None):
    """Its `from_pretrained`: parameters, then notes of those and of modules that have values."""
    missing = model.state_dict().keys() - state.keys()
    if version in ("4.40", "quantizer"):
        model.load_state_dict(state, strict=False)
        missing = set()  # nothing is noted of parameters
    else:
        for name, old in model.state_dict(keep_vars=True).items():
            owner, _, last = name.rpartition(".")
            module = model.get_submodule(owner)
            value = torch.empty_like(old, device="cpu") if name in missing else state[name].clone()
            if version == "4.57" and name in missing:
                module.load_state_dict({last: value}, strict=False, assign=True)
                continue
            setattr(module, last, nn.Parameter(value) if isinstance(old, nn.Parameter) else value)
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name not in missing:
                tensor._is_hf_initialized = True
    for module in model.modules():
        initialize(module)
        module._is_hf_initialized = True


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("written", ["lora_A", "lora_B"])
@torch.no_grad()
def test_what_was_not_written_into_such_a_model_is_initialized(
    empty_memory_shows, written, by_data
):
    for _ in range(2):
        model = without_memory_before()
        factor = getattr(model.a, written)
        (factor.data if by_data else factor).fill_(0.125)
        lora.start_from_weights(model)
        assert (factor == 0.125).all()
        if written == "lora_A":
            assert not model.a.lora_B.any()
        else:
            assert model.a.lora_A.std() > 0


VERSIONS = ["4.40", "4.57", "5.23", "quantizer"]


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("written", [["lora_A", "lora_B"], ["lora_A"], ["lora_B"]], ids=str)
@pytest.mark.parametrize("version", VERSIONS)
@torch.no_grad()
def test_what_a_model_class_of_transformers_initializes_itself_stays(
    empty_memory_shows, version, written, by_data
):
    def initialize(module):
        for name in written if isinstance(module, lora.LoRALayer) else []:
            factor = getattr(module, name)
            (factor.data if by_data else factor.detach()).fill_(0.125)

    with built_as_in_transformers(version):
        model = nn.Sequential(lora.Linear(6, 6, r=2))
    state = nn.Sequential(nn.Linear(6, 6)).state_dict()
    with torch.enable_grad():
        load_as_transformers_does(model, state, version, initialize)
    for _ in range(2):
        assert "lora_A" not in written or (model[0].lora_A == 0.125).all()
        assert model[0].lora_A.abs().sum() > 0
        assert (model[0].lora_B == 0.125 * ("lora_B" in written)).all()
        lora.start_from_weights(model)


@pytest.mark.parametrize("version", VERSIONS)
@torch.no_grad()
def test_a_layer_that_transformers_does_not_find_in_a_file(empty_memory_shows, version):
    with built_as_in_transformers(version):
        model = nn.Sequential(nn.Linear(6, 6), lora.Linear(6, 6, r=2))
    load_as_transformers_does(model, nn.Sequential(nn.Linear(6, 6)).state_dict(), version)
    for _ in range(2):
        assert model[1].lora_A.abs().sum() > 0
        assert not model[1].lora_B.any()
        lora.start_from_weights(model)


@pytest.mark.parametrize("settings", STARTS, ids=str)
@pytest.mark.parametrize("kind", ["linear", "embedding", "convolution", "in place"])
@pytest.mark.parametrize("version", VERSIONS)
@torch.no_grad()
def test_a_model_that_transformers_loads(empty_memory_shows, settings, kind, version):
    if kind == "embedding" and "freeze_A" in settings:
        pytest.skip("its A would stay zero")
    if kind == "convolution" and "variant" in settings:
        pytest.skip("has no such variant")
    layer = {
        "linear": lora.Linear,
        "embedding": lora.Embedding,
        "convolution": functools.partial(lora.Conv1d, kernel_size=1),
        "in place": nn.Linear,
    }[kind]

    def adapted():
        if kind != "in place":
            return nn.Sequential(layer(6, 6, r=2, **settings))
        model = nn.Sequential(layer(6, 6))
        lora.add_lora(model, ["0"], r=2, **settings)
        return model

    base = nn.Sequential(layer(6, 6)).eval()
    x = torch.arange(6) if kind == "embedding" else torch.randn(1, 6, 6)
    with built_as_in_transformers(version):
        models = [adapted(), adapted()]
    load_as_transformers_does(models[0], base.state_dict(), version)
    for model in (models[0], copy.deepcopy(models[0]), pickle.loads(pickle.dumps(models[0]))):
        close(model.eval()(x), base(x))
    nn.init.normal_(models[0][0].lora_B)
    load_as_transformers_does(models[1], models[0].state_dict(), version)
    if not {"pissa", "dora"} & set(settings.values()):
        lora.start_from_weights(models[1])  # there are values
    assert_same_bits(models[1].state_dict(), models[0].state_dict())
    close(models[1].eval()(x), models[0](x))


@pytest.mark.parametrize("settings", STARTS, ids=str)
def test_a_model_that_is_adapted_where_random_initializations_do_nothing(settings):
    model, x = nn.Sequential(nn.Linear(6, 6)), torch.randn(3, 6)
    expected = model(x)
    with built_as_in_transformers("quantizer"):
        lora.add_lora(model, ["0"], r=2, **settings)
    close(model(x), expected)
    lora.start_from_weights(model)
    close(model(x), expected)
    assert model[0].lora_A.any()


@pytest.mark.parametrize("kind", [lora.Linear, lora.Embedding])
@pytest.mark.parametrize("replaced", [["kaiming_uniform_", "normal_"], RANDOM], ids=len)
def test_an_update_can_be_trained_where_random_initializations_do_nothing(
    monkeypatch, replaced, kind
):
    for name in replaced:
        monkeypatch.setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
    layer = kind(6, 6, r=2)
    assert layer.lora_A.any() or layer.lora_B.any()
    close(layer.lora_B @ layer.lora_A, torch.zeros(6, 6))


class WithoutInitialization(TorchFunctionMode):
    """As Lightning's `init_module(empty_init=True)`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", None) == "torch.nn.init":
            return (kwargs or {}).get("tensor", args[0] if args else None)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("initialization", ["default", "orthogonal"])
@torch.no_grad()
def test_a_model_that_is_built_without_initializing(empty_memory_shows, initialization):
    base, x = nn.Sequential(nn.Linear(6, 4)), torch.randn(3, 6)
    with WithoutInitialization():
        model = nn.Sequential(lora.Linear(6, 4, r=2, initialization=initialization))
    model.load_state_dict(base.state_dict(), strict=False)
    close(model(x), base(x))
    lora.start_from_weights(model)
    assert model[0].lora_A.any()
    close(model(x), base(x))
    trained = lora.Linear(6, 4, r=2)
    nn.init.normal_(trained.lora_B)
    with WithoutInitialization():
        model = nn.Sequential(lora.Linear(6, 4, r=2))
    model[0].load_state_dict(trained.state_dict())
    lora.start_from_weights(model)
    assert_same_bits(model[0].state_dict(), trained.state_dict())


@pytest.mark.parametrize("initialization", ["default", "orthogonal"])
@pytest.mark.parametrize("first", ["lora_A", "lora_B"])
@torch.no_grad()
def test_factors_that_get_memory_one_after_the_other(empty_memory_shows, first, initialization):
    with torch.device("meta"):
        layer = lora.Linear(6, 4, r=2, initialization=initialization)
    layer.load_state_dict(nn.Linear(6, 4).state_dict(), strict=False, assign=True)
    factors = {name: getattr(layer, name) for name in ("lora_A", "lora_B")}
    for name in sorted(factors, key=lambda name: name != first):
        setattr(layer, name, nn.Parameter(torch.empty_like(factors[name], device="cpu")))
        lora.start_from_weights(layer)
        assert getattr(layer, name).isfinite().all()
    assert layer.lora_A.std() > 0
    assert layer.lora_B.any() == (initialization == "orthogonal")
    close(layer.lora_B @ layer.lora_A, torch.zeros(4, 6))


@torch.no_grad()
def test_what_is_loaded_before_there_is_memory_is_no_value(empty_memory_shows):
    base, x = Net(), torch.randn(2, 6)
    with torch.device("meta"):
        model = Net()
    lora.add_lora(model, ["a"], r=2)
    with pytest.warns(UserWarning, match="which is a no-op"):
        model.load_state_dict(drawn(base, ["a"]).state_dict())
    model.to_empty(device="cpu").load_state_dict(base.state_dict(), strict=False)
    lora.start_from_weights(model)
    close(model(x), base(x))


@torch.no_grad()
def test_loading_what_is_no_dense_tensor_is_left_to_pytorch():
    model = without_memory_before()
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"expected .* or Tensor-like object"):
        model.load_state_dict(state)
    model, state = without_memory_before(), drawn(Net(), ["a"]).state_dict()
    model.load_state_dict({**state, "a.lora_A": state["a.lora_A"].to_sparse()}, assign=True)
    assert model.a.lora_A.is_sparse


# ---- tracing ----


def test_symbolic_traces_take_layers_as_leaves():
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, lora.LoRALayer) or super().is_leaf_module(module, name)

    model, x = drawn(Net(), ["a", "b"]), torch.randn(2, 6)
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    close(traced(x), model(x))


# ---- inputs and weights of other kinds ----

RAGGED = [torch.ones(2, 6), torch.ones(3, 6)]
INPUTS = {
    "sparse": lambda: torch.eye(6).to_sparse(),
    "rows": lambda: torch.eye(6).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor(RAGGED),
    "jagged": lambda: torch.nested.nested_tensor(RAGGED, layout=torch.jagged),
}
# In evaluation either.
NEVER_TAKEN = ("sparse", "rows", "nested")


@torch.no_grad()
def test_jagged_rows_in_evaluation():
    layer = drawn(Net(), ["a"]).eval().a
    for rows, given in zip(layer(INPUTS["jagged"]()), RAGGED, strict=True):
        torch.testing.assert_close(rows, layer(given))


@pytest.mark.parametrize(
    ("kind", "training"),
    [*((kind, True) for kind in INPUTS), *((kind, False) for kind in NEVER_TAKEN)],
)
@torch.no_grad()
def test_inputs_that_are_not_dense(kind, training):
    with pytest.raises(TypeError, match="is given a nested or sparse tensor: convert it"):
        drawn(Net(), ["a"]).train(training).a(INPUTS[kind]())


def test_a_layer_without_a_shape_yet_may_be_elsewhere(tmp_path):
    model = nn.Sequential(nn.Linear(6, 6), nn.LazyLinear(3))
    lora.AdapterBank(model)
    lora.add_lora(model, "0", r=2)
    lora.save_adapter(model, tmp_path / "a")
    model(torch.ones(2, 6))
    lora.save_adapter(model, tmp_path / "b")


@pytest.mark.parametrize("adapted", ["a", "in_place"])
def test_a_sum_that_float16_cannot_hold(adapted, caplog):
    model = Net().half() if adapted == "a" else nn.Sequential(lora.Linear(6, 6, r=2)).half()
    layer = model.a if adapted == "a" else model[0]
    if adapted == "a":
        lora.add_lora(model, "a", r=2)
    nn.init.constant_(layer.lora_A, 300)
    nn.init.constant_(layer.lora_B, 300)
    lora.merge(model)
    assert "weight: the merged weight is too large for float16" in caplog.text


def test_what_float16_did_not_hold_before_is_not_warned_of(caplog):
    layers = {"layer1": nn.Linear(6, 6), "layer10": nn.Linear(6, 6), "layer2": nn.Linear(6, 6)}
    model = nn.ModuleDict(layers).half()
    lora.add_lora(model, ["layer1", "layer2"], r=2)
    nn.init.constant_(model["layer10"].weight, torch.inf)
    nn.init.constant_(model["layer1"].bias, torch.inf)
    with torch.no_grad():
        model["layer2"].weight[0, 0] = torch.nan
    lora.merge(model)
    assert "too large for float16" not in caplog.text
