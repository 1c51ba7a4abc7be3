"""LoRA on the stacks of experts in upstream's mixtures, compared with PEFT's."""

import copy
import warnings
from itertools import product
from pathlib import Path

import accelerate
import peft
import pytest
import torch
from models import draw, output_of
from ours import assert_close, assert_same_bits, bits_of
from safetensors.torch import save_file
from torch import nn

import loralib as lora
import transformers
from loralib.errors import CheckpointError

R, ALPHA = 4, 6
METHODS = ("eager", "grouped_mm", "batched_mm")
STACKS = ("experts.gate_up_proj", "experts.down_proj")
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "attention_dropout": 0.0,
}


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SMALL, intermediate_size=48, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **SMALL, intermediate_size=48, moe_intermediate_size=16, num_experts=5
    )
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss() -> nn.Module:
    config = transformers.GptOssConfig(**SMALL, intermediate_size=48, num_local_experts=4)
    return transformers.GptOssForCausalLM(config)


def llama4() -> nn.Module:
    config = transformers.Llama4TextConfig(
        **SMALL,
        intermediate_size=48,
        intermediate_size_mlp=48,
        num_local_experts=4,
        interleave_moe_layer_step=1,
        pad_token_id=0,
    )
    return transformers.Llama4ForCausalLM(config)


MODELS = {each.__name__: each for each in (mixtral, qwen3_moe, gpt_oss, llama4)}
CASES = [
    (name, method) for name in MODELS for method in METHODS if name != "llama4" or method == "eager"
]


def build(name: str, method: str = "eager") -> nn.Module:
    model = MODELS[name]()
    if name != "llama4":
        model.set_experts_implementation(method)
    draw(model.named_parameters(), name)
    return model.train()


def batch() -> dict:
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(61, (2, 7), generator=generator)}


def with_lora(name: str, method: str, targets=(*STACKS, "q_proj")) -> nn.Module:
    model = build(name, method)
    lora.add_lora(model, targets, r=R, lora_alpha=ALPHA)
    draw(((n, p) for n, p in model.named_parameters() if "lora_" in n), f"{name} lora")
    return model


def with_peft(name: str, method: str, stacks=STACKS, **more) -> nn.Module:
    settings = {"r": R, "lora_alpha": ALPHA, "target_modules": ["q_proj"], **more}
    config = peft.LoraConfig(target_parameters=list(stacks), **settings)
    model = peft.get_peft_model(build(name, method), config)
    draw(((n, p) for n, p in model.named_parameters() if "lora_" in n), f"{name} lora")
    return model


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return output_of(model, batch())


@pytest.mark.parametrize(("name", "method"), CASES)
@pytest.mark.parametrize("stacks", [STACKS, STACKS[:1], STACKS[1:]], ids=["both", "up", "down"])
def test_pefts_folder_computes_the_same_here(tmp_path: Path, name: str, method: str, stacks):
    theirs = with_peft(
        name, method, stacks, rank_pattern={stacks[-1]: 2}, use_rslora=method == "eager"
    )
    theirs.save_pretrained(tmp_path / "theirs")
    model = build(name, method)
    before = bits_of(model)
    names = lora.load_adapter(model, tmp_path / "theirs")
    assert len(names) == 2 * (len(stacks) + 1)
    assert_same_bits(model, before)
    expected = outputs(theirs)
    assert (expected - outputs(build(name, method))).abs().max() > 1e-2
    assert_close(outputs(model), expected)
    assert_close(outputs(model.eval()), expected)

    lora.save_adapter(model.train(), tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(build(name, method), tmp_path / "ours")
    assert_close(outputs(again), expected)
    assert_close(outputs(lora.merge(model)), expected)


@pytest.mark.parametrize(("name", "method"), CASES)
def test_peft_loads_our_folder_and_computes_the_same(tmp_path: Path, name: str, method: str):
    model = with_lora(name, method)
    lora.save_adapter(model, tmp_path / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        theirs = peft.PeftModel.from_pretrained(
            build(name, method), tmp_path / "ours", is_trainable=True
        )
    assert_close(outputs(model), outputs(theirs))
    theirs.train()
    for each in (model, theirs):
        output_of(each, batch()).square().sum().backward()
    theirs.save_pretrained(tmp_path / "gradients")
    ours = copy.deepcopy(model)
    state = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    theirs.load_state_dict(state, strict=False)
    theirs.save_pretrained(tmp_path / "gradients")
    lora.load_adapter(ours, tmp_path / "gradients")
    mine = dict(model.named_parameters())
    for n, theirs_grad in ours.named_parameters():
        if "lora_" in n:
            assert_close(mine[n].grad, theirs_grad.detach())


def test_pefts_folder_of_two_stacks_needs_the_model(tmp_path: Path):
    with_peft("mixtral", "eager").save_pretrained(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=r"load_adapter\(model, …\)"):
        lora.read_adapter(tmp_path / "theirs")
    with_peft("mixtral", "eager", STACKS[:1]).save_pretrained(tmp_path / "one")
    assert lora.read_adapter(tmp_path / "one").lora.targets == ("gate_up_proj_lora", "q_proj")


def test_adapters_of_transformers_4_are_converted_by_peft(tmp_path: Path):
    """Transformers 4 had a module for each expert. PEFT merges such adapters into one per stack."""
    tensors, sizes = {}, {"w1": (48, 32), "w2": (32, 48), "w3": (48, 32)}
    for layer, expert, (name, (out, width)) in product(range(2), range(4), sizes.items()):
        start = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
        tensors[f"{start}.lora_A.weight"] = nn.Parameter(torch.empty(R, width))
        tensors[f"{start}.lora_B.weight"] = nn.Parameter(torch.empty(out, R))
    draw(tensors.items(), "older")
    config = peft.LoraConfig(r=R, lora_alpha=ALPHA, target_modules=[*sizes], task_type="CAUSAL_LM")
    config.save_pretrained(tmp_path / "older")
    save_file(tensors, tmp_path / "older" / "adapter_model.safetensors")
    model = build("mixtral")
    with pytest.raises(CheckpointError, match=r"load the adapter with PEFT, which converts it"):
        lora.load_adapter(model, tmp_path / "older")
    theirs = peft.PeftModel.from_pretrained(build("mixtral"), tmp_path / "older")
    theirs.save_pretrained(tmp_path / "newer")
    assert len(lora.load_adapter(model, tmp_path / "newer")) == 4
    assert (outputs(theirs) - outputs(build("mixtral"))).abs().max() > 1e-2
    assert_close(outputs(model), outputs(theirs))


@pytest.mark.parametrize("name", MODELS)
def test_all_methods_agree_with_the_merged_model(name: str):
    models = [with_lora(name, method) for method in METHODS if (name, method) in CASES]
    expected = outputs(lora.merge(copy.deepcopy(models[0])))
    for model in models:
        assert_close(outputs(model), expected)
        assert_close(outputs(torch.compile(model, backend="eager")), expected)


# Not Llama 4, which accelerate cannot offload: it reads the device of its embeddings' weight.
@pytest.mark.parametrize(("name", "method"), [each for each in CASES if each[0] != "llama4"])
@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_accelerate_offloads_an_adapted_model(tmp_path: Path, name: str, method: str, offload: str):
    model = with_lora(name, method)
    expected = outputs(model)
    if offload == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        places = {each: "cpu" for each, _ in model.named_children()}
        places |= {"model": "disk"}
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
    assert_close(outputs(model), expected)
    assert_close(outputs(model.eval()), expected)
