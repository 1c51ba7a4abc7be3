"""LoRA with gradient checkpointing, compilation, device maps, and several processes."""

import copy
import sys

import accelerate
import pytest
import torch
import torchvision
from diffusers.hooks import apply_layerwise_casting
from models import BY_NAME, output_of, train
from ours import R, assert_close, step, with_lora
from theirs import adapter_of
from torch import nn
from two_processes import UNITS, WRAPPERS, batches_of, take_steps, train_all_on_two

import loralib as lora

PLAIN_AND_DORA = pytest.mark.parametrize("variant", ["lora", "dora"])
COMPILED = ["qwen2", "gpt2", "gemma", "bert", "vit", "timm_resnet", "attention", "encoder"]
CHECKPOINTED = ["llama", "gpt2", "bert", "t5", "vit"]


# ------------------------------------------------------------------------------------------------
# Checkpointing
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.parametrize("reentrant", [False, True])
@PLAIN_AND_DORA
def test_gradient_checkpointing_gives_the_same_gradients(name: str, variant: str, reentrant: bool):
    case = BY_NAME[name]
    model = with_lora(case, variant, lora_dropout=0.3 if "embed" not in str(case.targets) else 0.0)
    torch.manual_seed(0)
    output, grads = step(model, case.batch())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:  # whose segments need an input that requires a gradient
        model.enable_input_require_grads()
    torch.manual_seed(0)
    own_output, own_grads = step(train(model), case.batch())
    assert_close(own_output, output)
    assert own_grads.keys() == grads.keys()
    for tensor_name, grad in grads.items():
        assert_close(own_grads[tensor_name], grad, what=tensor_name)


