"""Tests of LoRA layers' weights: saved, copied and merged, for every kind of layer."""

import copy
import functools
import pickle

import pytest
import torch
from layer_cases import (
    CASES,
    WITH_DROPOUT,
    base_of,
    bits,
    built,
    close,
    randomised,
    reference,
    run_plain,
    same_as_plain,
    trainable,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.func import functional_call
from torch.nn.utils import prune

import loralib as lora

# ---- The frozen weight, and what is saved ----


def test_the_frozen_weight_stays_bit_exact(case, tmp_path):
    layer, x = built(case), case.x()
    before = bits(layer)
    optimizer = torch.optim.AdamW(trainable(layer).values(), lr=0.1)
    for _ in range(3):
        layer.train()
        layer(x).sum().backward()
        optimizer.step()
        layer.eval()
        with torch.no_grad():
            layer(x)
        torch.save(layer.state_dict(), tmp_path / "state.pt")
        layer.to("cpu").to(torch.float32)
        layer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        layer = copy.deepcopy(layer)
        layer(x)
        optimizer = torch.optim.AdamW(trainable(layer).values(), lr=0.1)
    assert torch.equal(bits(layer), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_weight_stays_bit_exact_after_use_in_float32(case, dtype):
    layer, x = built(case).to(dtype), case.x()
    before = bits(layer)
    for _ in range(3):
        layer.float().eval()
        with torch.no_grad():
            layer(x)
        layer.train().to(dtype)
    assert torch.equal(bits(layer), before)


@pytest.mark.parametrize("saved_in", [True, False])
@pytest.mark.parametrize("loaded_in", [True, False])
def test_state_dicts_are_the_same_in_both_modes(case, saved_in, loaded_in):
    layer, other, x = built(case), built(case), case.x()
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    with torch.no_grad():
        expected = layer(x)
        layer.train(saved_in)(x)
        other.train(loaded_in)(x)
        torch.testing.assert_close(layer.state_dict(), state, atol=0, rtol=0)
        other.load_state_dict(layer.state_dict(), strict=True)
        for mode in (loaded_in, True, False):
            close(other.train(mode)(x), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copied_layer_is_complete_and_independent(case, copied):
    layer, x = built(case).eval(), case.x()
    with torch.no_grad():
        expected = layer(x)
        other = copied(layer)
        assert other._merged_copy is None
        close(other(x), expected)
        randomised(other)
        close(other(x), reference(other, x))
        close(layer(x), expected)


# ---- The merged copy is never out of date ----


def step(**kwargs):
    def change(layer):
        layer.lora_A.grad = torch.ones_like(layer.lora_A)
        torch.optim.AdamW([layer.lora_A], lr=0.3, **kwargs).step()

    return change


def assign_data(layer):
    layer.lora_B.data = layer.lora_B.data + 1


def assign_parameter(layer):
    layer.lora_B = nn.Parameter(layer.lora_B.detach() + 1)


def load(layer, assign=False):
    state = {name: value * 1.5 for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=assign)


CHANGES = {
    "step": step(foreach=False),
    "foreach-step": step(foreach=True),
    "load": load,
    "load-assign": lambda layer: load(layer, assign=True),
    "assign-data": assign_data,
    "assign-parameter": assign_parameter,
    "base-in-place": lambda layer: base_of(layer).weight.detach().mul_(2),
    "base-data-then-eval": lambda layer: (base_of(layer).weight.data.mul_(2), layer.eval()),
    "cast": lambda layer: layer.bfloat16().float(),
    "cast-part": lambda layer: base_of(layer).bfloat16().float(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_merged_copy_follows_every_change(case, change, mode):
    layer, x = built(case).eval(), case.x()
    with mode():
        before = layer(x)
        made = layer._merged_copy
        layer(x)
        assert layer._merged_copy is made  # it is reused
    change(layer)
    with mode():
        assert not torch.allclose(layer(x), before, atol=1e-4)
        close(layer(x), reference(layer, x))


def test_the_merged_copy_follows_fused_steps_in_evaluation_mode(case):
    layer, x = built(case).eval(), case.x()
    optimizer = torch.optim.AdamW(trainable(layer).values(), lr=0.3, fused=True)
    for _ in range(2):
        with torch.no_grad():
            close(layer(x), reference(layer, x))
        layer(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        close(layer(x), reference(layer, x))


@pytest.mark.parametrize("frozen", [True, False])
def test_the_merged_copy_follows_writes_through_data(case, frozen):
    """As in ema-pytorch, torch_ema and TRL, which update averages of weights in this way."""
    layer, x = built(case).requires_grad_(not frozen).eval(), case.x()
    with torch.no_grad():
        layer(x)
        for tensor in (layer.lora_A, layer.lora_B):
            tensor.data.mul_(0.4).add_(torch.ones_like(tensor), alpha=0.6)
            close(layer(x), reference(layer, x))


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"variant": "dora"}, "lora_magnitude_vector"), ({"initialization": "pissa"}, "lora_A_start")],
)
def test_a_merged_copy_follows_writes_to_an_update_s_other_tensors(settings, name):
    layer, x = built(CASES["linear"], **settings).eval(), CASES["linear"].x()
    with torch.no_grad():
        layer(x)
        assert not layer._merged_copy.weight.requires_grad
        getattr(layer, name).data.mul_(2)
        close(layer(x), layer.train()(x))


def test_the_merged_copy_follows_writes_by_another_process(case):
    """Shared memory changes, but the tensor's version in this process does not."""
    layer, x = built(case).eval(), case.x()
    layer.share_memory()
    with torch.no_grad():
        layer(x)
        layer.lora_B.numpy()[...] *= 2
        close(layer(x), reference(layer, x))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_merged_copy_follows_a_fused_step_after_a_forward_since_the_backward(case, kind):
    layer, x = built(case).eval(), case.x()
    optimizer = kind(trainable(layer).values(), lr=0.1, fused=True)
    layer(x).square().sum().backward()
    with torch.no_grad():
        layer(x)  # makes the merged copy, such as for a log
        optimizer.step()
        close(layer(x), reference(layer, x))


@torch.no_grad()
def test_the_address_of_a_weight_with_a_merged_copy_is_not_given_to_another():
    """Not after a replacement through `.data` either: the copy would seem to be of that one."""
    layer = lora.Linear(4, 3, r=2).eval()
    layer(torch.ones(1, 4))
    old = layer.weight.data_ptr()
    layer.weight.data = layer.weight.data.clone()
    assert layer._merged_copy.alias.data_ptr() == old


def test_a_frozen_layer_keeps_its_merged_copy_while_another_model_is_trained():
    layer, x = built(CASES["linear"]).eval().requires_grad_(False), CASES["linear"].x()
    other = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([other], lr=0.1)
    copies = []
    for _ in range(2):
        layer(x)
        copies.append(layer._merged_copy)
        other.sum().backward()
        optimizer.step()
    assert copies[0] is copies[1]


@pytest.mark.parametrize("name", ["lora_A", "lora_B", "lora_magnitude_vector"])
def test_a_layer_follows_a_parametrization_of_its_update(name):
    layer, x = built(CASES["linear"], variant="dora").eval(), CASES["linear"].x()
    torch.nn.utils.parametrize.register_parametrization(layer, name, nn.Tanh())
    with torch.no_grad():
        layer(x)
        layer.parametrizations[name].original.mul_(3)
        close(layer(x), layer.train()(x))


def test_a_layer_follows_the_pruning_of_its_magnitudes():
    layer, x = built(CASES["linear"], variant="dora").eval(), CASES["linear"].x()
    with torch.no_grad():
        layer(x)
        prune.random_unstructured(layer, "lora_magnitude_vector", amount=3)
        close(layer(x), layer.train()(x))


def test_a_layer_follows_a_change_of_its_scaling(case):
    layer, x = built(case).eval(), case.x()
    with torch.no_grad():
        layer(x)
        layer.scaling = 0
        close(layer(x), run_plain(layer, x, base_of(layer).weight))


def test_a_layer_made_in_inference_mode_computes(case):
    with torch.inference_mode():
        layer, x = built(case).eval(), case.x()
        close(layer(x), reference(layer, x))


def test_a_layer_whose_weight_alone_was_assigned_in_inference_mode_computes(case):
    layer, x = built(case).eval(), case.x()
    with torch.inference_mode():
        base = base_of(layer)
        base._parameters["weight"] = nn.Parameter(base.weight * 2, requires_grad=False)
    with torch.no_grad():
        close(layer(x), reference(layer, x))


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_a_merged_copy_made_in_inference_mode_can_be_used_by_autograd(name):
    layer, x = built(CASES[name]).requires_grad_(False).eval(), CASES[name].x()
    with torch.inference_mode():
        layer(x)
    made = layer._merged_copy
    x.requires_grad = True
    layer(x).sum().backward()
    assert layer._merged_copy is made
    assert x.grad.isfinite().all()


def test_another_thread_may_drop_the_merged_copy_before_it_is_used():
    class Layer(lora.Linear):
        def __setattr__(self, name, value):
            super().__setattr__(name, None if name == "_merged_copy" else value)

    layer = randomised(Layer(4, 4, r=2)).eval()
    with torch.no_grad():
        assert torch.equal(layer._merged_weight(), layer._merge())


@pytest.mark.parametrize("change", [lambda layer: layer.train(), lambda layer: layer.half()])
def test_the_merged_copy_is_dropped_on_training_or_casting(case, change):
    layer = built(case).eval()
    with torch.no_grad():
        layer(case.x())
    assert layer._merged_copy is not None
    change(layer)
    assert layer._merged_copy is None


def test_on_other_devices_an_optimizers_step_renews_the_merged_copy():
    """A step may have updated a frozen average of weights, and comparing values would need a wait.

    The meta device, which has no values, stands for such a device.
    """
    layer, x = built(CASES["linear"]).requires_grad_(False).to("meta").eval(), torch.ones(3, 6)
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    copies = []
    for step in (lambda: None, lambda: None, torch.optim.SGD([other], lr=0.1).step):
        step()
        layer(x.to("meta"))
        copies.append(layer._merged_copy)
    assert copies[0] is copies[1]
    assert copies[1] is not copies[2]


@pytest.mark.parametrize("trained", ["weight", "lora_"])
def test_after_a_step_the_merged_copy_follows_writes_to_the_weight_through_data(case, trained):
    layer, x = built(case).eval(), case.x()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(trained in name)
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    with torch.no_grad():
        layer(x)
        base_of(layer).weight.data.mul_(2)
    torch.optim.SGD([other], lr=0.1).step()
    with torch.no_grad():
        close(layer(x), reference(layer, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex128])
@torch.no_grad()
def test_a_merged_copy_with_nan_or_complex_values_is_reused(dtype):
    layer = lora.Linear(6, 4, r=2, dtype=dtype).eval()
    if dtype is not torch.complex128:
        layer.lora_A[0, 0] = torch.nan
    layer(torch.ones(3, 6, dtype=dtype))
    made = layer._merged_copy
    layer(torch.ones(3, 6, dtype=dtype))
    assert layer._merged_copy is made is not None


# ---- Where no merged copy is kept ----


def assert_computes_without_copy(layer, x, expected):
    with torch.no_grad():
        close(layer(x), expected)
    assert layer._merged_copy is None


def test_no_copy_is_kept_if_tensors_are_supplied_for_each_call(case):
    layer, x = built(case).eval(), case.x()
    expected = reference(layer, x)
    held = {name: p.detach() for name, p in layer.named_parameters()}
    with torch.no_grad():
        close(functional_call(layer, held, (x,)), expected)
    assert layer._merged_copy is None
    layer.forward = functools.partial(layer.forward)  # like hooks that offload weights
    assert_computes_without_copy(layer, x, expected)


def test_no_copy_is_kept_of_tensor_subclasses(case):
    """DTensor and quantized tensors, for example, wrap others and have no address themselves."""

    class Other(torch.Tensor):
        pass

    layer, x = built(case).eval(), case.x()
    expected = reference(layer, x)
    layer.lora_B = nn.Parameter(layer.lora_B.detach().as_subclass(Other))
    assert_computes_without_copy(layer, x, expected)


def test_no_copy_is_kept_of_fake_tensors():
    layer, x = built(CASES["linear"]).eval(), CASES["linear"].x()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        assert layer(x).shape == (3, 5, 12)
    assert layer._merged_copy is None
    with torch.no_grad():
        out = layer(x)
    assert type(out) is torch.Tensor
    close(out, reference(layer, x))


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("version", [1, 2])
def test_no_copy_is_kept_under_fsdp(one_process, version):
    model, x = nn.Sequential(built(CASES["linear"])).eval(), CASES["linear"].x()
    layer, other = model[0], copy.deepcopy(model[0])
    if version == 1:
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu)
    else:
        fully_shard(model, mesh=one_process)
    with torch.no_grad():
        for factor in (1, 3):
            other.lora_B.mul_(factor)
            state = {name: factor * t for name, t in model.state_dict().items() if "lora_B" in name}
            model.load_state_dict(state, strict=False)
            close(model(x), reference(other, x))
            assert layer._merged_copy is None


# ---- merge ----


def test_merge_returns_the_plain_layer_with_the_merged_weight(case):
    layer, plain, x = built(case), case.plain(), case.x()
    before = bits(layer)
    state = torch.get_rng_state()
    merged = lora.merge(layer.eval())
    assert torch.equal(torch.get_rng_state(), state)
    assert type(merged) is type(plain)
    assert repr(merged) == repr(plain)
    assert merged.training is False
    plain.load_state_dict(merged.state_dict(), strict=True)
    close(plain(x), reference(layer, x))
    assert torch.equal(bits(layer), before)
    assert merged.weight.is_contiguous()
    assert merged.weight.requires_grad is False


@pytest.mark.parametrize("r", [0, 2])
def test_merge_keeps_an_embeddings_other_settings(r):
    settings = {"padding_idx": 1, "scale_grad_by_freq": True, "sparse": True}
    settings |= {} if r else {"max_norm": 2.0, "norm_type": 1.0}  # these change the weight
    merged = lora.merge(lora.Embedding(7, 5, r=r, **settings))
    assert {name: getattr(merged, name) for name in settings} == settings


def test_merge_of_rank_0_shares_the_weights(case):
    layer, x = case.make(r=0), case.x()
    merged = lora.merge(layer)
    assert type(merged) is type(case.plain())
    same_as_plain(layer, layer(x), merged(x))
    assert merged.weight.data_ptr() == base_of(layer).weight.data_ptr() or layer.fan_in_fan_out
