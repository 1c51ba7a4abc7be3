"""What users ask of add_lora in other libraries' models: targets, slices, ties, and refusals."""

import re
from collections.abc import Callable

import peft
import pytest
import torch
import torchvision
from models import BY_NAME, Case, draw, output_of
from ours import ALPHA, R, assert_close, assert_same_bits, bits_of, step, with_lora
from safetensors.torch import load_file
from theirs import adapter_of, with_peft
from torch import nn

import loralib as lora
import transformers


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gpt2", "falcon", "bert", "t5"])
def test_all_linear_adapts_what_pefts_adapts(name: str):
    case = BY_NAME[name]
    case = Case(case.name, case.make, case.batch, "all-linear", 0, case.task)
    ours, theirs = adapter_of(with_lora(case)), adapter_of(with_peft(case))
    # PEFT takes all but the head's last layer, this project what is in the numbered layers.
    assert ours.keys() == {name for name in theirs if not name.startswith("bert.pooler.")}


def test_all_linear_names_the_experts_that_it_leaves_out(tmp_path, caplog):
    """Transformers 5 holds all of Mixtral's experts of a layer in one parameter."""
    settings = {"intermediate_size": 48, "num_local_experts": 3}
    config = transformers.MixtralConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **settings
    )
    model = transformers.MixtralForCausalLM(config)
    assert len(lora.add_lora(model, "all-linear", r=R)) == 8
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(
        "the targets leave out the stacks of matrices model.layers.0.mlp.experts."
    )
    remarks = lora.save_adapter(model, tmp_path / "adapter")
    assert not any("PEFT with Transformers 5" in line for line in remarks)
    assert "add 'experts.gate_up_proj', 'experts.down_proj' to targets" in line
    names = lora.add_lora(model, "experts.*", r=R)  # not the activation next to them
    ends = ["gate_up_proj_lora", "down_proj_lora"]
    assert [name.rpartition(".")[2] for name in names] == 2 * ends


def qwen3_next() -> nn.Module:
    config = transformers.Qwen3NextConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"] * 2,
    )
    return transformers.Qwen3NextForCausalLM(config)


def mamba() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4
    )
    return transformers.MambaForCausalLM(config)


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
NOT_IN_PEFT = [
    (qwen3_next, ("q_proj", "up_proj", "gate_proj"), "adapt no modules called 'gate_proj', 'up_"),
    (qwen3_next, ("q_proj", "down_proj", *EXPERTS), "adapt no modules called 'down_proj'"),
    (qwen3_next, ("q_proj", *EXPERTS), None),
    (mamba, ("in_proj", "out_proj"), "adapt no modules called 'out_proj'"),
    (mamba, ("in_proj",), None),
]


@pytest.mark.parametrize(("make", "targets", "expected"), NOT_IN_PEFT)
def test_modules_that_peft_leaves_out_are_named_and_it_computes_the_rest(
    tmp_path, make, targets, expected
):
    """If this fails because PEFT computes the same, the remark can be removed."""

    def build() -> nn.Module:
        model = make().eval()
        draw(model.named_parameters(), make.__name__)
        return model

    model, again, ids = build(), build(), {"input_ids": torch.arange(7)[None]}
    lora.add_lora(model, targets, r=R)
    draw((each for each in model.named_parameters() if "lora_" in each[0]), "lora")
    remarks = [
        line for line in lora.save_adapter(model, tmp_path / "a") if "for PEFT, merge" in line
    ]
    lora.load_adapter(again, tmp_path / "a")
    with torch.no_grad():
        output = output_of(model, ids)
        assert_close(output_of(again, ids), output)
        try:
            theirs = output_of(peft.PeftModel.from_pretrained(build(), tmp_path / "a").eval(), ids)
        except ValueError:
            theirs = torch.zeros_like(output)
    if expected is None:
        assert not remarks
        assert_close(theirs, output)
        return
    (line,) = remarks
    assert expected in line
    assert (theirs - output).abs().max() > 1e-3 * output.abs().max()


@pytest.mark.parametrize("name", ["wte", "lm_head"])
def test_tied_weights_are_refused_unless_they_may_be_untied(name: str):
    case = BY_NAME["gpt2"]
    model = case.build()
    before = bits_of(model)
    with pytest.raises(ValueError, match=r"shares its weight with .* give untie=True, or") as error:
        lora.add_lora(model, name, r=R)
    assert "\n" not in str(error.value)
    assert_same_bits(model, before)
    assert not adapter_of(model)

    assert len(lora.add_lora(model, name, r=R, untie=True)) == 1
    with torch.no_grad():
        for parameter in adapter_of(model).values():
            parameter.add_(0.1)
        output = output_of(model, case.batch())
        assert_close(output_of(lora.merge(model), case.batch()), output)


def test_a_fused_projection_is_adapted_by_slices():
    case = BY_NAME["gpt2"]
    model = case.build()
    names = lora.add_lora(
        model, "c_attn", r=R, lora_alpha=ALPHA, enable_lora={"c_attn": [True, False, True]}
    )
    layer = model.get_submodule(names[0])
    width = layer.out_features // 3
    assert layer.lora_A.shape == (2 * R, layer.in_features)
    assert layer.lora_B.shape == (2 * width, R)
    x = torch.randn(4, layer.in_features)
    with torch.no_grad():
        before = layer(x)
        layer.lora_B.normal_()
        moved = (layer(x) - before).abs().amax(0).unflatten(0, (3, -1)).amax(1)
    assert moved[0] > 0.01
    assert moved[1] == 0
    assert moved[2] > 0.01


