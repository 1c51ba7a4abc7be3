"""What test_distributed.py runs in each of two processes: ``two_processes.py CALLS RESULTS``.

CALLS is a JSON file with a list of command lines for run_glue.py and of {"copy": [FROM, TO]}, which
are run one after the other. A short training then counts its all-reduces; the main process writes
the numbers of the batches that had one to RESULTS.
"""

import importlib.util
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from transformers import RobertaConfig, RobertaForSequenceClassification, Trainer, TrainingArguments
from transformers.utils.cli import run_script

SCRIPT = Path(__file__).resolve().parents[2] / "examples/text-classification/run_glue.py"


def load_script():
    spec = importlib.util.spec_from_file_location("run_glue", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_glue"] = module
    spec.loader.exec_module(module)
    return module


class Counting(Trainer):
    """Records the batches at which gradients are summed over the processes."""

    def _wrap(self):
        super()._wrap()
        self.batch, self.summed = 0, []

        def hook(group, bucket):
            if self.batch:  # not while DDP is warmed up
                self.summed.append(self.batch)
            return allreduce_hook(group, bucket)

        self.model_wrapped.register_comm_hook(None, hook)

    def training_step(self, model, inputs):
        self.batch += 1
        return super().training_step(model, inputs)


def batches_with_all_reduce(folder: str) -> list[int]:
    config = RobertaConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    rows = [
        {"input_ids": [0, n + 3, 2], "attention_mask": [1, 1, 1], "label": n % 2} for n in range(14)
    ]
    args = TrainingArguments(
        folder,
        report_to=["none"],
        disable_tqdm=True,
        save_strategy="no",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=3,
        num_train_epochs=2,
    )
    trainer = Counting(RobertaForSequenceClassification(config), args, train_dataset=rows)
    trainer.train()
    return trainer.summed


def main(calls: str, results: str) -> None:
    script = load_script()
    for call in json.loads(Path(calls).read_text()):
        if "copy" not in call:
            script.main(call)
            continue
        if dist.get_rank() == 0:
            shutil.copytree(*call["copy"])
        dist.barrier()
    summed = batches_with_all_reduce(str(Path(results).parent / "counted"))
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(summed))


if __name__ == "__main__":
    run_script(partial(main, *sys.argv[-2:]))
