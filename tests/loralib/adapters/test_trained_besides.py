"""Tests that what is trained besides LoRA is saved, also if frozen since, tied, or wrapped."""

import copy
from contextlib import nullcontext

import pytest
import torch
from adapted_models import CASES, IDS, run_suggested_save, tied
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import loralib as lora
from loralib.adapters.formats import read_adapter
from loralib.adapters.merging import merge_into
from loralib.adapters.saving import adapter_of
from loralib.errors import CheckpointError
from loralib.trained import note_trained, noted

HEAD = CASES["head"]


def reloaded(path, case=HEAD):
    """The outputs of the plain model with the adapter from a file."""
    model = case.build()
    lora.load_adapter(model, path)
    return model.eval()(*case.inputs)


# ---- frozen since ----

FREEZES = {
    "all": lambda model: model.requires_grad_(False),
    "all but LoRA": lora.mark_only_lora_as_trainable,
}


@pytest.mark.parametrize("freeze", FREEZES.values(), ids=FREEZES)
@pytest.mark.parametrize("name", ["head", "biases", "own biases"])
def test_parameters_that_were_frozen_before_saving_are_saved(tmp_path, name, freeze):
    case = CASES[name]
    model = case.adapted()
    expected = adapter_of(model).tensors
    freeze(model)
    path = tmp_path / "a.safetensors"
    lora.save_adapter(copy.deepcopy(model), path)
    assert read_adapter(path).tensors.keys() == expected.keys()
    torch.testing.assert_close(reloaded(path, case), model.eval()(*case.inputs))


def test_parameters_from_a_loaded_adapter_are_saved_again(tmp_path):
    lora.save_adapter(HEAD.adapted(), tmp_path / "a.safetensors")
    model = HEAD.build()
    lora.load_adapter(model, tmp_path / "a.safetensors")
    model.requires_grad_(False)
    lora.save_adapter(model, tmp_path / "b.safetensors")
    torch.testing.assert_close(reloaded(tmp_path / "b.safetensors"), model(*HEAD.inputs))


def test_a_parameter_of_the_top_module_is_noted_by_its_name():
    model = nn.Linear(4, 4)
    note_trained(model, ["weight"])
    assert noted(model) == {"weight": None}


def test_after_merging_only_new_lora_is_in_the_adapter():
    model = HEAD.adapted()
    lora.merge(model)
    lora.add_lora(model, "out", r=2)
    assert all("lora_" in name for name in adapter_of(model).tensors)


def test_an_adapter_must_replace_all_parameters_from_an_earlier_one(tmp_path):
    lora.save_adapter(HEAD.adapted(), tmp_path / "with.safetensors")
    lora.save_adapter(HEAD.adapted(modules_to_train=[]), tmp_path / "without.safetensors")
    model = HEAD.build()
    lora.load_adapter(model, tmp_path / "with.safetensors")
    before = model(*HEAD.inputs)
    with pytest.raises(CheckpointError, match=r"without\.safetensors: lacks norm\.bias, which"):
        lora.load_adapter(model, tmp_path / "without.safetensors")
    assert torch.equal(model(*HEAD.inputs), before)
    lora.load_adapter(model, tmp_path / "with.safetensors")


def test_parameters_from_an_adapter_may_be_replaced_by_the_bases(tmp_path):
    lora.save_adapter(HEAD.adapted(), tmp_path / "with.safetensors")
    lora.save_adapter(HEAD.adapted(modules_to_train=[]), tmp_path / "without.safetensors")
    model = HEAD.build()
    lora.load_adapter(model, tmp_path / "with.safetensors")
    lora.remove_lora(model)
    model.load_state_dict(HEAD.build().state_dict())
    lora.load_adapter(model, tmp_path / "without.safetensors")
    expected = reloaded(tmp_path / "without.safetensors")
    torch.testing.assert_close(model.eval()(*HEAD.inputs), expected)


def test_an_adapter_without_a_head_can_be_loaded_next_to_a_new_head(tmp_path):
    lora.save_adapter(HEAD.adapted(modules_to_train=[]), tmp_path / "a.safetensors")
    model = HEAD.build()
    lora.add_lora(model, r=2, lora_alpha=3, **HEAD.settings)
    lora.load_adapter(model, tmp_path / "a.safetensors")
    assert "score.weight" in adapter_of(model).tensors


