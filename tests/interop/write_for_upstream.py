"""Writes what upstream's Transformers and PEFT must be able to load: adapters and merged models.

The first half of a pair, to be run by hand. Run this one in the project's environment, and the
second in an environment of its own, with upstream's transformers (last tried: 5.23), PEFT (0.21.2)
and torch:

    python tests/interop/write_for_upstream.py OUT
    python tests/interop/check_with_upstream.py OUT

OUT, which must not exist, then holds

    bases/<family>       plain bases as upstream has them, of tests/fixtures/make_peft_fixture.py
    bases/<family>_<head>   the same with other heads
    lora/<name>          adapters of models of this project, as its runs write them
    pefts_own/<name>     adapters as PEFT itself wrote them, of the same fixture
    peft/<name>          adapters in PEFT's format, by utils/convert.py
    merged/<name>        the same merged into their bases, by utils/convert.py
    cases.json           for each folder of the last two its format, its base, and its head
    tensors.safetensors  the batch, and as `logits/<name>` what upstream has to compute

Names that begin with "ours" are adapters of this project's models, whose logits are expected. Names
that begin with "theirs" are adapters of PEFT's that this project read and wrote again, and PEFT's
logits are expected.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

# Folders of scripts, not packages.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "NLG" / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "utils"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "fixtures"))

import make_peft_fixture as maker

import convert
from checkpoints import read_base, save_model
from loralib.adapters.formats import read_adapter, why_not_expressible, write_adapter
from model import GPT2Config
from transformers import AutoModelForSequenceClassification
from transformers.adaptation_settings import LORA_TARGETS
from transformers.models.auto.modeling_auto import auto_model_for
from weights import load_base

# Settings of LoRA. DeBERTa's reaches only contents, which PEFT cannot express, or positions too.
ENCODERS = {
    "roberta_query_value": {"lora_targets": ["query", "value"]},
    "roberta_all_targets": {"lora_targets": list(LORA_TARGETS)},
    "deberta_query_value": {"lora_targets": ["query", "value"]},
    "deberta_all_targets": {"lora_targets": list(LORA_TARGETS)},
    "deberta_query_value_positions": {"lora_targets": ["query", "value"], "lora_positions": True},
    "deberta_all_targets_positions": {"lora_targets": list(LORA_TARGETS), "lora_positions": True},
}


HEADS = (
    *(("roberta", "token_classification"), ("deberta", "token_classification")),
    *(("roberta", "question_answering"), ("deberta", "question_answering")),
    *(("roberta", "multiple_choice"), ("roberta", "causal_lm")),
)


class Writer:
    """Writes cases into a folder.

    Args:
        out: the folder.
    """

    def __init__(self, out: Path):
        self.out = out
        self.fixture = maker.PeftFixture()
        self.bases = {
            family: self.fixture.write_base(out / "bases" / family, family)
            for family in maker.FAMILIES
        }
        self.cases: list[dict[str, str]] = []
        self.tensors = {"ids": self.fixture.ids, "mask": self.fixture.mask}
        for folder in ("lora", "peft", "merged"):
            (out / folder).mkdir()

    def add(
        self, name: str, base_name: str, source: Path, logits: Tensor, head: str | None = None
    ) -> None:
        """Converts an adapter to PEFT's format, if that can express it, and to a merged model.

        Both must compute `logits`.
        """
        self.tensors[f"logits/{name}"] = logits.contiguous()
        base = self.bases[base_name]
        head = head or ("causal_lm" if base_name == "gpt2" else "sequence_classification")
        formats = ["peft"] if why_not_expressible(read_adapter(source), "peft") is None else []
        for format in (*formats, "merged"):
            folder = self.out / format / name
            convert.main([str(source), str(folder), "--to", format, "--base", str(base)])
            place = {"folder": f"{format}/{name}", "base": f"bases/{base_name}"}
            self.cases.append({"name": name, "format": format, "head": head, **place})

    @torch.no_grad()
    def add_encoder(self, case: str, settings: dict[str, Any]) -> None:
        """A classifier of this project, with random LoRA and a random head."""
        family = maker.family_of(case)
        model = AutoModelForSequenceClassification.from_pretrained(
            self.bases[family], apply_lora=True, lora_r=3, lora_alpha=12, **settings
        )
        self._draw(model, trained=("lora_", "classifier", "pooler.dense"))
        source = self.out / "lora" / f"{case}.safetensors"
        write_adapter(source, model.adapter())
        batch = {"input_ids": self.fixture.ids, "attention_mask": self.fixture.mask}
        self.add(f"ours_{case}", family, source, model(**batch).logits)

    @torch.no_grad()
    def add_head(self, family: str, head: str) -> None:
        """A model with another head than a classifier's, both it and LoRA random."""
        name, auto_model = f"{family}_{head}", auto_model_for(head)
        settings = {"is_decoder": True} if head == "causal_lm" else {}
        plain = auto_model.from_pretrained(self.bases[family], **settings)
        self.bases[name] = self.out / "bases" / name
        plain.save_pretrained(self.bases[name])
        positions = {"lora_positions": True} if family == "deberta" else {}
        model = auto_model.from_pretrained(
            self.bases[name], apply_lora=True, lora_r=3, lora_alpha=12, **positions
        )
        trained = model.adapter().tensors
        maker.draw(((n, p) for n, p in model.named_parameters() if n in trained), "ours")
        source = self.out / "lora" / f"{name}.safetensors"
        write_adapter(source, model.adapter())
        batch = {"input_ids": self.fixture.ids, "attention_mask": self.fixture.mask}
        if head == "multiple_choice":
            batch = {key: value.unflatten(0, (2, 2)) for key, value in batch.items()}
        output, is_token = model(**batch), self.fixture.mask == 1
        if head == "question_answering":
            logits = torch.stack([output.start_logits, output.end_logits], dim=-1)
        else:
            logits = output.logits
        if logits.shape[:2] == is_token.shape:
            logits = logits.masked_fill(~is_token[..., None], 0)
        self.add(f"ours_{name}", name, source, logits, head)

    @torch.no_grad()
    def add_gpt2(self) -> None:
        """A GPT-2 of this project, with random LoRA, as gpt2_ft.py saves it."""
        base = read_base(str(self.bases["gpt2"] / "model.safetensors"))
        shape = maker.FAMILIES["gpt2"][0]
        known = {field.name for field in dataclasses.fields(GPT2Config)}
        config = GPT2Config(
            **{name: value for name, value in shape.items() if name in known},
            lora_attn_dim=3,
            lora_attn_alpha=12,
        )
        model = load_base(config, base.tensors, "the base").eval()
        self._draw(model, trained=("lora_",))
        source = self.out / "lora" / "gpt2.pt"
        save_model(source, model, base, lora_only=True)
        logits = model(self.fixture.ids) * self.fixture.mask[..., None]
        self.add("ours_gpt2", "gpt2", source, logits)

    def add_pefts(self, case: str) -> None:
        """An adapter of PEFT's, which this project reads and writes."""
        source = self.fixture.write_adapter(self.out / "pefts_own" / case, case)
        family = maker.family_of(case)
        self.add(f"theirs_{case}", family, source, self.fixture.logits(case))

    def _draw(self, model: nn.Module, trained: tuple[str, ...]) -> None:
        named = model.named_parameters()
        maker.draw(((n, p) for n, p in named if any(part in n for part in trained)), "ours")

    def finish(self) -> None:
        """Writes the list of cases and the tensors."""
        save_file(self.tensors, self.out / "tensors.safetensors")
        (self.out / "cases.json").write_text(json.dumps(self.cases, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Parses and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    out = parser.parse_args(argv).out
    out.mkdir(parents=True)
    writer = Writer(out)
    for case, settings in ENCODERS.items():
        writer.add_encoder(case, settings)
    for family, head in HEADS:
        writer.add_head(family, head)
    writer.add_gpt2()
    for case in maker.CASES:
        writer.add_pefts(case)
    writer.finish()
    print(f"{out}: {len(writer.cases)} cases")


if __name__ == "__main__":
    main()
