"""Makes peft_fixture.safetensors: adapters as PEFT writes them, and what PEFT computes with them.

Run it where PEFT (0.21.2 made the file), upstream's transformers (5.23) and safetensors are
installed, in an environment of its own:

    python tests/loralib/make_peft_fixture.py

It reads every adapter back with PEFT before it takes the logits, so that they are those of what is
in the files. Tensors are named `inputs/<name>`, `base/<family>/<name in the state dict>`,
`adapter/<case>/<name in PEFT's file>` and `logits/<case>`. The metadata holds the config.json of
bases as `base/<family>` and the adapter_config.json of adapters as `adapter/<case>`.

`PeftFixture` reads the file, without PEFT and upstream.
"""

import json
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

FIXTURE = Path(__file__).with_name("peft_fixture.safetensors")
LENGTHS = (7, 3, 12, 18)
PADDING = 1
LABELS = 3

_SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "pad_token_id": PADDING,
    "num_labels": LABELS,
}
# Family: upstream's settings, its config's class and its model's.
FAMILIES = {
    "roberta": (
        {**_SHAPE, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
        "RobertaConfig",
        "RobertaForSequenceClassification",
    ),
    "deberta": (
        {
            **_SHAPE,
            "type_vocab_size": 0,
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["c2p", "p2c"],
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "conv_kernel_size": 3,
            "conv_act": "gelu",
        },
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
    ),
    "gpt2": (
        {
            "vocab_size": 48,
            "n_positions": 24,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        "GPT2Config",
        "GPT2LMHeadModel",
    ),
}
_QUERY_VALUE = {"r": 4, "lora_alpha": 10, "target_modules": ["query", "value"]}
_DEBERTA = {"r": 4, "lora_alpha": 6, "target_modules": ["query_proj", "value_proj"]}
_C_ATTN = {"r": 4, "lora_alpha": 12, "target_modules": ["c_attn"]}
# Case: settings of PEFT's LoraConfig. A case's name begins with its family's.
CASES = {
    "roberta_query_value": {**_QUERY_VALUE, "lora_dropout": 0.1},
    "roberta_rslora": {**_QUERY_VALUE, "r": 3, "use_rslora": True},
    # In PEFT the first pattern that fits a module is taken, in the order of the settings; it fits
    # the end of a module's name, or with ^ the whole.
    "roberta_patterns": {
        **_QUERY_VALUE,
        "rank_pattern": {"layer.0.attention.self.query": 2, "value": 5},
        "alpha_pattern": {
            "^layer.0.attention.self.value": 50,
            "^roberta.encoder.layer.1.attention.self.value": 7,
            "layer.0.attention.self.value": 3,
            "value": 20,
            "layer.1.attention.self.query": 5,
        },
    },
    "roberta_rslora_patterns": {
        **_QUERY_VALUE,
        "use_rslora": True,
        "rank_pattern": {"query": 2},
        "alpha_pattern": {"layer.1.attention.self.query": 5},
    },
    "roberta_all_targets": {
        **_QUERY_VALUE,
        "target_modules": ["query", "key", "value", "dense"],
    },
    "roberta_bias_all": {**_QUERY_VALUE, "bias": "all"},
    "roberta_bias_lora_only": {**_QUERY_VALUE, "bias": "lora_only"},
    "deberta_query_value": {**_DEBERTA, "modules_to_save": ["classifier", "pooler"]},
    # PEFT itself saves a classifier alone.
    "deberta_no_pooler": _DEBERTA,
    "roberta_one_layer": {**_QUERY_VALUE, "layers_to_transform": [1]},
    "gpt2_blocks": _C_ATTN,
    "gpt2_blocks_rslora": {**_C_ATTN, "r": 6, "use_rslora": True},
    "gpt2_blocks_bias": {**_C_ATTN, "bias": "lora_only"},
    "gpt2_c_attn": _C_ATTN,
    "gpt2_attention_output": {**_C_ATTN, "target_modules": ["attn.c_proj"]},
    "gpt2_all_targets": {**_C_ATTN, "target_modules": ["c_attn", "c_proj", "c_fc"]},
}


def family_of(case: str) -> str:
    """The family that a case's base is of."""
    return case.partition("_")[0]


# ------------------------------------------------------------------------------------------------
# Reading
# ------------------------------------------------------------------------------------------------


class PeftFixture:
    """What the file holds.

    Attributes:
        ids, mask: the batch, (rows, length), padded on the right.
    """

    def __init__(self) -> None:
        self._tensors = load_file(FIXTURE)
        with safe_open(FIXTURE, framework="pt") as file:
            self._metadata = file.metadata()
        self.ids = self._tensors["inputs/ids"]
        self.mask = self._tensors["inputs/mask"]

    def _under(self, start: str) -> dict[str, torch.Tensor]:
        """Copies, which whoever gets them may change."""
        named = self._tensors.items()
        return {name.removeprefix(start): t.clone() for name, t in named if name.startswith(start)}

    def base(self, family: str) -> dict[str, torch.Tensor]:
        """A base's tensors, by upstream's names."""
        return self._under(f"base/{family}/")

    def tensors(self, case: str) -> dict[str, torch.Tensor]:
        """An adapter's tensors, by PEFT's names."""
        return self._under(f"adapter/{case}/")

    def config(self, case: str) -> dict[str, Any]:
        """An adapter's settings, as PEFT wrote them."""
        return json.loads(self._metadata[f"adapter/{case}"])

    def logits(self, case: str) -> torch.Tensor:
        """PEFT's: (rows, labels), or (rows, length, vocabulary) with zeros at padding."""
        return self._tensors[f"logits/{case}"]

    def write_base(self, folder: Path, family: str) -> Path:
        """Writes a base's folder, as upstream has it; returns it."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(self._metadata[f"base/{family}"])
        save_file(self.base(family), folder / "model.safetensors", {"format": "pt"})
        return folder

    def write_adapter(self, folder: Path, case: str, **changed: Any) -> Path:
        """Writes an adapter's folder, as PEFT does but for changed settings; returns it."""
        folder.mkdir(parents=True)
        config = {**self.config(case), **changed}
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
        save_file(self.tensors(case), folder / "adapter_model.safetensors", {"format": "pt"})
        return folder


# ------------------------------------------------------------------------------------------------
# Making
# ------------------------------------------------------------------------------------------------


def draw(named: Iterator[tuple[str, torch.nn.Parameter]], seed: str) -> None:
    """Values of such a size that every one of them shows in logits of about 1."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    for name, parameter in named:
        values = torch.randn(parameter.shape, generator=generator)
        is_embedding = "embeddings" in name or ".wte." in name or ".wpe." in name
        if parameter.dim() == 1 and name.endswith("weight"):
            values = 1 + 0.3 * values
        elif "lora_" in name:
            values *= 0.15
        elif parameter.dim() == 1 or is_embedding:
            values *= 0.3
        else:
            fan_in = parameter.shape[0] if ".h." in name else parameter[0].numel()
            values *= 1.5 / fan_in**0.5
        parameter.data.copy_(values)


def draw_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and their mask."""
    generator = torch.Generator().manual_seed(0)
    length = max(LENGTHS)
    ids = torch.randint(3, _SHAPE["vocab_size"], (len(LENGTHS), length), generator=generator)
    mask = (torch.arange(length) < torch.tensor(LENGTHS)[:, None]).long()
    return ids.masked_fill(mask == 0, PADDING), mask


def build(family: str) -> torch.nn.Module:
    """A base of upstream's with drawn weights."""
    import transformers

    settings, config_class, model_class = FAMILIES[family]
    config = getattr(transformers, config_class)(**settings)
    model = getattr(transformers, model_class)(config).eval()
    draw(model.named_parameters(), family)
    return model


def adapted(case: str) -> torch.nn.Module:
    """A base with an adapter of PEFT's, all of whose weights are drawn."""
    import peft

    family = family_of(case)
    task = "CAUSAL_LM" if family == "gpt2" else "SEQ_CLS"
    config = peft.LoraConfig(task_type=task, fan_in_fan_out=family == "gpt2", **CASES[case])
    model = peft.get_peft_model(build(family), config).eval()
    draw(((name, p) for name, p in model.named_parameters() if p.requires_grad), case)
    if case.startswith("gpt2_blocks"):
        _keep_blocks(model)
    lora = [name for name in model.state_dict() if "lora_" in name]
    assert not any("classifier" in name or "pooler" in name for name in lora)
    return model


def _keep_blocks(model: torch.nn.Module) -> None:
    """Leaves of B a block for the query, with the first half of A, and one for the value."""
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            rows, rank = parameter.shape
            blocks = torch.zeros(3, rows // 3, 2, rank // 2)
            blocks[0, :, 0] = blocks[2, :, 1] = 1
            parameter.data *= blocks.reshape(rows, rank)


@torch.no_grad()
def logits_of(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As `PeftFixture.logits`."""
    logits = model(input_ids=ids, attention_mask=mask).logits
    return logits * mask[..., None] if logits.dim() == 3 else logits


def saved(case: str, folder: Path) -> tuple[dict[str, torch.Tensor], str, torch.nn.Module]:
    """A case's tensors and settings as PEFT writes them, and the model that it reads them into."""
    import peft

    model = adapted(case)
    model.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(build(family_of(case)), folder).eval()
    inputs = draw_inputs()
    difference = (logits_of(model, *inputs) - logits_of(again, *inputs)).abs().max()
    assert difference < 1e-6, f"{case}: PEFT does not read what it wrote ({difference:.1e})"
    tensors = load_file(folder / "adapter_model.safetensors")
    return tensors, (folder / "adapter_config.json").read_text(), again


def main() -> None:
    """Writes the fixture beside this script."""
    import peft

    import transformers

    ids, mask = draw_inputs()
    tensors = {"inputs/ids": ids, "inputs/mask": mask}
    metadata = {"peft": peft.__version__, "transformers": transformers.__version__}
    plain = {}
    for family in FAMILIES:
        base = build(family)
        base.config.architectures = [type(base).__name__]
        metadata[f"base/{family}"] = base.config.to_json_string()
        held = {n: t for n, t in base.state_dict().items() if n != "lm_head.weight"}
        tensors |= {f"base/{family}/{name}": tensor for name, tensor in held.items()}
        plain[family] = logits_of(base, ids, mask)
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            its, settings, model = saved(case, Path(folder))
        metadata[f"adapter/{case}"] = settings
        tensors |= {f"adapter/{case}/{name}": tensor for name, tensor in its.items()}
        logits = tensors[f"logits/{case}"] = logits_of(model, ids, mask)
        moved = (logits - plain[family_of(case)]).abs().max()
        print(f"{case}: logits' standard deviation {logits.std():.2f}, moved by up to {moved:.2f}")
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(tensors, FIXTURE, metadata)
    FIXTURE.chmod(0o644)
    print(f"{FIXTURE.name}: {FIXTURE.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