# ------------------------------------------------------------------------------------------------
# Layerwise casting
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float8_e4m3fn])
def test_diffusers_casts_the_layers_without_lora(storage: torch.dtype):
    """The guide's way: casting A and B as well would break the backward pass."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)).bfloat16()
    names = lora.add_lora(model, ["0", "3"], r=2)
    for name in names:
        nn.init.normal_(model.get_submodule(name).lora_B)
    expected, x = copy.deepcopy(model).float(), torch.randn(4, 8)
    with torch.no_grad():
        for parameter in expected[2].parameters():
            parameter.copy_(parameter.to(storage))
    apply_layerwise_casting(model, storage, torch.float32, skip_modules_classes=(lora.LoRALayer,))
    outputs = []
    for each in (model, expected):
        outputs.append(each(x))
        outputs[-1].square().sum().backward()
    assert model[0].weight.dtype is torch.bfloat16
    assert model[2].weight.dtype is storage
    assert_close(*outputs)
    for name in names:
        for factor in ("lora_A", "lora_B"):
            pair = (getattr(each.get_submodule(name), factor).grad for each in (model, expected))
            assert_close(*pair, what=f"{name}.{factor}")


# ------------------------------------------------------------------------------------------------
# Modules that are not called
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_modules_that_are_never_called_are_named(variant: str, tmp_path):
    model = torchvision.models.SwinTransformer(
        [4, 4], 8, [1, 1], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=3
    )
    lora.add_lora(model, "all-linear", r=2, variant=variant, exclude=["head", "reduction"])
    optimizer = torch.optim.AdamW(lora.parameter_groups(model, lr=0.01))
    for _ in range(3):
        model(torch.ones(2, 3, 32, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    remark = lora.save_adapter(model, tmp_path / "a.safetensors")[-1]
    assert remark.startswith(
        "the updates of 4 of 8 modules are zero (features.1.0.attn.qkv … and 3"
    )


# ------------------------------------------------------------------------------------------------
# Compilation
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPILED)
@PLAIN_AND_DORA
def test_compiled_models_give_the_same_results(name: str, variant: str):
    case = BY_NAME[name]
    model = with_lora(case, variant)
    output, grads = step(model, case.batch())
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    own_output, _ = step(compiled, case.batch())
    assert_close(own_output, output)
    for name, grad in grads.items():
        assert_close(model.get_parameter(name).grad, grad, what=name)
    with torch.no_grad():
        assert_close(output_of(compiled.eval(), case.batch()), output)


def test_a_compiled_model_is_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    for wrapped in (torch.compile(model), nn.DataParallel(model)):
        with pytest.raises(
            ValueError, match=r"\(OptimizedModule|DataParallel\): adapt the model before"
        ):
            lora.add_lora(wrapped, "0", r=2)
    model.compile()
    with pytest.raises(ValueError, match="compiled already"):
        lora.add_lora(model, "0", r=2)


# ------------------------------------------------------------------------------------------------
# Device maps
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "resnet", "convolutions"])
@PLAIN_AND_DORA
@torch.no_grad()
def test_an_adapted_model_is_dispatched_by_accelerate(name: str, variant: str):
    case = BY_NAME[name]
    model = with_lora(case, variant).eval()
    output = output_of(model, case.batch())
    accelerate.cpu_offload(model, execution_device="cpu")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    for _ in range(2):
        assert_close(output_of(model, case.batch()), output)


def test_a_dispatched_model_is_refused():
    case = BY_NAME["qwen2"]
    model = accelerate.cpu_offload(case.build(), execution_device="cpu")
    classes = [type(module) for module in model.modules()]
    with pytest.raises(
        TypeError, match="q_proj has a forward of its own, set by a device map's hooks"
    ) as error:
        lora.add_lora(model, case.targets, r=R)
    assert "\n" not in str(error.value)
    assert [type(module) for module in model.modules()] == classes


# ------------------------------------------------------------------------------------------------
# Layers within a model class
# ------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_from_pretrained_initializes_lora_layers_of_a_model_class(tmp_path, monkeypatch):
    base = BY_NAME["bert"].build().eval()
    base.save_pretrained(tmp_path / "base")
    attention = type(base.bert.encoder.layer[0].attention.self)

    class Adapted(attention):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            for name in ("query", "value"):
                plain = getattr(self, name)
                setattr(self, name, lora.Linear(plain.in_features, plain.out_features, r=R))

    monkeypatch.setattr(sys.modules[attention.__module__], attention.__name__, Adapted)
    batch = BY_NAME["bert"].batch()
    model = type(base).from_pretrained(tmp_path / "base").eval()
    state = lora.lora_state_dict(model)
    assert len(state) == 4 * len(base.bert.encoder.layer)
    assert all(bool(t.any()) == name.endswith("lora_A") for name, t in state.items())
    assert_close(output_of(model, batch), output_of(base, batch))
    for tensor in state.values():
        nn.init.normal_(tensor, std=0.1)
    model.save_pretrained(tmp_path / "tuned")
    again = type(base).from_pretrained(tmp_path / "tuned").eval()
    assert_close(output_of(again, batch), output_of(model, batch))


# ------------------------------------------------------------------------------------------------
# Several processes
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=WRAPPERS)
def trained_on_two(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return train_all_on_two(request.param, ["lora", "dora"], folder)


@pytest.mark.parametrize("name", UNITS)
@PLAIN_AND_DORA
def test_two_processes_train_as_one(name: str, variant: str, trained_on_two):
    case = BY_NAME[name]
    alone = with_lora(case, variant)
    take_steps(alone, batches_of(case))
    adapter, output = trained_on_two[f"{name} {variant}"]
    expected = adapter_of(alone)
    start = adapter_of(with_lora(case, variant))
    assert adapter.keys() == expected.keys()
    for tensor_name, tensor in expected.items():
        moved = (tensor - start[tensor_name]).detach()
        assert_close(adapter[tensor_name] - start[tensor_name], moved, 1e-4, tensor_name)
    with torch.no_grad():
        assert_close(output, output_of(alone.eval(), case.batch()))
