"""Tests that run for every family: logits, gradients, saving and loading, merging, banks.

The expected numbers are PEFT's on upstream's models, or follow from W + alpha / r · B A.
"""

import copy
from dataclasses import replace

import pytest
import torch
from adapter_files import TARGETS
from compare import assert_close_to_rounding, assert_same_bits
from families import FAMILIES, PEFT, TERMS
from torch.func import functional_call

import loralib as lora
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.loading import load_into
from loralib.adapters.merging import merge_into
from loralib.errors import CheckpointError
from loralib.lora_layer import lora_layers
from loralib.training.precision import cast_frozen

# In the release, DeBERTa's LoRA does not reach relative positions.
FORBIDDEN = {("deberta", "release"): "reaches positions"}


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Family -> the folder of its base in the PEFT fixture."""
    root = tmp_path_factory.mktemp("bases")
    return {family.name: PEFT.write_base(root / family.name, family.name) for family in FAMILIES}


@pytest.fixture
def base(bases, family):
    return bases[family.name]


@pytest.fixture
def adapter(family, tmp_path):
    """An adapter of PEFT's, as this project reads it."""
    return read_adapter(PEFT.write_adapter(tmp_path / "pefts", family.case))


@pytest.fixture
def plain(family, base):
    """The base, without LoRA."""
    return family.open(base, None)


@pytest.fixture
def model(family, base, adapter):
    """The base with the adapter in LoRA layers."""
    return family.open(base, adapter)


def logits_of(family, model, ids=PEFT.ids, mask=PEFT.mask):
    with torch.no_grad():
        return family.logits(model, ids, mask)


def close(ours, theirs):
    assert_close_to_rounding(ours, theirs, TERMS)


def lora_tensors(model):
    return {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}


# ---- upstream's logits ----


@pytest.mark.parametrize("training", [False, True])
def test_logits_match_pefts_on_upstreams_model(family, model, plain, training):
    """Both merged, in evaluation mode, and as a separate branch, in training mode."""
    model.train(training)
    expected = PEFT.logits(family.case)
    if not training:
        close(logits_of(family, model), expected)
    close(family.logits(model, PEFT.ids, PEFT.mask), expected)
    assert (logits_of(family, plain) - expected).abs().max() > 0.1


# ---- gradients ----


@pytest.mark.parametrize("training", [False, True])
def test_gradients_match_those_of_a_dense_weight_plus_delta(family, model, plain, training):
    lora.mark_only_lora_as_trainable(model)
    model.train(training)
    layers = lora_layers(model)
    weights = dict(plain.named_parameters())
    weights |= {name: tensor for name, tensor in model.state_dict().items() if name in weights}
    trained = {}
    for name, layer in layers.items():
        A, B = (
            getattr(layer, part).detach().clone().requires_grad_() for part in ("lora_A", "lora_B")
        )
        trained |= {f"{name}.lora_A": A, f"{name}.lora_B": B}
        weight = plain.get_parameter(f"{name}.weight").detach()
        weights[f"{name}.weight"] = weight + layer.scaling * family.delta(A, B)
    expected = family.logits(_WithTensors(plain, weights), PEFT.ids, PEFT.mask)
    ours = family.logits(model, PEFT.ids, PEFT.mask)
    close(ours, expected)
    probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (expected * probe).sum().backward()
    (ours * probe).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("lora_" in name), name
        if "lora_" in name:
            theirs = trained[name].grad
            assert theirs.norm() > 0
            # Every logit adds one more term.
            assert_close_to_rounding(
                parameter.grad, theirs, TERMS + ours.numel(), magnitude=float(theirs.abs().max())
            )


class _WithTensors(torch.nn.Module):
    """A model that computes with the given tensors instead of its own."""

    def __init__(self, model, tensors):
        super().__init__()
        self.__dict__.update(model_=model, tensors=tensors)

    def forward(self, *args, **arguments):
        return functional_call(self.model_, self.tensors, args, arguments)


# ---- padding ----


@pytest.mark.parametrize("with_lora", [False, True])
def test_a_padded_batch_matches_its_rows_computed_alone(family, model, plain, with_lora):
    model = model if with_lora else plain
    batch = logits_of(family, model)
    for row, length in enumerate(PEFT.mask.sum(dim=1).tolist()):
        part = (slice(row, row + 1), slice(length))
        alone = logits_of(family, model, PEFT.ids[part], PEFT.mask[part])[0]
        close(batch[row, :length] if batch.dim() == 3 else batch[row], alone)


