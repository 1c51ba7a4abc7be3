"""LoRA on quantized layers of bitsandbytes and torchao, compared with PEFT's and the formula."""

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
from accelerate.hooks import attach_align_device_hook, remove_hook_from_submodules
from models import draw
from ours import assert_close
from theirs import adapter_of
from torch import Tensor, nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
    to_nf4,
)

import loralib as lora
import transformers
from loralib.errors import UnsupportedLayerError
from loralib.quantized_layers import QuantizedLayer

R, ALPHA = 4, 6
IDS = torch.arange(2 * 9).view(2, 9) * 7 % 61
# bitsandbytes' blocks are of 64 inputs.
SMALL = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
# In bfloat16, both sides round at different points, about 40 times forward and backward.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 4 * math.sqrt(40) * 2**-8}


def bits_4(**settings: Any) -> Callable[[torch.dtype], Any]:
    return lambda dtype: transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **settings
    )


INT4 = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
CONFIGS: dict[str, Callable[[torch.dtype], Any]] = {
    "nf4": bits_4(bnb_4bit_quant_type="nf4"),
    "nf4 twice": bits_4(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "fp4 in bfloat16": bits_4(bnb_4bit_quant_type="fp4", bnb_4bit_quant_storage=torch.bfloat16),
    "int8": lambda dtype: transformers.BitsAndBytesConfig(load_in_8bit=True),
    "torchao int8": lambda dtype: transformers.TorchAoConfig(Int8WeightOnlyConfig()),
    "torchao int4": lambda dtype: transformers.TorchAoConfig(INT4),
    "torchao float8": lambda dtype: transformers.TorchAoConfig(Float8WeightOnlyConfig()),
}
EACH = pytest.mark.parametrize("kind", CONFIGS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    draw(model.named_parameters(), "quantized llama")
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder


def load(checkpoint: Path, kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model, quantized while it is loaded, as users do it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint,
        quantization_config=CONFIGS[kind](dtype),
        dtype=dtype,
        device_map={"": "cpu"},
    )
    return model.train()


def adapted(checkpoint: Path, kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = load(checkpoint, kind, dtype)
    names = lora.add_lora(model, "all-linear", r=R, lora_alpha=ALPHA)
    assert len(names) == 14
    assert all(isinstance(model.get_submodule(name), QuantizedLayer) for name in names)
    draw((item for item in model.named_parameters() if "lora_" in item[0]), "quantized")
    return model


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    output = model(IDS).logits
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    (output * probe.to(output.dtype)).sum().backward()
    grads = {n: p.grad.clone() for n, p in adapter_of(model).items() if p.grad is not None}
    return output.detach(), grads


def assert_same_step(
    ours: nn.Module, theirs: nn.Module, dtype: torch.dtype = torch.float32
) -> None:
    output, grads = step(ours)
    expected, expected_grads = step(theirs)
    assert_close(output, expected, ROUNDING[dtype])
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        assert_close(grad, expected_grads[name], ROUNDING[dtype], name)


@torch.no_grad()
def dequantized(layer: Any) -> Tensor:
    """A layer's weight, (out, in), by its package's own function."""
    weight = layer.weight
    if isinstance(layer, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
    if isinstance(layer, bnb.nn.Linear8bitLt):
        state = layer.state if layer.state.CB is not None else weight
        return state.CB.float() * state.SCB[:, None] / 127
    return weight.get_original_weight() if "NF4" in type(weight).__name__ else weight.dequantize()


def in_float64(model: nn.Module, checkpoint: Path) -> nn.Module:
    """The plain model with dequantized weights and the same LoRA."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    layers = dict(model.named_modules())
    for name, module in plain.named_modules():
        if isinstance(layers[name], QuantizedLayer):
            module.weight = nn.Parameter(dequantized(layers[name]).double())
    lora.add_lora(plain, "all-linear", r=R, lora_alpha=ALPHA)
    for name, parameter in adapter_of(plain).items():
        parameter.data.copy_(adapter_of(model)[name])
    return plain.train()


@EACH
def test_outputs_and_gradients_match_the_formula(checkpoint: Path, kind: str):
    model = adapted(checkpoint, kind)
    plain = in_float64(model, checkpoint)
    output, grads = step(model)
    expected, expected_grads = step(plain)
    assert_close(output.double(), expected)
    for name, grad in grads.items():
        assert_close(grad.double(), expected_grads[name], what=name)
    lora.remove_lora(plain)
    with torch.no_grad():  # the updates have a visible effect
        assert (plain(IDS).logits - expected).abs().max() > 0.2 * expected.abs().max()


def loaded_by_peft(base: nn.Module, folder: Path) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=r".*get_apply_tensor_subclass.*")
        return peft.PeftModel.from_pretrained(base, folder, is_trainable=True).train()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@EACH
def test_peft_loads_our_folder_and_we_load_pefts(
    checkpoint: Path, kind: str, dtype: torch.dtype, tmp_path: Path
):
    model = adapted(checkpoint, kind, dtype)
    assert lora.save_adapter(model, tmp_path / "ours") == []
    theirs = loaded_by_peft(load(checkpoint, kind, dtype), tmp_path / "ours")
    assert_same_step(model, theirs, dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load(checkpoint, kind, dtype)
    assert len(lora.load_adapter(again, tmp_path / "theirs")) == 14
    assert_same_step(again.train(), theirs, dtype)


@EACH
def test_autocast_matches_pefts(checkpoint: Path, kind: str, tmp_path: Path):
    model = adapted(checkpoint, kind)
    lora.save_adapter(model, tmp_path / "a")
    theirs = loaded_by_peft(load(checkpoint, kind), tmp_path / "a")
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_step(model, theirs, torch.bfloat16)


@EACH
def test_checkpointing_and_evaluation_do_not_change_training(checkpoint: Path, kind: str):
    model = adapted(checkpoint, kind)
    output, grads = step(model)
    model.gradient_checkpointing_enable()
    _, again = step(model)
    assert all(torch.equal(again[name], grad) for name, grad in grads.items())
    model.gradient_checkpointing_disable()
    model.eval()
    with torch.no_grad():  # in which bitsandbytes would pack weights on some CPUs
        first = model(IDS).logits
        tokens = model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert tokens.shape == (2, 11)
    if kind != "int8":  # which quantizes inputs in evaluation
        assert_close(first, output)
    _, after = step(model.train())
    assert all(torch.equal(after[name], grad) for name, grad in grads.items())


@EACH
def test_copies_banks_and_removal(checkpoint: Path, kind: str, tmp_path: Path):
    model = adapted(checkpoint, kind).eval()
    assert repr(model.model.layers[0]).count(f", r={R}, lora_alpha={ALPHA}") == 7
    copies = [copy.deepcopy(model)]
    if "torchao" not in kind:  # whose plain layers cannot be pickled either
        copies.append(pickle.loads(pickle.dumps(model)))
    lora.save_adapter(model, tmp_path / "a.safetensors")
    base = load(checkpoint, kind).eval()
    bank = lora.AdapterBank(base)
    bank.add("a", lora.read_adapter(tmp_path / "a.safetensors"))
    with torch.no_grad():
        expected = model(IDS).logits
        for each in copies:
            assert torch.equal(each(IDS).logits, expected)
        for names in ("a", ["a", "a"]):
            with bank.use(names):
                assert_close(base(IDS).logits, expected, ROUNDING[torch.bfloat16])
        bank.close()
        for each in (model, *copies):
            lora.remove_lora(each)
            assert [type(m) for m in each.modules()] == [type(m) for m in base.modules()]
            # In evaluation bitsandbytes packs it again, on some CPUs.
            assert torch.equal(each.train()(IDS).logits, base.train()(IDS).logits)


@EACH
def test_merging_needs_the_plain_base(checkpoint: Path, kind: str, tmp_path: Path):
    model = adapted(checkpoint, kind)
    with pytest.raises(ValueError, match=r"is quantized, so nothing can be merged into it: save"):
        lora.merge(model)
    lora.save_adapter(model, tmp_path / "a")
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    lora.load_adapter(plain, tmp_path / "a")
    lora.merge(plain)
    assert type(plain.model.layers[0].self_attn.q_proj) is nn.Linear


def test_dequantizing_drops_lora_and_the_adapter_brings_it_back(checkpoint: Path, tmp_path: Path):
    model = adapted(checkpoint, "nf4")
    lora.save_adapter(model, tmp_path / "a")
    expected = model(IDS).logits
    model.dequantize()
    with pytest.raises(ValueError, match=r"the model has no LoRA to merge"):
        lora.merge(model)
    lora.load_adapter(model, tmp_path / "a")
    assert_close(model(IDS).logits, expected)
    assert_close(lora.merge(model)(IDS).logits, expected)


def test_training_goes_on_after_an_evaluation(checkpoint: Path, tmp_path: Path):
    """On some CPUs, bitsandbytes packs layers for evaluation, also those without LoRA."""
    model = load(checkpoint, "nf4")
    lora.add_lora(model, "q_proj", r=R)
    draw((item for item in model.named_parameters() if "lora_" in item[0]), "packed")
    output, grads = step(model)
    with torch.no_grad():
        model.eval()(IDS)
    lora.save_adapter(model, tmp_path / "a")
    again, again_grads = step(model.train())
    assert torch.equal(again, output)
    assert all(torch.equal(again_grads[name], grad) for name, grad in grads.items())


def test_a_base_that_evaluation_packed_is_refused(checkpoint: Path, tmp_path: Path):
    trained = load(checkpoint, "nf4")
    lora.add_lora(trained, "q_proj", r=R)
    lora.save_adapter(trained, tmp_path / "a")
    base = load(checkpoint, "nf4").eval()
    with torch.no_grad():
        base(IDS)
    state = base.model.layers[0].mlp.up_proj.weight.quant_state
    if not getattr(state, "packing_format_for_cpu", False):
        lora.load_adapter(base, tmp_path / "a")
        return
    with pytest.raises(ValueError, match=r"packed for evaluation on this CPU: load the model"):
        lora.load_adapter(base, tmp_path / "a")
    with pytest.raises(ValueError, match=r"packed for evaluation on this CPU: load the model"):
        lora.AdapterBank(base)
    base.state_dict()  # which unpacks it, to other values
    assert not state.packing_format_for_cpu
    with pytest.raises(ValueError, match=r"packed for evaluation on this CPU: load the model"):
        lora.load_adapter(base, tmp_path / "a")


def packs(model: nn.Module) -> list[bool]:
    layers = (m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit))
    return [bool(layer.support_avx512bf16_for_cpu) for layer in layers]


def test_packing_returns_when_the_last_lora_is_removed_but_not_after_a_bank(checkpoint: Path):
    """On CPUs that support it, bitsandbytes computes a single row several times faster with it."""
    model = load(checkpoint, "nf4")
    before = packs(model)
    lora.add_lora(model, "q_proj", r=R)
    lora.remove_lora(model.model.layers[1])
    assert not any(packs(model))
    lora.remove_lora(model)
    assert packs(model) == before
    lora.AdapterBank(model).close()
    assert not any(packs(model))  # else it would be packed, and another bank would refuse it


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_a_quantized_embedding_is_not_trained(storage: torch.dtype):
    embedding = bnb.nn.Embedding4bit(61, 64, quant_type="nf4", quant_storage=storage)
    model = nn.Sequential(embedding, nn.Linear(64, 64)).to("cpu")
    with pytest.raises(ValueError, match=r"module 0 cannot be trained as it is: its weight is qua"):
        lora.add_lora(model, "1", r=R, modules_to_train="0")
    assert all(p.requires_grad for p in model[1].parameters())


def test_hooks_of_a_device_map_have_to_be_set_after_lora(checkpoint: Path):
    model = load(checkpoint, "nf4")
    attach_align_device_hook(model, execution_device="cpu", offload=False)
    with pytest.raises(UnsupportedLayerError, match=r"or remove them .*, and dispatch it again"):
        lora.add_lora(model, "all-linear")
    remove_hook_from_submodules(model)
    lora.add_lora(model, "all-linear")
    draw((item for item in model.named_parameters() if "lora_" in item[0]), "hooks")
    output, grads = step(model)
    attach_align_device_hook(model, execution_device="cpu", offload=False)
    assert "forward" in vars(model.model.layers[0].self_attn.q_proj)
    hooked, hooked_grads = step(model)
    assert torch.equal(hooked, output)
    assert all(torch.equal(hooked_grads[name], grad) for name, grad in grads.items())


LAYERS = {
    "4-bit": lambda: bnb.nn.Linear4bit(64, 64, quant_type="nf4"),
    "8-bit": lambda: bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_bitsandbytes_are_quantized_when_they_are_moved(kind: str):
    plain, x = nn.Linear(64, 64), torch.randn(3, 64)
    draw(plain.named_parameters(), "moved")
    before, after = (nn.Sequential(LAYERS[kind]()) for _ in range(2))
    for model in (before, after):
        model[0].load_state_dict(plain.state_dict())
    lora.add_lora(before, "0", r=R)
    before.to("cpu")
    after.to("cpu")
    lora.add_lora(after, "0", r=R)
    for model in (before, after):
        draw((item for item in model.named_parameters() if "lora_" in item[0]), "moved")
    assert before[0].weight.element_size() == 1
    assert torch.equal(before(x), after(x))


def test_torchaos_nf4_matches_the_formula():
    layer = nn.Linear(64, 64)
    draw(layer.named_parameters(), "nf4")
    layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 4), requires_grad=False)
    model, x = nn.Sequential(layer), torch.randn(3, 64, requires_grad=True)
    lora.add_lora(model, "0", r=R)
    draw((item for item in model.named_parameters() if "lora_" in item[0]), "nf4")
    weight = dequantized(layer) + layer.scaling * (layer.lora_B @ layer.lora_A).detach()
    out = model(x)
    out.sum().backward()
    assert_close(out.detach(), x.detach() @ weight.t() + layer.bias)
    assert_close(x.grad, weight.sum(0).expand(3, -1))


def test_quantized_inputs_are_refused():
    model = nn.Sequential(nn.Linear(64, 64))
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(UnsupportedLayerError, match=r"gradients do not pass through module 0"):
        lora.add_lora(model, "0", r=R)


def test_upstreams_trainer_trains_a_quantized_model(checkpoint: Path, tmp_path: Path):
    """It asks for PEFT's adapters in a quantized model; docs/any-model.md has this workaround."""
    model = load(checkpoint, "nf4")
    lora.add_lora(model, "all-linear", r=R)
    data = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = transformers.TrainingArguments(
        tmp_path / "run", max_steps=2, report_to=[], use_cpu=True, gradient_checkpointing=True
    )
    with pytest.raises(ValueError, match=r"purely quantized models"):
        transformers.Trainer(model, arguments, train_dataset=data)
    model._hf_peft_config_loaded = True
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    del model._hf_peft_config_loaded
    trainer.train()
    lora.save_adapter(model, tmp_path / "a")
    again = load(checkpoint, "nf4")
    lora.load_adapter(again, tmp_path / "a")
    with torch.no_grad():
        assert torch.equal(again.eval()(IDS).logits, model.eval()(IDS).logits)