# ---- tied weights ----


@pytest.mark.parametrize("target", ["last", "words"])
def test_a_tied_weight_must_be_trained_under_all_of_its_names(target):
    other = {"last": "words", "words": "last"}[target]
    model = tied()
    with pytest.raises(ValueError, match=f"{target} shares a weight with {other}, which would be"):
        lora.add_lora(model, "up", r=2, modules_to_train=target)
    assert type(model.up) is nn.Linear


@pytest.mark.parametrize("format", ["lora", "peft"])
def test_a_tied_weight_is_saved_under_all_of_its_names(tmp_path, format):
    model = tied()
    lora.add_lora(model, "up", r=2, modules_to_train=["last", "words"])
    for parameter in model.parameters():
        parameter.data += torch.rand_like(parameter) * parameter.requires_grad
    path = tmp_path / ("a.safetensors" if format == "lora" else "a")
    lora.save_adapter(model, path)
    assert {"last.weight", "words.weight"} < read_adapter(path).tensors.keys()
    loaded = tied()
    lora.load_adapter(loaded, path)
    assert loaded.last.weight is loaded.words.weight
    torch.testing.assert_close(loaded(IDS), model(IDS))


@pytest.mark.parametrize("way", ["load", "merge", "bank"])
@pytest.mark.parametrize("file", ["a.safetensors", "a.bin"])
@pytest.mark.parametrize(("trained", "other"), [("last", "words"), ("words", "last")])
def test_a_weight_that_was_not_tied_in_training_is_its_module_s_alone(
    tmp_path, trained, other, file, way, caplog
):
    own, model = tied(), tied()
    own.last.weight = nn.Parameter(own.last.weight.detach().clone())
    lora.add_lora(own, "up", r=2, lora_alpha=2, modules_to_train=trained)
    for parameter in own.parameters():
        parameter.data += torch.rand_like(parameter) * parameter.requires_grad
    lora.save_adapter(own, tmp_path / file)
    adapter = read_adapter(tmp_path / file, lora_alpha=2)
    if way == "bank":
        bank = lora.AdapterBank(model)
        bank.add("a", adapter)
        assert bank._adapters["a"].heads.keys() == {trained}
    elif way == "merge":
        merge_into(model, adapter)
    else:
        lora.load_adapter(model, tmp_path / file, lora_alpha=2)
        warning = f"{trained}.weight no longer shares its weight with {other}.weight"
        assert warning in caplog.text
        fingerprints = [adapter_of(each).lora.base_fingerprint for each in (model, own)]
        assert fingerprints[0] == fingerprints[1]
    with torch.no_grad(), bank.use("a") if way == "bank" else nullcontext():
        torch.testing.assert_close(model(IDS), own(IDS), rtol=1e-4, atol=1e-5)


class SharedBuffers(nn.Module):
    """Two modules with the same buffers, of which one is trained."""

    def __init__(self):
        super().__init__()
        self.up, self.head, self.other = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 2)
        for name, buffer in {"scale": torch.ones(2), "order": torch.tensor([1, 0])}.items():
            self.head.register_buffer(name, buffer)
            self.other.register_buffer(name, buffer)


@pytest.mark.parametrize("name", ["a.safetensors", "a.bin", "a"])
def test_buffers_that_modules_share_stay_shared_buffers(tmp_path, name):
    own, model = SharedBuffers(), SharedBuffers()
    model.load_state_dict(own.state_dict())
    lora.add_lora(own, "up", r=2, lora_alpha=2, modules_to_train="head")
    lora.save_adapter(own, tmp_path / name)
    lora.load_adapter(model, tmp_path / name, lora_alpha=2)
    for buffer in ("scale", "order"):
        assert model.head._buffers[buffer] is model.other._buffers[buffer]


# ---- wrapped ----


def wrapped(model):
    model.layers[0] = torch.compile(model.layers[0])
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(
            module, checkpoint_impl=CheckpointImpl.NO_REENTRANT
        ),
        check_fn=lambda module: module in (model.score, model.norm, model.layers[1]["out"]),
    )
    return torch.compile(model)


