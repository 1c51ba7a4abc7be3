"""Makes roberta_fixture.safetensors: a tiny RoBERTa's weights, inputs, and what upstream gives.

Run it where upstream's transformers (5.23 made the file) and safetensors are installed, in an
environment of its own:

    python tests/NLU/make_roberta_fixture.py

Tensors are named `weights/<model>/<name in the state dict>`, `inputs/<name>` and
`outputs/<model>/<case>/<name>`. The settings are the file's metadata, as JSON under "config".
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

import transformers

CONFIG = {
    "model_type": "roberta",
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 20,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
LABELS = 3
LENGTHS = (7, 3, 12, 18)


def draw_weights(model: torch.nn.Module) -> None:
    """Weights of such a size that every one of them shows in logits of about 1."""
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape)
        if "LayerNorm.weight" in name or "layer_norm.weight" in name:
            values = 1 + 0.3 * values
        elif parameter.dim() == 2 and "embeddings" not in name:
            values *= 1.5 / parameter.shape[1] ** 0.5
        else:
            values *= 0.3
        parameter.data.copy_(values)


def draw_inputs() -> dict[str, torch.Tensor]:
    """A batch padded on the right, and one with padding within its rows as well."""
    batch, length = len(LENGTHS), max(LENGTHS)
    ids = torch.randint(3, CONFIG["vocab_size"], (batch, length))
    mask = (torch.arange(length) < torch.tensor(LENGTHS)[:, None]).long()
    ids[:, 0] = CONFIG["bos_token_id"]
    holes = mask.clone()
    holes[0, 2:4] = 0
    holes[2, 5] = 0
    pad = CONFIG["pad_token_id"]
    is_target = (torch.rand(ids.shape) < 0.3) & (holes == 1)
    return {
        "ids": ids.masked_fill(mask == 0, pad),
        "mask": mask,
        "ids_with_holes": ids.masked_fill(holes == 0, pad),
        "mask_with_holes": holes,
        "types": torch.randint(0, 2, ids.shape),
        "tokens_wanted": ids.masked_fill(~is_target, -100),
        "classes": torch.tensor([2, 0, 1, 1]),
        "scores": torch.tensor([0.5, -1.0, 2.0, 4.5]),
    }


def cases(inputs: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The model's arguments in each case."""
    rows = {
        f"row{row}": {"input_ids": inputs["ids"][row : row + 1, :length]}
        for row, length in enumerate(LENGTHS)
    }
    return {
        "padded": {"input_ids": inputs["ids"], "attention_mask": inputs["mask"]},
        "types": {
            "input_ids": inputs["ids"],
            "attention_mask": inputs["mask"],
            "token_type_ids": inputs["types"],
        },
        "holes": {
            "input_ids": inputs["ids_with_holes"],
            "attention_mask": inputs["mask_with_holes"],
        },
        **rows,
    }


def build() -> dict[str, torch.nn.Module]:
    """One model of each kind, with one backbone's weights."""
    config = transformers.RobertaConfig(**CONFIG, attn_implementation="eager")
    config.num_labels = LABELS
    models = {
        "backbone": transformers.RobertaModel(config),
        "mlm": transformers.RobertaForMaskedLM(config),
        "classifier": transformers.RobertaForSequenceClassification(config),
    }
    config = transformers.RobertaConfig(**CONFIG, attn_implementation="eager")
    config.num_labels = 1
    models["regressor"] = transformers.RobertaForSequenceClassification(config)
    for model in models.values():
        draw_weights(model)
    weights = models["backbone"].state_dict()
    weights = {name: t for name, t in weights.items() if not name.startswith("pooler.")}
    for name in ("mlm", "classifier", "regressor"):
        models[name].roberta.load_state_dict(weights)
    return {name: model.eval() for name, model in models.items()}


@torch.no_grad()
def outputs(
    models: dict[str, torch.nn.Module], inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What upstream gives for every model and case."""
    labels = {
        "mlm": inputs["tokens_wanted"],
        "classifier": inputs["classes"],
        "regressor": inputs["scores"],
    }
    found = {}
    for case, arguments in cases(inputs).items():
        whole = models["backbone"](**arguments, output_hidden_states=True)
        found[f"backbone/{case}/pooler_output"] = whole.pooler_output
        for layer, state in enumerate(whole.hidden_states):
            found[f"backbone/{case}/hidden_states.{layer}"] = state
        for kind, wanted in labels.items():
            found[f"{kind}/{case}/logits"] = models[kind](**arguments).logits
            if not case.startswith("row"):
                found[f"{kind}/{case}/loss"] = models[kind](**arguments, labels=wanted).loss
    return found


def main() -> None:
    """Writes the fixture beside this script."""
    torch.manual_seed(0)
    models, inputs = build(), draw_inputs()
    tensors = {f"inputs/{name}": tensor for name, tensor in inputs.items()}
    tensors |= {f"outputs/{name}": tensor for name, tensor in outputs(models, inputs).items()}
    for kind, model in models.items():
        for name, tensor in model.state_dict().items():
            # The other models hold the same backbone under a prefix; heads are their own.
            if not name.startswith(("roberta.", "lm_head.decoder.")):
                tensors[f"weights/{kind}/{name}"] = tensor
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    metadata = {"config": json.dumps(CONFIG), "transformers": transformers.__version__}
    path = Path(__file__).with_name("roberta_fixture.safetensors")
    save_file(tensors, path, metadata)
    path.chmod(0o644)
    size = path.stat().st_size / 1024
    print(f"{path.name}: {size:.0f} KiB, transformers {transformers.__version__}")
    for name in ("mlm", "classifier", "regressor"):
        logits = tensors[f"outputs/{name}/padded/logits"]
        print(f"{name}: standard deviation of the logits {logits.std():.2f}")


if __name__ == "__main__":
    main()