def test_tokens_at_padding_do_not_matter(family, model):
    other = PEFT.ids.masked_fill(PEFT.mask == 0, 7)
    close(logits_of(family, model, other), logits_of(family, model))


# ---- half precision ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_frozen_weights_may_be_in_half_precision(family, model, dtype):
    """Trained weights stay in float32, and the results are close to those in float32."""
    lora.mark_only_lora_as_trainable(model)
    cast_frozen(model, dtype)
    for parameter in model.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else dtype)
    ours, exact = family.logits(model, PEFT.ids, PEFT.mask), PEFT.logits(family.case)
    # The error grows with the root of the number of successive roundings, which is some dozens.
    assert 0 < (ours - exact).norm() < 16 * torch.finfo(dtype).eps * exact.norm()
    ours.float().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("lora_" in name), name
        assert parameter.grad is None or 0 < parameter.grad.norm() < float("inf")


# ---- save and load ----


@pytest.mark.parametrize("format", TARGETS)
def test_saving_and_loading_keeps_every_bit(family, model, base, format, tmp_path):
    saved = read_adapter(family.write(model, tmp_path))
    assert_same_bits({n: t for n, t in saved.tensors.items() if "lora_" in n}, lora_tensors(model))
    path = tmp_path / TARGETS[format]
    if (family.name, format) in FORBIDDEN:
        with pytest.raises(CheckpointError, match=FORBIDDEN[family.name, format]):
            write_adapter(path, saved, format)
        assert not path.exists()
        return
    write_adapter(path, saved, format)
    again = family.open(base, read_adapter(path, lora_alpha=saved.metadata.alpha))
    assert_same_bits(lora_tensors(again), lora_tensors(model))
    assert torch.equal(logits_of(family, again), logits_of(family, model))


@pytest.mark.parametrize("change", ["rank", "alpha", "base"])
def test_adapters_of_another_rank_alpha_or_base_are_refused(family, model, tmp_path, change):
    adapter = read_adapter(family.write(model, tmp_path))
    metadata = adapter.metadata
    other = {
        "rank": {"rank": metadata.rank + 1},
        "alpha": {"alpha": 2 * metadata.alpha},
        "base": {"base_fingerprint": "0" * 16},
    }[change]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError):
        load_into(model, replace(adapter, metadata=replace(metadata, **other)), "1" * 16)
    assert_same_bits(model.state_dict(), before)


# ---- merge ----


def test_merging_gives_the_same_logits(family, model, plain, adapter):
    adapted = {f"{name}.weight" for name in lora_layers(model)} | adapter.tensors.keys()
    expected, base = logits_of(family, model), plain.state_dict()
    merged = lora.merge(model)
    assert not lora_tensors(merged)
    close(logits_of(family, merged), expected)
    assert merged.state_dict().keys() == base.keys()
    for name, tensor in merged.state_dict().items():
        assert torch.equal(tensor, base[name]) == (name not in adapted), name


# ---- bank ----


@pytest.mark.parametrize("names", ["pefts", "pefts other pefts other", "other pefts pefts other"])
def test_a_bank_matches_a_merged_model_of_each_adapter(family, base, plain, adapter, names):
    adapters = {"pefts": adapter, "other": _with_columns_reversed(adapter)}
    own = {}
    for name, one in adapters.items():
        merged = family.open(base, None)
        merge_into(merged, one)
        own[name] = logits_of(family, merged)
    assert (own["pefts"] - own["other"]).abs().max() > 0.1
    alone = logits_of(family, plain)
    bank = lora.AdapterBank(plain)
    for name, one in adapters.items():
        bank.add(name, one)
    rows = names.split()
    with bank.use(rows[0] if len(rows) == 1 else rows):
        ours = logits_of(family, plain)
    for row in range(len(PEFT.ids)):
        close(ours[row], own[rows[row % len(rows)]][row])
    assert torch.equal(logits_of(family, plain), alone)


def _with_columns_reversed(adapter):
    """Another adapter of the same shapes: A with its columns in reverse order, and the same B."""
    tensors = {
        name: tensor.flip(1) if name.endswith("lora_A") else tensor
        for name, tensor in adapter.tensors.items()
    }
    return replace(adapter, tensors=tensors)
