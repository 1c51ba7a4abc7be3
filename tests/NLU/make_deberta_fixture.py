"""Makes deberta_fixture.safetensors: what upstream's DeBERTa-v2 gives for tiny models.

Run it where upstream's transformers (5.23 made the file) and safetensors are installed, in an
environment of its own:

    python tests/NLU/make_deberta_fixture.py

Weights and inputs are not in the file: `draw_weights` and `draw_inputs` give the tests the same
ones. Tensors are named `<variant>/<kind>/<case>/<name>`.
"""

import itertools
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file

import transformers

FIXTURE = Path(__file__).with_name("deberta_fixture.safetensors")
CONFIG = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 24,
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "pad_token_id": 0,
    "num_labels": 3,
}
# Settings that are crossed: 64 variants.
CROSSED = {
    "share_att_key": {"shared": True, "own": False},
    "pos_att_type": {"both": "c2p|p2c", "c2p": ["c2p"], "p2c": "p2c", "none": None},
    "position_buckets": {"distances": -1, "buckets": 8},
    "conv_kernel_size": {"plain": 0, "conv": 3},
    "norm_rel_ebd": {"raw": "none", "norm": "layer_norm"},
}
# Variants of xxlarge's options, each with more of what upstream gives.
XXLARGE = {
    "share_att_key": True,
    "position_buckets": 8,
    "conv_kernel_size": 3,
    "conv_act": "gelu",
    "norm_rel_ebd": "layer_norm",
}
OTHERS = {
    "xxlarge": XXLARGE,
    "wide convolution": {**XXLARGE, "conv_kernel_size": 5, "conv_groups": 4, "conv_act": "tanh"},
    "clamped distances": {"max_relative_positions": 5, "share_att_key": True},
    "clamped buckets": {"max_relative_positions": 12, "position_buckets": 6},
    "absolute": {"position_biased_input": True, "type_vocab_size": 2, "relative_attention": False},
    "everything": {**XXLARGE, "position_biased_input": True, "type_vocab_size": 2},
    "one layer": {**XXLARGE, "num_hidden_layers": 1, "pooler_hidden_act": "tanh"},
}
LENGTHS = (7, 3, 12, 18)


def variants() -> dict[str, dict]:
    """The settings of every variant that go beyond CONFIG."""
    names = itertools.product(*(choices for choices in CROSSED.values()))
    crossed = {
        " ".join(chosen): {
            setting: CROSSED[setting][name] for setting, name in zip(CROSSED, chosen, strict=True)
        }
        for chosen in names
    }
    return {**crossed, **OTHERS}


def draw_weights(model: torch.nn.Module) -> None:
    """Weights by the names of the parameters, so large that every one of them shows in logits."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("LayerNorm.weight"):
            values = 1 + 0.3 * values
        elif parameter.dim() >= 2 and "embeddings" not in name:
            values *= 1.5 / parameter[0].numel() ** 0.5
        else:
            values *= 0.3
        parameter.data.copy_(values)


def draw_inputs() -> dict[str, torch.Tensor]:
    """A batch padded on the right, and one with padding within its rows as well."""
    generator = torch.Generator().manual_seed(0)
    batch, length = len(LENGTHS), max(LENGTHS)
    ids = torch.randint(3, CONFIG["vocab_size"], (batch, length), generator=generator)
    types = torch.randint(0, 2, (batch, length), generator=generator)
    mask = (torch.arange(length) < torch.tensor(LENGTHS)[:, None]).long()
    holes = mask.clone()
    holes[0, 2:4] = 0
    holes[2, 5] = 0
    is_target = (torch.rand(ids.shape, generator=generator) < 0.3) & (holes == 1)
    return {
        "ids": ids * mask,
        "mask": mask,
        "ids_with_holes": ids * holes,
        "mask_with_holes": holes,
        "types": types,
        "tokens_wanted": ids.masked_fill(~is_target, -100),
        "classes": torch.tensor([2, 0, 1, 1]),
        "scores": torch.tensor([0.5, -1.0, 2.0, 4.5]),
    }


def cases(inputs: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The model's arguments in each case."""
    padded = {"input_ids": inputs["ids"], "attention_mask": inputs["mask"]}
    rows = {
        f"row{row}": {"input_ids": inputs["ids"][row : row + 1, :length]}
        for row, length in enumerate(LENGTHS)
    }
    return {
        "padded": padded,
        **rows,
        "types": {**padded, "token_type_ids": inputs["types"]},
        "holes": {
            "input_ids": inputs["ids_with_holes"],
            "attention_mask": inputs["mask_with_holes"],
        },
    }


@torch.no_grad()
def crossed_outputs(settings: dict) -> dict[str, torch.Tensor]:
    """The classifier's logits, padded, and without padding for two rows."""
    model = build("ForSequenceClassification", settings)
    given = cases(draw_inputs())
    return {
        f"classifier/{case}/logits": model(**given[case]).logits
        for case in ("padded", "row0", "row3")
    }


@torch.no_grad()
def all_outputs(settings: dict) -> dict[str, torch.Tensor]:
    """What every classifier gives in every case, and the large outputs in one of them."""
    inputs, found = draw_inputs(), {}
    kinds = {
        "classifier": ("ForSequenceClassification", {}, inputs["classes"]),
        "regressor": ("ForSequenceClassification", {"num_labels": 1}, inputs["scores"]),
        "mlm": ("ForMaskedLM", {}, inputs["tokens_wanted"]),
    }
    for case, arguments in cases(inputs).items():
        for kind, (name, labels, wanted) in kinds.items():
            if kind == "mlm" and case != "holes":
                continue
            model = build(name, settings | labels)
            found[f"{kind}/{case}/logits"] = model(**arguments).logits
            if not case.startswith("row"):
                found[f"{kind}/{case}/loss"] = model(**arguments, labels=wanted).loss
    output = build("Model", settings)(**cases(inputs)["holes"], output_hidden_states=True)
    found |= {f"backbone/holes/{i}": state for i, state in enumerate(output.hidden_states)}
    return found


def build(name: str, settings: dict) -> torch.nn.Module:
    """A model of upstream's with drawn weights."""
    config = transformers.DebertaV2Config(**{**CONFIG, **settings})
    model = getattr(transformers, f"DebertaV2{name}")(config).eval()
    draw_weights(model)
    return model


def main() -> None:
    """Writes the fixture beside this script."""
    tensors = {}
    for variant, settings in variants().items():
        outputs = (all_outputs if variant in OTHERS else crossed_outputs)(settings)
        tensors |= {f"{variant}/{name}": tensor for name, tensor in outputs.items()}
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(tensors, FIXTURE, {"transformers": transformers.__version__})
    FIXTURE.chmod(0o644)
    spread = min(t.std() for n, t in tensors.items() if n.endswith("classifier/padded/logits"))
    print(f"{FIXTURE.name}: {FIXTURE.stat().st_size / 1024:.0f} KiB, {transformers.__version__}")
    print(f"logits have a standard deviation of at least {spread:.2f}")


if __name__ == "__main__":
    main()
