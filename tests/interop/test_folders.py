"""Folders of adapters: this project loads PEFT's, and PEFT loads this project's."""

import copy
import warnings
from collections import OrderedDict
from pathlib import Path

import peft
import pytest
import torch
from models import BY_NAME, CASES, VARIANTS, Case, draw, output_of
from ours import assert_close, assert_same_bits, bits_of, with_lora
from safetensors.torch import load_file
from theirs import ALPHA, SETTINGS, adapter_of, as_computed, with_peft
from torch import Tensor, nn

import loralib as lora
from loralib.errors import CheckpointError

IN_PEFT = [(case, variant) for case in CASES for variant in case.in_peft]
ALL = [(case, variant) for case in CASES for variant in VARIANTS]
PATTERNS = {
    "rank_pattern": {"v_proj": 2, "layers.1.self_attn.q_proj": 6},
    "alpha_pattern": {"v_proj": 5, "layers.1.self_attn.q_proj": 3},
}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """An adapter's tensors by PEFT's names, without its copy of an embedding's base weight."""
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name: t for name, t in tensors.items() if not name.endswith(".base_layer.weight")}


def loaded_by_peft(case: Case, folder: Path) -> nn.Module:
    """PEFT's model of a folder, which it has to load without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out")
        return peft.PeftModel.from_pretrained(case.build(), folder, is_trainable=True)


def assert_same_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        flat = name.endswith("lora_magnitude_vector")
        assert torch.equal(*((t.flatten() if flat else t) for t in (ours[name], tensor))), name


@pytest.mark.parametrize(("case", "variant"), IN_PEFT, ids=str)
def test_pefts_own_folder_is_loaded_and_written_again(case: Case, variant: str, tmp_path: Path):
    theirs = with_peft(case, variant)
    theirs.save_pretrained(tmp_path / "theirs")
    model = case.build()
    before = bits_of(model)
    names = lora.load_adapter(model, tmp_path / "theirs")
    assert len(names) == case.adapted
    assert_same_bits(model, before)
    assert_same_tensors(adapter_of(model), as_computed(adapter_of(theirs), "lora_B"))
    with torch.no_grad():
        output = output_of(model, case.batch())
        assert_close(output_of(model.eval(), case.batch()), output)
        assert_close(output, output_of(theirs, case.batch()))

    lora.save_adapter(model, tmp_path / "ours")
    assert_same_tensors(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    again = case.build()
    assert lora.load_adapter(again, tmp_path / "ours") == names
    assert_same_tensors(adapter_of(again), adapter_of(model))


@pytest.mark.parametrize(("case", "variant"), IN_PEFT, ids=str)
def test_peft_loads_our_folder_and_computes_the_same(case: Case, variant: str, tmp_path: Path):
    model = with_lora(case, variant)
    remarks = lora.save_adapter(model, tmp_path / "ours")
    assert not any("normalized" in line for line in remarks)
    theirs = loaded_by_peft(case, tmp_path / "ours")
    config = theirs.peft_config["default"]
    assert {"use_rslora": config.use_rslora, "use_dora": config.use_dora} == {
        "use_rslora": False,
        "use_dora": False,
        **SETTINGS[variant],
    }
    adapter = adapter_of(model)
    assert_same_tensors(adapter, as_computed(adapter_of(theirs), "lora_B"))
    with torch.no_grad():
        output = output_of(model, case.batch())
        assert_close(output_of(theirs, case.batch()), output)
        assert_close(output_of(theirs.merge_and_unload(), case.batch()), output)
        assert_close(output_of(lora.merge(model), case.batch()), output)
    theirs = loaded_by_peft(case, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert_same_tensors(tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "ours"))
    again = case.build()
    lora.load_adapter(again, tmp_path / "theirs")
    assert_same_tensors(adapter_of(again), adapter)


class Scaled(nn.Module):
    """A linear layer in a module with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.ones(3)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.out(x)


@pytest.mark.parametrize("last", [nn.Linear(8, 3), Scaled()], ids=["plain", "with a parameter"])
def test_peft_opens_the_folder_of_a_classifier_without_a_task(tmp_path: Path, last: nn.Module):
    """Such as torchvision's. With a task, PEFT would call the model as it calls upstream's."""
    classifier = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), last)
    model = nn.Sequential(OrderedDict(features=nn.Linear(6, 6), classifier=classifier))
    plain = copy.deepcopy(model)
    lora.add_lora(model, ["features", "0"], r=2, modules_to_train=["classifier.2"])
    draw(((n, p) for n, p in model.named_parameters() if p.requires_grad), "trained")
    lora.save_adapter(model, tmp_path / "ours")
    x = torch.randn(4, 6)
    with torch.no_grad():
        assert_close(peft.PeftModel.from_pretrained(plain, tmp_path / "ours")(x), model(x))


