"""Tests of how models call layers: keywords, unusual inputs, heads, traces and transforms."""

import pytest
import torch
from small_nets import Net, bank_of, close, drawn
from torch import nn

import loralib as lora
from loralib.nn.fast_paths import fast_paths_off


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
def test_a_bank_passes_keywords_and_further_arguments_on(tmp_path):
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
def test_a_bank_takes_an_unbatched_input_of_a_convolution(tmp_path, build):
    """It has as many channels as positions, so that wrong shapes would broadcast too."""
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
        with pytest.raises(ValueError, match="turn off use_nested_tensor in the model's"):
            base(x, src_key_padding_mask=padding)
        base.use_nested_tensor = False
        base(x, src_key_padding_mask=padding)


@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_a_mixed_batch_is_refused_if_tokens_come_before_rows(tmp_path, batch_first):
    """With as many tokens as rows, the shapes do not show which dimension holds the rows."""
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
    """Has rows in the first dimension, but in the second one within the attention."""

    def __init__(self):
        super().__init__()
        self.a, self.pool = nn.Linear(8, 8), nn.MultiheadAttention(8, 2)

    def forward(self, x):
        h = torch.tanh(self.a(x)).transpose(0, 1)
        return self.pool(h, h, h)[0].transpose(0, 1)


@torch.no_grad()
def test_a_mixed_batch_in_layers_before_an_attention_with_tokens_first(tmp_path):
    base, x = Pooled().eval(), torch.randn(3, 5, 8)
    models = [drawn(base, ["a"]) for _ in range(2)]
    for number, model in enumerate(models):
        lora.save_adapter(model, tmp_path / f"{number}")
    with bank_of(base, tmp_path / "0", tmp_path / "1").use(["a0", "a1", "a1"]):
        close(base(x), torch.cat([models[0](x[:1]), models[1](x[1:])]))


@torch.no_grad()
def test_a_mixed_batch_is_refused_if_one_adapter_is_of_a_layer_with_tokens_first(tmp_path):
    base = nn.TransformerEncoderLayer(8, 2, 16).eval()
    for name in ("linear1", "linear2"):
        lora.save_adapter(drawn(base, [name]), tmp_path / name)
    bank = bank_of(base, tmp_path / "linear1", tmp_path / "linear2")
    message = "linear1 is given as many tokens as rows"
    with bank.use(["a0", "a1", "a0"]), pytest.raises(ValueError, match=message):
        base(torch.randn(3, 3, 8))


@torch.no_grad()
def test_a_mixed_batch_of_as_many_rows_as_features_beside_an_attention(tmp_path):
    base = nn.ModuleDict({"a": nn.Linear(3, 3), "pool": nn.MultiheadAttention(4, 2)}).eval()
    models, x = [drawn(base, ["a"]) for _ in range(2)], torch.randn(3, 3)
    for number, model in enumerate(models):
        lora.save_adapter(model, tmp_path / f"{number}")
    with bank_of(base, tmp_path / "0", tmp_path / "1").use(["a0", "a1", "a1"]):
        close(base["a"](x), torch.cat([models[0]["a"](x[:1]), models[1]["a"](x[1:])]))


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 4}])
@pytest.mark.parametrize("exclude", [[], ["out_proj"]])
def test_functional_calls_and_several_adapters_of_an_attention(sizes, exclude):
    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2, batch_first=True, **sizes)})
    # A moderate update, because softmax amplifies the rounding of large scores.
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


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_model_can_be_saved(tmp_path, training):
    model = drawn(Net(), ["a"], lora_dropout=0.5).train(training)
    torch.jit.trace(model, torch.randn(2, 6), check_trace=False).save(tmp_path / "a.pt")
    outputs, x = [], torch.randn(3, 6)
    for each in (torch.jit.load(tmp_path / "a.pt"), model):
        torch.manual_seed(0)
        with fast_paths_off():  # which have other random numbers
            outputs.append(each(x))
    close(*outputs)


def test_symbolic_traces_may_treat_layers_as_leaves():
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, lora.LoRALayer) or super().is_leaf_module(module, name)

    model, x = drawn(Net(), ["a", "b"]), torch.randn(2, 6)
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    close(traced(x), model(x))


RAGGED = [torch.ones(2, 6), torch.ones(3, 6)]


INPUTS = {
    "sparse": lambda: torch.eye(6).to_sparse(),
    "rows": lambda: torch.eye(6).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor(RAGGED),
    "jagged": lambda: torch.nested.nested_tensor(RAGGED, layout=torch.jagged),
}


# Refused in evaluation mode too.
ALWAYS_REFUSED = ("sparse", "rows")


@pytest.mark.parametrize("kind", ["nested", "jagged"])
@torch.no_grad()
def test_nested_inputs_are_accepted_in_evaluation(kind):
    layer = drawn(Net(), ["a"]).eval().a
    for rows, given in zip(layer(INPUTS[kind]()).unbind(), RAGGED, strict=True):
        torch.testing.assert_close(rows, layer(given))


@torch.no_grad()
def test_an_encoder_with_layers_that_were_replaced_by_hand_takes_a_padding_mask():
    """In evaluation it gives them nested tensors."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=2)
    for block in encoder.layers:
        block.linear1 = lora.Linear(8, 16, r=2)
        nn.init.normal_(block.linear1.lora_B)
    x, is_padding = torch.randn(2, 3, 8), torch.tensor([[False] * 3, [False, False, True]])
    expected = encoder(x, src_key_padding_mask=is_padding)
    found = encoder.eval()(x, src_key_padding_mask=is_padding)
    close(found[~is_padding], expected[~is_padding])


@pytest.mark.parametrize(
    ("kind", "training"),
    [*((kind, True) for kind in INPUTS), *((kind, False) for kind in ALWAYS_REFUSED)],
)
@torch.no_grad()
def test_other_inputs_that_are_not_dense_are_refused(kind, training):
    with pytest.raises(TypeError, match="received a nested or sparse tensor: convert it"):
        drawn(Net(), ["a"]).train(training).a(INPUTS[kind]())
