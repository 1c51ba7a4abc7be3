"""A small GPT-2 to train: its files, its data, and the command line."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any


class Trial:
    """A small GPT-2's files and data, and the command line that trains it.

    Args:
        folder: for the files.
        config: a `GPT2Config` with LoRA.
        count: training examples.
    """

    def __init__(self, folder: Path, config: Any, count: int):
        self.folder, self.config = folder, config
        # Some examples are cut by --seq_len, in their completion or even before it.
        self.examples = self._write_examples("train.jsonl", count)
        self.valid_examples = self._write_examples("valid.jsonl", 7)
        self.base = self._write_model("base.pt", 0)
        self.base_with_lora = self._write_model("base_with_lora.pt", config.lora_attn_dim)

    def _write_examples(self, name: str, count: int) -> list[dict[str, list[int]]]:
        draw = random.Random(name)

        def tokens(low: int, high: int) -> list[int]:
            return draw.choices(range(self.config.vocab_size), k=draw.randint(low, high))

        rows = [{"context": tokens(0, 14), "completion": tokens(1, 9)} for _ in range(count)]
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return rows

    def _write_model(self, name: str, rank: int) -> Path:
        """Writes a model whose weights, also LoRA's, are far from their start, so all matter."""
        import torch

        from checkpoints import Base, save_model
        from model import GPT2LMModel

        torch.manual_seed(4)
        model = GPT2LMModel(dataclasses.replace(self.config, lora_attn_dim=rank))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1.2 * self.config.n_embd**-0.5)
        save_model(self.folder / name, model, Base({}), lora_only=False)
        return self.folder / name

    def flags(self, work_dir: Path, *more: object, lora: bool = True) -> list[str]:
        """The flags that train LoRA, which starts with nonzero weights, or all of the model."""
        named = {
            "platform": "local",
            "model_card": "gpt2.xs",
            "train_data": self.folder / "train.jsonl",
            "valid_data": self.folder / "valid.jsonl",
            "train_batch_size": 4,
            "valid_batch_size": 3,
            "seq_len": 12,
            "log_interval": 1,
            "init_checkpoint": self.base_with_lora if lora else self.base,
            "work_dir": work_dir,
        }
        if lora:
            named |= {"lora_dim": self.config.lora_attn_dim}
            named |= {"lora_alpha": self.config.lora_attn_alpha}
        given = [word for name, value in named.items() for word in (f"--{name}", value)]
        return [str(word) for word in (*given, *more)]
