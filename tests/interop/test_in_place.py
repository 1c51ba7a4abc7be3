"""LoRA leaves the base's tensors, names and modules unchanged; copies; half precision."""

import copy
import io
import pickle

import pytest
import torch
from models import CASES, Case, output_of, train
from ours import ALPHA, R, assert_close, assert_same_bits, bits_of, step, to, with_lora
from theirs import adapter_of
from torch import nn

import loralib as lora

EACH = pytest.mark.parametrize("case", CASES, ids=str)
PLAIN_AND_DORA = pytest.mark.parametrize("variant", ["lora", "dora"])


def add_lora(case: Case, model: nn.Module, **settings: object) -> tuple[str, ...]:
    return lora.add_lora(model, case.targets, r=R, lora_alpha=ALPHA, **settings)


def take_steps(case: Case, model: nn.Module, count: int = 3) -> None:
    """Trains with a learning rate at which every step has a visible effect."""
    optimizer = torch.optim.AdamW(lora.parameter_groups(model, lr=0.01, lora_plus_ratio=2))
    train(model)
    for _ in range(count):
        output_of(model, case.batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def classes_of(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def attributes_of(model: nn.Module) -> dict[str, set[str]]:
    return {name: set(vars(module)) for name, module in model.named_modules()}


@EACH
@PLAIN_AND_DORA
def test_the_base_keeps_its_bits_until_lora_is_removed(case: Case, variant: str):
    # Frozen from the start: PyTorch's attention takes other kernels for weights that are trained.
    model, batch = case.build().requires_grad_(False), case.batch()
    before, parameters = bits_of(model), dict(model.named_parameters())
    modules = list(model.modules())
    with torch.no_grad():
        plain = output_of(model, batch)

    names = add_lora(case, model, variant=variant)
    assert len(names) == case.adapted
    assert_same_bits(model, before)
    assert all(dict(model.named_parameters())[name] is p for name, p in parameters.items())
    assert [module for module in model.modules() if module in set(modules)] == modules
    with torch.no_grad():
        assert_close(output_of(model, batch), plain, what="what an update starts with")

    take_steps(case, model)
    assert_same_bits(model, before)
    with torch.no_grad():
        trained = output_of(model.eval(), batch)
        assert (trained - plain).abs().max() > 1e-3
        merged = output_of(lora.merge(copy.deepcopy(model)), batch)
    assert_same_bits(model, before)
    assert_close(merged, trained)

    assert lora.remove_lora(model) == names
    assert_same_bits(model, before)
    assert list(model.state_dict()) == list(case.build().state_dict())
    assert classes_of(model) == classes_of(case.build())
    assert attributes_of(model) == attributes_of(case.build())
    with torch.no_grad():
        assert torch.equal(output_of(train(model), batch), plain)


@EACH
def test_state_dicts_have_the_bases_names_and_the_adapters(case: Case):
    base = list(case.build().state_dict())
    model = with_lora(case, "dora")
    state = model.state_dict()
    assert [name for name in state if "lora_" not in name] == base
    assert set(state) - set(base) == set(adapter_of(model))
    again = case.build()
    add_lora(case, again, variant="dora")
    again.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(output_of(again, case.batch()), output_of(model, case.batch()))


@EACH
def test_optimizers_get_only_the_adapter(case: Case):
    model = case.build()
    add_lora(case, model)
    adapter = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert adapter.keys() == adapter_of(model).keys()
    groups = lora.parameter_groups(model, lr=1e-3, lora_plus_ratio=16, weight_decay=0.1)
    grouped = [p for group in groups for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in adapter.values()}
    assert len(grouped) == len(adapter)
    assert {group["lr"] for group in groups} == {1e-3, 16e-3}


@EACH
@PLAIN_AND_DORA
def test_a_merged_models_state_dict_fits_the_plain_model(case: Case, variant: str):
    model = with_lora(case, variant)
    lora.merge(model)
    plain = case.build()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert_close(output_of(plain, case.batch()), output_of(model, case.batch()))


# ------------------------------------------------------------------------------------------------
# Copies
# ------------------------------------------------------------------------------------------------


def by_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": by_torch_save,
}


@EACH
@PLAIN_AND_DORA
@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_copies_are_independent(case: Case, variant: str, make_copy):
    model = with_lora(case, variant)
    again = make_copy(model)
    output, grads = step(again, case.batch())
    own_output, own_grads = step(model, case.batch())
    assert torch.equal(output, own_output)
    assert all(torch.equal(grads[name], grad) for name, grad in own_grads.items())
    take_steps(case, again)
    assert torch.equal(step(model, case.batch())[0], output)
    assert not torch.equal(step(again, case.batch())[0], output)
    assert lora.remove_lora(again) == lora.remove_lora(model)
    with torch.no_grad():
        assert torch.equal(output_of(again, case.batch()), output_of(model, case.batch()))


# ------------------------------------------------------------------------------------------------
# Half precision
# ------------------------------------------------------------------------------------------------

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@EACH
@PLAIN_AND_DORA
@HALF
def test_lora_is_float32_in_a_model_in_half_precision(case: Case, variant: str, dtype):
    model = case.build().to(dtype)
    before = bits_of(model)
    add_lora(case, model, variant=variant)
    assert {p.dtype for p in adapter_of(model).values()} == {torch.float32}
    output, _ = step(model, to(case.batch(), dtype))
    assert output.dtype == dtype
    assert output.isfinite().all()
    optimizer = torch.optim.SGD(lora.parameter_groups(model, lr=0.1))
    step(model, to(case.batch(), dtype))
    optimizer.step()
    assert_same_bits(model, before)


@EACH
@PLAIN_AND_DORA
@HALF
@torch.no_grad()
def test_a_model_with_lora_is_cast_to_half_precision(case: Case, variant: str, dtype):
    model = with_lora(case, variant)
    exact = output_of(model, case.batch())
    model.to(dtype)
    batch = to(case.batch(), dtype)
    assert {t.dtype for t in model.parameters()} == {dtype}
    # The error is that of merged weights in half precision, up to a few roundings.
    plain = output_of(lora.merge(copy.deepcopy(model)), batch)
    rounding = max((plain - exact).abs().max().item(), torch.finfo(dtype).eps * exact.abs().max())
    for training in (True, False):
        output = output_of(train(model) if training else model.eval(), batch)
        assert output.dtype == dtype
        assert (output - exact).abs().max() <= 5 * rounding