@pytest.mark.parametrize("settings", [{}, {"rank_pattern": {"layers.0.out": 4}}])
def test_wrapped_modules_are_saved_under_their_own_names(tmp_path, settings):
    plain = HEAD.adapted(**settings)
    expected = adapter_of(plain).tensors
    model = wrapped(copy.deepcopy(plain))
    names = list(model.state_dict())
    lora.save_adapter(model, tmp_path / "a.safetensors")
    assert read_adapter(tmp_path / "a.safetensors").tensors.keys() == expected.keys()
    assert list(model.state_dict()) == names, "saving removed wrappers"
    torch.testing.assert_close(reloaded(tmp_path / "a.safetensors"), plain.eval()(*HEAD.inputs))


# ---- other buffers and biases ----


class Odd(nn.Module):
    """A head with buffers of several types."""

    def __init__(self):
        super().__init__()
        self.up, self.score = nn.Linear(8, 8), nn.Linear(8, 3)
        self.score.register_buffer("seen", torch.arange(3))
        self.score.register_buffer("used", torch.tensor([True, False, True]))

    def forward(self, x):
        return self.score(torch.tanh(self.up(x)))


def test_buffers_of_a_trained_module_may_be_of_any_type(tmp_path):
    model = Odd()
    lora.add_lora(model, "up", r=2, modules_to_train="score")
    model.score.seen += 3
    lora.save_adapter(model, tmp_path / "a.safetensors")
    loaded = Odd()
    loaded.up.load_state_dict(model.state_dict(), strict=False)
    loaded.up.weight.data.copy_(model.up.weight)
    loaded.up.bias.data.copy_(model.up.bias)
    lora.load_adapter(loaded, tmp_path / "a.safetensors")
    assert torch.equal(loaded.score.seen, torch.arange(3) + 3)
    loaded = Odd()
    loaded.score.seen = loaded.score.seen.float()
    with pytest.raises(CheckpointError, match=r"score\.seen is \(3,\) of torch\.int64 in the file"):
        lora.load_adapter(loaded, tmp_path / "a.safetensors")


class Scaled(nn.Linear):
    """Its scale is in no parameter or buffer."""

    def __init__(self, *sizes, as_tensor=True):
        super().__init__(*sizes)
        self.scale, self.as_tensor = 1.0, as_tensor

    def get_extra_state(self):
        return torch.tensor(self.scale) if self.as_tensor else {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = float(state)

    def forward(self, x):
        return self.scale * super().forward(x)


@pytest.mark.parametrize("file", ["a.safetensors", "peft"])
def test_an_extra_state_that_is_a_tensor_is_saved_and_loaded(tmp_path, file):
    model = nn.Sequential(nn.Linear(8, 8), Scaled(8, 3))
    plain, x = copy.deepcopy(model), torch.rand(2, 8)
    lora.add_lora(model, "0", r=2, modules_to_train="1")
    model[1].scale = 3.0
    lora.save_adapter(model, tmp_path / file)
    lora.load_adapter(plain, tmp_path / file)
    assert torch.equal(plain(x), model(x))


def test_an_extra_state_that_is_not_a_tensor_is_refused_with_advice(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), Scaled(8, 3, as_tensor=False))
    lora.add_lora(model, "0", r=2)
    model[1].requires_grad_(True)
    message = r": 1\._extra_state is not a tensor .* a dict\), .* freeze it, and save again"
    with pytest.raises(CheckpointError, match=message):
        lora.save_adapter(model, tmp_path / "a.safetensors")
    model[1].requires_grad_(False)
    lora.save_adapter(model, tmp_path / "a.safetensors")


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_an_attentions_own_biases_are_trained_and_saved(tmp_path, bias):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    model = copy.deepcopy(plain)
    lora.add_lora(model, "0", r=2, bias=bias)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.rand_like(parameter) * parameter.requires_grad
    lora.save_adapter(model, tmp_path / "a.safetensors")
    lora.load_adapter(plain, tmp_path / "a.safetensors")
    x = torch.rand(3, 8)
    torch.testing.assert_close(plain[0](x, x, x)[0], model[0](x, x, x)[0])


# ---- scalings, and updates without effect ----


