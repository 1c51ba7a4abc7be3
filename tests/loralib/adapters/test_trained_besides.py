"""What is trained besides LoRA is saved and loaded whole: frozen since, shared, or wrapped."""

import copy

import pytest
import torch
from adapted_models import CASES, IDS, saved_as_said, tied
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import loralib as lora
from loralib.adapters.adapter import Adapter
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.metadata import LoraMetadata
from loralib.adapters.saving import adapter_of
from loralib.errors import CheckpointError, NeedsMergingError
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
def test_what_is_frozen_before_it_is_saved_is_saved(tmp_path, name, freeze):
    case = CASES[name]
    model = case.adapted()
    expected = adapter_of(model).tensors
    freeze(model)
    path = tmp_path / "a.safetensors"
    lora.save_adapter(copy.deepcopy(model), path)
    assert read_adapter(path).tensors.keys() == expected.keys()
    torch.testing.assert_close(reloaded(path, case), model.eval()(*case.inputs))


def test_what_an_adapter_has_brought_is_saved_again(tmp_path):
    lora.save_adapter(HEAD.adapted(), tmp_path / "a.safetensors")
    model = HEAD.build()
    lora.load_adapter(model, tmp_path / "a.safetensors")
    model.requires_grad_(False)
    lora.save_adapter(model, tmp_path / "b.safetensors")
    torch.testing.assert_close(reloaded(tmp_path / "b.safetensors"), model(*HEAD.inputs))


def test_a_parameter_of_the_model_itself_is_noted_by_its_name():
    model = nn.Linear(4, 4)
    note_trained(model, ["weight"])
    assert noted(model) == {"weight": None}


def test_a_merged_model_is_a_base_of_its_own():
    model = HEAD.adapted()
    lora.merge(model)
    lora.add_lora(model, "out", r=2)
    assert all("lora_" in name for name in adapter_of(model).tensors)


def test_an_adapter_has_to_replace_all_that_one_before_has_brought(tmp_path):
    lora.save_adapter(HEAD.adapted(), tmp_path / "with.safetensors")
    lora.save_adapter(HEAD.adapted(modules_to_train=[]), tmp_path / "without.safetensors")
    model = HEAD.build()
    lora.load_adapter(model, tmp_path / "with.safetensors")
    before = model(*HEAD.inputs)
    with pytest.raises(CheckpointError, match=r"without\.safetensors: lacks norm\.bias, which"):
        lora.load_adapter(model, tmp_path / "without.safetensors")
    assert torch.equal(model(*HEAD.inputs), before)
    lora.load_adapter(model, tmp_path / "with.safetensors")


def test_what_an_adapter_brought_may_be_replaced_by_the_base_s_own(tmp_path):
    lora.save_adapter(HEAD.adapted(), tmp_path / "with.safetensors")
    lora.save_adapter(HEAD.adapted(modules_to_train=[]), tmp_path / "without.safetensors")
    model = HEAD.build()
    lora.load_adapter(model, tmp_path / "with.safetensors")
    lora.remove_lora(model)
    model.load_state_dict(HEAD.build().state_dict())
    lora.load_adapter(model, tmp_path / "without.safetensors")
    expected = reloaded(tmp_path / "without.safetensors")
    torch.testing.assert_close(model.eval()(*HEAD.inputs), expected)


def test_a_head_that_is_new_may_stay_beside_an_adapter_without_one(tmp_path):
    lora.save_adapter(HEAD.adapted(modules_to_train=[]), tmp_path / "a.safetensors")
    model = HEAD.build()
    lora.add_lora(model, r=2, lora_alpha=3, **HEAD.settings)
    lora.load_adapter(model, tmp_path / "a.safetensors")
    assert "score.weight" in adapter_of(model).tensors


# ---- shared weights ----


@pytest.mark.parametrize("target", ["last", "words"])
def test_a_shared_weight_is_trained_by_all_of_its_names(target):
    other = {"last": "words", "words": "last"}[target]
    model = tied()
    with pytest.raises(ValueError, match=f"{target} shares a weight with {other}, which would be"):
        lora.add_lora(model, "up", r=2, modules_to_train=target)
    assert type(model.up) is nn.Linear


@pytest.mark.parametrize("format", ["lora", "peft"])
def test_a_shared_weight_is_saved_by_all_of_its_names(tmp_path, format):
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