def test_an_adapted_model_generates():
    case = BY_NAME["llama"]
    model = with_lora(case).eval()
    ids = case.batch()["input_ids"][:1]
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    generated = model.generate(ids, **settings)
    merged = lora.merge(model)
    assert torch.equal(merged.generate(ids, **settings), generated)
    # The cache of keys and values gives the same tokens as a pass over the whole sequence.
    with torch.no_grad():
        predicted = model(input_ids=generated[:, :-1]).logits.argmax(-1)[0, ids.shape[1] - 1 :]
    assert torch.equal(predicted, generated[0, ids.shape[1] :])


def test_add_lora_adds_targets_to_an_adapted_model():
    case = BY_NAME["attention"]
    model = case.build()
    assert lora.add_lora(model, "last", r=R) == ("last",)
    assert lora.add_lora(model, "attention", r=2) == ("attention", "attention.out_proj")
    assert {name: p.shape[0] for name, p in adapter_of(model).items() if name[-1] == "A"} == {
        "attention.lora_A": 2,
        "attention.out_proj.lora_A": 2,
        "last.lora_A": R,
    }
    for again in ("last", "attention", "attention.out_proj"):
        with pytest.raises(ValueError, match=r"has LoRA already: .* leave it out of targets"):
            lora.add_lora(model, again, r=2)
    _, grads = step(model, case.batch())
    assert grads.keys() == adapter_of(model).keys()


def test_an_attentions_output_projection_can_be_adapted_alone():
    case = BY_NAME["attention"]
    model = case.build()
    assert lora.add_lora(model, "out_proj", r=R) == ("attention.out_proj",)
    with torch.no_grad():
        before = output_of(model, case.batch())
        model.attention.out_proj.lora_B.normal_()
        output = output_of(model, case.batch())
        assert (output - before).abs().max() > 0.01
        assert_close(output_of(model.eval(), case.batch()), output)
        assert_close(output_of(lora.merge(model), case.batch()), output)
    assert type(model.attention) is nn.MultiheadAttention


def test_a_model_loaded_with_a_device_map_is_adapted(tmp_path):
    case = BY_NAME["qwen2"]
    case.build().save_pretrained(tmp_path)
    for device_map in ("cpu", {"": "cpu"}):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        assert len(lora.add_lora(model, case.targets, r=R)) == case.adapted
        _, grads = step(model, case.batch())
        assert grads.keys() == adapter_of(model).keys()


def test_a_model_with_pefts_lora_is_refused():
    theirs = with_peft(BY_NAME["llama"])
    for model in (theirs, theirs.base_model.model):
        with pytest.raises(
            ValueError, match=r"already has an adapter of PEFT's \(lora\): give the model that"
        ):
            lora.add_lora(model, "down_proj", r=R)
    assert len(lora.add_lora(theirs.unload(), "q_proj", r=R)) == 2


def test_save_pretrained_of_an_adapted_model_is_loaded_as_the_guide_says(tmp_path):
    case = BY_NAME["gpt2"]
    model = with_lora(case, "lora")
    model.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any("lora_" in name for name in plain.state_dict())
    again = case.build()
    lora.add_lora(again, case.targets, r=R, lora_alpha=ALPHA)
    again.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    with torch.no_grad():
        assert_close(output_of(again, case.batch()), output_of(model, case.batch()))


def test_save_pretrained_of_a_merged_model_is_loaded_as_a_plain_model(tmp_path):
    case = BY_NAME["gpt2"]
    model = lora.merge(with_lora(case, "dora"))
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert_close(output_of(again, case.batch()), output_of(model, case.batch()))


UNSUPPORTED = {
    "a norm": ("llama", "input_layernorm", "LlamaRMSNorm, which has no LoRA layer: leave it out"),
    "a block": ("bert", "attention.self", "name layers inside it, such as self.key, self.query, "),
}


@pytest.mark.parametrize(("name", "target", "expected"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_modules_without_a_lora_layer_are_named(name: str, target: str, expected: str):
    model = BY_NAME[name].build()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(lora.UnsupportedLayerError, match=expected) as error:
        lora.add_lora(model, ["all-linear", target], r=2)
    assert "\n" not in str(error.value)
    assert [type(module) for module in model.modules()] == kinds


NEVER_CALLED = {
    "Swin": (lambda: torchvision.models.swin_t(), "leave out 'attn.qkv', 'attn.proj'"),
    "WavLM": (lambda: of_config("WavLM"), r"leave out 'attention.k_proj', .*out_proj'"),
    "Mamba": (lambda: of_config("Mamba"), "leave out 'mixer.dt_proj'"),
    "BLOOM, which calls them": (lambda: of_config("Bloom"), None),
    "T5, which calls them": (lambda: of_config("T5"), None),
}


def of_config(name: str) -> nn.Module:
    return transformers.AutoModel.from_config(getattr(transformers, f"{name}Config")())


@pytest.mark.parametrize(("make", "expected"), NEVER_CALLED.values(), ids=NEVER_CALLED)
def test_layers_that_upstream_never_calls_are_named(
    make: Callable[[], nn.Module], expected: str | None, caplog: pytest.LogCaptureFixture
):
    with torch.device("meta"):
        lora.add_lora(make(), "all-linear", r=2)
    lines = [line for r in caplog.records if "and never calls" in (line := r.getMessage())]
    assert len(lines) == (expected is not None)
    assert not expected or re.search(expected, lines[0])


def test_quantized_layers_are_named():
    quantized = nn.Sequential(torch.ao.nn.quantized.dynamic.Linear(8, 8))
    with pytest.raises(lora.UnsupportedLayerError, match=r"quantized.*: leave it out"):
        lora.add_lora(quantized, "0", r=2)


def test_similar_names_are_listed():
    with pytest.raises(ValueError, match=r"'qproj' matches no module .*; it has .*q_proj"):
        lora.add_lora(BY_NAME["llama"].build(), "qproj", r=2)