@pytest.mark.parametrize("name", ["scaling", "lora_alpha"])
def test_a_scaling_that_does_not_follow_from_alpha_is_refused(tmp_path, name):
    model = HEAD.adapted()
    layer = model.layers[1]["out"]
    setattr(layer, name, getattr(layer, name) / 4)
    with pytest.raises(CheckpointError, match=r"layers\.1\.out has the scaling .* together"):
        lora.save_adapter(model, tmp_path / "a.safetensors")
    layer.lora_alpha, layer.scaling = 6, 3.0
    lora.save_adapter(model, tmp_path / "a.safetensors")
    torch.testing.assert_close(reloaded(tmp_path / "a.safetensors"), model(*HEAD.inputs))


def test_changed_magnitudes_count_as_an_effect(tmp_path):
    model = HEAD.build()
    lora.add_lora(model, "out", r=2, variant="dora")
    with torch.no_grad():
        for layer in model.layers:
            layer["out"].lora_magnitude_vector[0] *= 1.001
    assert lora.save_adapter(model.eval(), tmp_path / "a.safetensors")[:-1] == []


@pytest.mark.parametrize("initialization", ["default", "pissa"])
@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_updates_without_effect_are_a_warning(tmp_path, variant, initialization, caplog):
    model = HEAD.build()
    lora.add_lora(model, "out", r=2, variant=variant, initialization=initialization)
    torch.nn.init.normal_(model.layers[0]["out"].lora_B)
    (remark,) = lora.save_adapter(model, tmp_path / "a.safetensors")[-1:]
    assert remark.startswith("the updates of 1 of 2 modules are zero (layers.1.out)")
    assert remark in caplog.text


# ---- a base that was never frozen ----


class BuiltWithLora(nn.Module):
    """A model that was built with a LoRA layer."""

    def __init__(self):
        super().__init__()
        self.words, self.up = nn.Embedding(30, 8), lora.Linear(8, 8, r=2)
        self.mid, self.last = nn.Linear(8, 8), nn.Linear(8, 3)


def train_only_head_and_lora(model):
    model.requires_grad_(False)
    for parameter in (*model.last.parameters(), model.up.lora_A, model.up.lora_B):
        parameter.requires_grad = True


def freeze_a_bias(model):
    model.up.bias.requires_grad = False


def freeze_a_layer(model):
    model.mid.requires_grad_(False)


def freeze_most_numbers(model):
    model.words.requires_grad_(False)


def mark_and_train_all(model):
    lora.mark_only_lora_as_trainable(model)
    model.requires_grad_(True)
    model.up.weight.requires_grad = False


def mark_outside(wrap):
    def prepare(model):
        lora.mark_only_lora_as_trainable(wrap(model))
        model.words.requires_grad_(True)

    return prepare


def take_marked_blocks(model):
    """Takes them out of a model and into another one, with a larger head."""
    lora.mark_only_lora_as_trainable(model)
    return nn.ModuleDict({"up": model.up, "mid": model.mid, "head": nn.Linear(8, 400)})


def remove_lora_and_build_it_again(model):
    up, model.up = model.up, nn.Linear(8, 8)
    lora.add_lora(model, "mid", r=2)
    lora.remove_lora(model)
    model.requires_grad_(True)
    model.up = up
    up.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("prepare", "warns"),
    [
        (lambda model: None, True),
        (remove_lora_and_build_it_again, True),
        (lora.mark_only_lora_as_trainable, False),
        (freeze_a_bias, True),
        (freeze_a_layer, False),
        (freeze_most_numbers, False),
        (train_only_head_and_lora, False),
        (mark_and_train_all, False),
        (mark_outside(nn.DataParallel), False),
        (mark_outside(lambda model: nn.ModuleDict({"model": model})), False),
        (take_marked_blocks, False),
        (lambda model: take_marked_blocks(nn.ModuleDict({"up": model, "mid": nn.ReLU()})), False),
    ],
)
def test_a_base_that_was_never_frozen_is_a_warning(tmp_path, caplog, prepare, warns):
    model = BuiltWithLora()
    nn.init.ones_(model.up.lora_B)
    model = prepare(model) or model
    remarks = lora.save_adapter(copy.deepcopy(model), tmp_path / "a.safetensors")
    warnings = [each for each in remarks if "most of the base, which was not frozen" in each]
    advice = "_as_trainable first, then requires_grad_(True) on what else is to be trained"
    assert all(each.endswith(advice) for each in warnings)
    assert len(warnings) == warns
    assert warnings == [record.getMessage().partition(": ")[2] for record in caplog.records]
    tensors = read_adapter(tmp_path / "a.safetensors").tensors
    besides = {name: each for name, each in tensors.items() if "lora_" not in name}
    for each in warnings:
        size = sum(tensor.numel() for tensor in besides.values())
        assert each.startswith(f"holds {len(besides)} tensors ({size:,} numbers) besides LoRA")