def test_what_is_apart_is_not_written_where_that_cannot_be_said(tmp_path):
    """PEFT has a weight of its own for the module that it saves, also where the base shares it."""
    tensors = {"up.lora_A": torch.ones(2, 6), "up.lora_B": torch.ones(6, 2)}
    metadata = LoraMetadata(rank=2, alpha=2, targets=("up",), separate=True)
    adapter = Adapter({**tensors, "last.weight": torch.ones(9, 6)}, metadata)
    with pytest.raises(NeedsMergingError, match=r"\(separate, as in PEFT\), which this format"):
        write_adapter(tmp_path / "a.bin", adapter)
    write_adapter(tmp_path / "a.safetensors", adapter)
    assert read_adapter(tmp_path / "a.safetensors").lora.separate


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
def test_wrapped_modules_are_saved_as_what_they_are(tmp_path, settings):
    plain = HEAD.adapted(**settings)
    expected = adapter_of(plain).tensors
    model = wrapped(copy.deepcopy(plain))
    names = list(model.state_dict())
    lora.save_adapter(model, tmp_path / "a.safetensors")
    assert read_adapter(tmp_path / "a.safetensors").tensors.keys() == expected.keys()
    assert list(model.state_dict()) == names, "the wrappers are there again"
    torch.testing.assert_close(reloaded(tmp_path / "a.safetensors"), plain.eval()(*HEAD.inputs))


# ---- what could not be saved after training ----


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


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_an_attention_s_own_biases_are_biases(tmp_path, bias):
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


# ---- what an update is scaled by, and what it does ----


@pytest.mark.parametrize("name", ["scaling", "lora_alpha"])
def test_a_scaling_that_alpha_does_not_make_is_not_saved(tmp_path, name):
    model = HEAD.adapted()
    layer = model.layers[1]["out"]
    setattr(layer, name, getattr(layer, name) / 4)
    with pytest.raises(CheckpointError, match=r"layers\.1\.out has the scaling .* together"):
        lora.save_adapter(model, tmp_path / "a.safetensors")
    layer.lora_alpha, layer.scaling = 6, 3.0
    lora.save_adapter(model, tmp_path / "a.safetensors")
    torch.testing.assert_close(reloaded(tmp_path / "a.safetensors"), model(*HEAD.inputs))


def test_magnitudes_alone_are_an_effect(tmp_path):
    model = HEAD.build()
    lora.add_lora(model, "out", r=2, variant="dora")
    with torch.no_grad():
        for layer in model.layers:
            layer["out"].lora_magnitude_vector[0] *= 1.001
    assert lora.save_adapter(model.eval(), tmp_path / "a.safetensors")[:-1] == []


@pytest.mark.parametrize("initialization", ["default", "pissa"])
@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_updates_without_effect_are_named(tmp_path, variant, initialization, caplog):
    model = HEAD.build()
    lora.add_lora(model, "out", r=2, variant=variant, initialization=initialization)
    torch.nn.init.normal_(model.layers[0]["out"].lora_B)
    (remark,) = lora.save_adapter(model, tmp_path / "a.safetensors")[-1:]
    assert remark.startswith("the updates of 1 of 2 modules are zero (layers.1.out)")
    assert remark in caplog.text


# ---- a base that was never frozen ----


class Hand(nn.Module):
    """Built with a LoRA layer by hand."""

    def __init__(self):
        super().__init__()
        self.words, self.up = nn.Embedding(30, 8), lora.Linear(8, 8, r=2)
        self.mid, self.last = nn.Linear(8, 8), nn.Linear(8, 3)


def train_head_alone(model):
    model.requires_grad_(False)
    for parameter in (*model.last.parameters(), model.up.lora_A, model.up.lora_B):
        parameter.requires_grad = True


def freeze_a_bias(model):
    model.up.bias.requires_grad = False


def freeze_a_layer(model):
    model.mid.requires_grad_(False)


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
    """Out of a model into another one, with a larger head."""
    lora.mark_only_lora_as_trainable(model)
    return nn.ModuleDict({"up": model.up, "mid": model.mid, "head": nn.Linear(8, 400)})


def remove_and_build_anew(model):
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
        (remove_and_build_anew, True),
        (lora.mark_only_lora_as_trainable, False),
        (freeze_a_bias, True),
        (freeze_a_layer, False),
        (train_head_alone, False),
        (mark_and_train_all, False),
        (mark_outside(nn.DataParallel), False),
        (mark_outside(lambda model: nn.ModuleDict({"model": model})), False),
        (take_marked_blocks, False),
        (lambda model: take_marked_blocks(nn.ModuleDict({"up": model, "mid": nn.ReLU()})), False),
    ],
)
def test_a_base_that_nobody_froze_is_warned_of(tmp_path, caplog, prepare, warns):
    model = Hand()
    nn.init.ones_(model.up.lora_B)
    model = prepare(model) or model
    remarks = lora.save_adapter(copy.deepcopy(model), tmp_path / "a.safetensors")
    said = [each for each in remarks if "most of the base, which was not frozen" in each]
    way_out = "_as_trainable first, then requires_grad_(True) on what else is to be trained"
    assert all(each.endswith(way_out) for each in said)
    assert len(said) == warns
    assert said == [record.getMessage().partition(": ")[2] for record in caplog.records]
    held = read_adapter(tmp_path / "a.safetensors").tensors
    besides = {name: each for name, each in held.items() if "lora_" not in name}
    for each in said:
        size = sum(tensor.numel() for tensor in besides.values())
        assert each.startswith(f"holds {len(besides)} tensors ({size:,} numbers) besides LoRA")