def test_a_module_in_two_places_is_not_loaded(tmp_path: Path):
    """PEFT adapts only the first of the two."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model.add_module("again", model[0])
    theirs = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["0"]))
    inner = theirs.base_model.model
    assert inner[0].base_layer is inner.again
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="adapts 0, which the model uses in several places"):
        lora.load_adapter(model, tmp_path / "theirs")


@pytest.mark.parametrize(("case", "variant"), ALL, ids=str)
def test_a_file_of_this_project_holds_every_adapter(case: Case, variant: str, tmp_path: Path):
    model = with_lora(case, variant)
    lora.save_adapter(model, tmp_path / "adapter.safetensors")
    again = case.build()
    before = bits_of(again)
    names = lora.load_adapter(again, tmp_path / "adapter.safetensors")
    assert len(names) == case.adapted
    assert_same_bits(again, before)
    assert_same_tensors(adapter_of(again), adapter_of(model))
    again.requires_grad_(False)  # PyTorch's attention takes another kernel for trained weights
    model.requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(output_of(again, case.batch()), output_of(model, case.batch()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_releases_file_holds_only_plain_lora(case: Case, tmp_path: Path):
    model = with_lora(case)
    if any(isinstance(layer, lora.Embedding) for layer in model.modules()):
        with pytest.raises(CheckpointError, match="embeddings"):
            lora.save_adapter(model, tmp_path / "adapter.pt")
        return
    lora.save_adapter(model, tmp_path / "adapter.pt")
    again = case.build()
    lora.load_adapter(again, tmp_path / "adapter.pt", lora_alpha=ALPHA)
    assert_same_tensors(adapter_of(again), adapter_of(model))
    with torch.no_grad():
        assert_close(output_of(again, case.batch()), output_of(model, case.batch()))
    with pytest.raises(CheckpointError, match="does not record the alpha"):
        lora.load_adapter(case.build(), tmp_path / "adapter.pt")
    with pytest.raises(CheckpointError, match="variant dora, which this format cannot record"):
        lora.save_adapter(with_lora(case, "dora"), tmp_path / "dora.pt")


@pytest.mark.parametrize("name", ["timm_resnext", "other_convolutions", "attention_of_other_sizes"])
def test_what_peft_cannot_compute_is_refused(name: str, tmp_path: Path):
    case = BY_NAME[name]
    with pytest.raises(CheckpointError, match="PEFT") as error:
        lora.save_adapter(with_lora(case), tmp_path / "ours")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("variant", VARIANTS)
def test_patterns_mean_what_they_mean_to_peft(variant: str, tmp_path: Path):
    case = BY_NAME["qwen2"]
    theirs = with_peft(case, variant, **PATTERNS)
    theirs.save_pretrained(tmp_path / "theirs")
    model = case.build()
    lora.load_adapter(model, tmp_path / "theirs")
    ours = with_lora(case, variant, adapter_of(theirs), **PATTERNS)
    lora.save_adapter(ours, tmp_path / "ours")
    opened = loaded_by_peft(case, tmp_path / "ours")
    with torch.no_grad():
        output = output_of(theirs, case.batch())
        for other in (model, ours, opened):
            assert_same_tensors(adapter_of(other), adapter_of(theirs))
            assert_close(output_of(other, case.batch()), output)


@pytest.mark.parametrize("initialization", ["pissa", "olora", "orthogonal"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["qwen2", "gpt2", "convolutions"])
def test_peft_loads_adapters_initialized_from_the_weights(
    name: str, variant: str, initialization: str, tmp_path: Path
):
    case = BY_NAME[name]
    model = with_lora(case, variant, initialization=initialization)
    lora.save_adapter(model, tmp_path / "ours")
    theirs = loaded_by_peft(case, tmp_path / "ours")
    again = case.build()
    lora.load_adapter(again, tmp_path / "ours")
    with torch.no_grad():
        output = output_of(model, case.batch())
        assert_close(output_of(theirs, case.batch()), output)
        assert_close(output_of(again, case.batch()), output)


def test_a_trained_head_and_biases_are_saved_and_loaded(tmp_path: Path):
    case = BY_NAME["bert"]
    model = with_lora(case, "dora", modules_to_train="classifier", bias="lora_only")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.add_(1)
    lora.save_adapter(model, tmp_path / "ours")
    theirs = loaded_by_peft(case, tmp_path / "ours")
    again = case.build()
    lora.load_adapter(again, tmp_path / "ours")
    with torch.no_grad():
        output = output_of(model, case.batch())
        assert torch.equal(output_of(again, case.batch()), output)
        assert_close(output_of(theirs, case.batch()), output)


def test_an_adapter_of_another_model_is_refused_in_one_line(tmp_path: Path):
    with_peft(BY_NAME["qwen2"]).save_pretrained(tmp_path / "qwen2")
    for name in ("t5", "bert", "encoder"):
        model = BY_NAME[name].build()
        before = bits_of(model)
        with pytest.raises(CheckpointError, match="q_proj") as error:
            lora.load_adapter(model, tmp_path / "qwen2")
        assert "\n" not in str(error.value)
        assert_same_bits(model, before)
        assert not adapter_of(model)


def test_a_base_with_another_embedding_is_refused(tmp_path: Path):
    case = BY_NAME["llama"]
    theirs = with_peft(case)
    theirs.save_pretrained(tmp_path / "theirs")
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    assert name in load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    lora.load_adapter(case.build().bfloat16(), tmp_path / "theirs")
    model = case.build()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    with pytest.raises(
        CheckpointError, match=r"holds the model\.embed_tokens\.weight that it was trained with"
    ) as error:
        lora.load_adapter(model, tmp_path / "theirs")
    assert "\n" not in str(error.value)
    assert not adapter_of(model)