def test_modules_trained_by_add_lora_or_an_adapter_are_no_warning(tmp_path, caplog):
    model = HEAD.adapted(modules_to_train=["words", "norm", "score"])
    lora.save_adapter(model, tmp_path / "a.safetensors")
    model = HEAD.build()
    lora.load_adapter(model, tmp_path / "a.safetensors")
    lora.save_adapter(model, tmp_path / "b.safetensors")
    assert not caplog.records
    # After merging, it counts as a base that was never frozen.
    lora.merge(model)
    model.requires_grad_(True)
    model.words = lora.Embedding(11, 8, r=2)
    remarks = lora.save_adapter(model, tmp_path / "c.safetensors")
    assert any("mark_only_lora_as_trainable" in each for each in remarks)


# ---- a base that was trained along with LoRA, and frozen since ----


def train(model, optimizer=torch.optim.AdamW, **settings):
    """Makes two steps, on all parameters that require a gradient."""
    optimizer = optimizer(model.parameters(), lr=0.1, **settings)
    for _ in range(2):
        model(*HEAD.inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# What RoBERTa's longest names of a class and of a parameter leave of a line of 300 characters.
SPACE = 300 - len("RobertaForSequenceClassification: ")
SPACE -= len("roberta.encoder.layer.0.attention.output.LayerNorm.weight")


def remark_on_the_base(model, path):
    remarks = [each for each in lora.save_adapter(model, path) if "trained along with LoRA" in each]
    return remarks[0] if remarks else None


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "SGD": (torch.optim.SGD, {}),
}