def test_what_add_lora_and_an_adapter_train_besides_is_meant(tmp_path, caplog):
    model = HEAD.adapted(modules_to_train=["words", "norm", "score"])
    lora.save_adapter(model, tmp_path / "a.safetensors")
    model = HEAD.build()
    lora.load_adapter(model, tmp_path / "a.safetensors")
    lora.save_adapter(model, tmp_path / "b.safetensors")
    assert not caplog.records
    # Merged it is a base of its own, of which nothing is decided.
    lora.merge(model)
    model.requires_grad_(True)
    model.words = lora.Embedding(11, 8, r=2)
    remarks = lora.save_adapter(model, tmp_path / "c.safetensors")
    assert any("mark_only_lora_as_trainable" in each for each in remarks)


# ---- a base that was trained along with LoRA, and frozen since ----


def train(model, optimizer=torch.optim.AdamW, **settings):
    """Two steps on all that requires a gradient."""
    optimizer = optimizer(model.parameters(), lr=0.1, **settings)
    for _ in range(2):
        model(*HEAD.inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# What a line of 300 characters leaves beside RoBERTa's longest class and name.
SPACE = 300 - len("RobertaForSequenceClassification: ")
SPACE -= len("roberta.encoder.layer.0.attention.output.LayerNorm.weight")


def remark_on_the_base(model, path):
    said = [each for each in lora.save_adapter(model, path) if "trained along with LoRA" in each]
    return said[0] if said else None


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "SGD": (torch.optim.SGD, {}),
}


@pytest.mark.parametrize(("optimizer", "settings"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_base_trained_along_with_lora_is_said_when_it_is_saved(
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
    again.load_state_dict(saved_as_said(remark, model, tmp_path))
    torch.testing.assert_close(again.eval()(*HEAD.inputs), model.eval()(*HEAD.inputs))


def test_a_model_of_inference_tensors_is_saved(tmp_path):
    with torch.inference_mode():
        model = Hand()
        lora.mark_only_lora_as_trainable(model)
    assert remark_on_the_base(model, tmp_path / "a.safetensors") is None


def test_a_weight_beneath_lora_that_another_optimizer_trains_is_said(tmp_path):
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
def test_a_head_that_was_trained_along_and_frozen_is_saved_again(tmp_path, part, which):
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
    again = HEAD.build()  # a way out
    lora.add_lora(again, "out", r=2)
    again.load_state_dict(saved_as_said(remark, model, tmp_path))
    torch.testing.assert_close(again.eval()(*HEAD.inputs), model.eval()(*HEAD.inputs))
    trained.requires_grad_(True)  # another
    assert remark_on_the_base(model, tmp_path / "b.safetensors") is None
    torch.testing.assert_close(reloaded(tmp_path / "b.safetensors"), model.eval()(*HEAD.inputs))


def unfreeze_a_norm(model):
    """Which the adapter then holds, as long as it is trained."""
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


def merge_and_adapt_anew(model):
    """The model, trained as a whole, is another base then."""
    model.requires_grad_(True)
    train(model)
    lora.merge(model)
    lora.add_lora(model, "out", r=2)
    train(model)


def remove_and_adapt_anew(model):
    model.requires_grad_(True)
    train(model)
    lora.remove_lora(model)
    lora.add_lora(model, "out", r=2)
    train(model)


def move_and_load(model):
    """As a base is loaded after it has LoRA."""
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
    "merged": merge_and_adapt_anew,
    "removed": remove_and_adapt_anew,
    "moved": move_and_load,
}


@pytest.mark.parametrize("prepare", NOTHING_LOST.values(), ids=NOTHING_LOST)
def test_a_base_that_is_not_lost_is_not_warned_of(tmp_path, prepare):
    model = HEAD.adapted()
    prepare(model)
    assert remark_on_the_base(model, tmp_path / "a.safetensors") is None


def refuse(model, monkeypatch):
    """An add_lora that fails when it has begun."""
    with monkeypatch.context() as patch:
        patch.setattr(lora.Linear, "reset_lora_parameters", lambda layer: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lora.add_lora(model, "out", r=2)
    model.requires_grad_(True)


@pytest.mark.parametrize("before", [lambda *_: None, refuse])
def test_a_base_trained_before_it_had_lora_is_a_base(tmp_path, monkeypatch, before):
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
def test_new_objects_of_lora_are_known_in_a_step(tmp_path, renew):
    model = renew(HEAD.adapted())
    model.requires_grad_(True)
    train(model)
    lora.mark_only_lora_as_trainable(model)
    assert remark_on_the_base(model, tmp_path / "a.safetensors")