@pytest.mark.parametrize(("optimizer", "settings"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_base_that_was_trained_along_with_lora_is_a_warning(
    tmp_path, caplog, optimizer, settings
):
    model = HEAD.adapted()
    model.requires_grad_(True)
    train(model, optimizer, **settings)
    lora.mark_only_lora_as_trainable(model)
    remark = remark_on_the_base(model, tmp_path / "a.safetensors")
    assert remark in caplog.text
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    brought = read_adapter(tmp_path / "a.safetensors").tensors
    lost = [name for name in frozen if name not in brought]
    assert remark.startswith(f"{lost[0]} and {len(lost) - 1} more were trained along with LoRA")
    assert "the adapter needs this exact base: torch.save" in remark
    assert len(remark) - len(lost[0]) < SPACE
    again = HEAD.adapted()
    again.load_state_dict(run_suggested_save(remark, model, tmp_path))
    torch.testing.assert_close(again.eval()(*HEAD.inputs), model.eval()(*HEAD.inputs))


def test_a_model_of_inference_tensors_can_be_saved(tmp_path):
    with torch.inference_mode():
        model = BuiltWithLora()
        lora.mark_only_lora_as_trainable(model)
    assert remark_on_the_base(model, tmp_path / "a.safetensors") is None


def test_an_adapted_weight_that_another_optimizer_trains_is_a_warning(tmp_path):
    model = HEAD.adapted()
    weight = model.layers[0]["out"].weight.requires_grad_(True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    model(*HEAD.inputs).square().mean().backward()
    optimizer.step()
    lora.mark_only_lora_as_trainable(model)
    remark = remark_on_the_base(model, tmp_path / "a.safetensors")
    assert remark.startswith("layers.0.out.weight was trained along with LoRA")
    assert "requires_grad_(True)" not in remark  # no adapter can hold it


@pytest.mark.parametrize(
    ("part", "which"),
    [("score", "score.weight and 1 more were"), ("score.bias", "score.bias was")],
)
def test_a_head_that_was_trained_and_frozen_again_is_a_warning_with_advice(tmp_path, part, which):
    model = HEAD.build()
    lora.add_lora(model, "out", r=2)
    name, _, bias = part.partition(".")
    trained = getattr(model, name)
    trained = (getattr(trained, bias) if bias else trained).requires_grad_(True)
    train(model)
    model.requires_grad_(False)
    remark = remark_on_the_base(model, tmp_path / "a.safetensors")
    assert remark.startswith(
        f"{which} trained along with LoRA but frozen now, so not saved: requires_grad_"
    )
    assert len(remark) - len(which.partition(" ")[0]) < SPACE
    again = HEAD.build()  # the first advice
    lora.add_lora(again, "out", r=2)
    again.load_state_dict(run_suggested_save(remark, model, tmp_path))
    torch.testing.assert_close(again.eval()(*HEAD.inputs), model.eval()(*HEAD.inputs))
    trained.requires_grad_(True)  # the other advice
    assert remark_on_the_base(model, tmp_path / "b.safetensors") is None
    torch.testing.assert_close(reloaded(tmp_path / "b.safetensors"), model.eval()(*HEAD.inputs))


def unfreeze_a_norm(model):
    """The adapter holds it, as long as it is trained."""
    model.norm.requires_grad_(True)
    train(model)


def train_with_a_rate_of_zero(model):
    model.requires_grad_(True)
    base = [p for name, p in model.named_parameters() if "lora_" not in name]
    update = [p for name, p in model.named_parameters() if "lora_" in name]
    optimizer = torch.optim.SGD([{"params": base, "lr": 0.0}, {"params": update}], lr=0.1)
    model(*HEAD.inputs).square().mean().backward()
    optimizer.step()
    lora.mark_only_lora_as_trainable(model)


def train_and_load_the_base_again(model):
    base = {name: t.clone() for name, t in model.state_dict().items() if "lora_" not in name}
    model.requires_grad_(True)
    train(model)
    lora.mark_only_lora_as_trainable(model)
    model.load_state_dict(base, strict=False)


def merge_and_adapt_again(model):
    """The model, trained as a whole, becomes another base."""
    model.requires_grad_(True)
    train(model)
    lora.merge(model)
    lora.add_lora(model, "out", r=2)
    train(model)


def remove_and_adapt_again(model):
    model.requires_grad_(True)
    train(model)
    lora.remove_lora(model)
    lora.add_lora(model, "out", r=2)
    train(model)


def move_and_load(model):
    """As if a base were loaded after LoRA was added."""
    state = {name: t.clone() for name, t in model.state_dict().items()}
    train(model.to(torch.bfloat16).to(torch.float32))
    model.load_state_dict(state)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name])


NOTHING_LOST = {
    "frozen": train,
    "norm": unfreeze_a_norm,
    "no rate": train_with_a_rate_of_zero,
    "loaded again": train_and_load_the_base_again,
    "merged": merge_and_adapt_again,
    "removed": remove_and_adapt_again,
    "moved": move_and_load,
}


@pytest.mark.parametrize("prepare", NOTHING_LOST.values(), ids=NOTHING_LOST)
def test_a_base_that_is_not_lost_is_no_warning(tmp_path, prepare):
    model = HEAD.adapted()
    prepare(model)
    assert remark_on_the_base(model, tmp_path / "a.safetensors") is None


def fail_to_add_lora(model, monkeypatch):
    """Calls add_lora, which fails after it has begun."""
    with monkeypatch.context() as patch:
        patch.setattr(lora.Linear, "reset_lora_parameters", lambda layer: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lora.add_lora(model, "out", r=2)
    model.requires_grad_(True)


@pytest.mark.parametrize("before", [lambda *_: None, fail_to_add_lora])
def test_training_a_base_before_it_has_lora_is_no_warning(tmp_path, monkeypatch, before):
    model = HEAD.build()
    before(model, monkeypatch)
    train(model)
    lora.add_lora(model, "out", r=2)
    train(model)
    assert remark_on_the_base(model, tmp_path / "a.safetensors") is None


def with_new_memory(model):
    with torch.device("meta"):
        new = HEAD.adapted()
    new.to_empty(device="cpu").load_state_dict(model.state_dict())
    return new


def assigned(model):
    with torch.device("meta"):
        new = HEAD.adapted()
    new.load_state_dict(model.state_dict(), assign=True)
    return new


@pytest.mark.parametrize("renew", [copy.deepcopy, with_new_memory, assigned])
def test_copied_or_reloaded_lora_is_recognized_in_a_step(tmp_path, renew):
    model = renew(HEAD.adapted())
    model.requires_grad_(True)
    train(model)
    lora.mark_only_lora_as_trainable(model)
    assert remark_on_the_base(model, tmp_path / "a.safetensors")
