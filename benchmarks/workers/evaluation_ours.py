"""Times this project's evaluation and predict.py on sets of texts."""

import importlib.util
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from adapter_rows import draw_weights
from evaluation_texts import LogitsOf, check_answers, make_batch, make_tokenizer
from our_bank import make_adapter
from timing import Batch, Step, run
from torch import Tensor

import transformers
from loralib.serving.bank import AdapterBank
from loralib.training.determinism import set_up_device
from loralib.training.precision import Precision, cast_frozen
from transformers import (
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainingArguments,
)
from transformers.data.data_collator import PackedCollator

ROOT = Path(__file__).resolve().parents[2]
make_batch = partial(make_batch, PreTrainedTokenizerFast)


def make_step(plan: dict) -> Step:
    """Returns the work that the plan asks for."""
    logits_of = {"evaluation": evaluation, "predict.py": prediction}[plan["work"]](plan)
    check_answers(plan, make_batch, logits_of)
    return logits_of


def evaluation(plan: dict) -> LogitsOf:
    """Returns the Trainer's evaluation."""
    lora = {"apply_lora": True, "lora_r": plan["rank"], "lora_alpha": plan["alpha"]}
    model = RobertaForSequenceClassification(RobertaConfig(**plan["shape"], **lora))
    model.train_only(("lora",))
    draw_weights(parameter for parameter in model.parameters() if parameter.requires_grad)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_eval_batch_size=plan["rows"],
        bf16=plan["autocast"] == "bfloat16",
        no_cuda=plan["device"] == "cpu",
        report_to=["none"],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, tokenizer=make_tokenizer(PreTrainedTokenizerFast, plan))
    return lambda batch: torch.from_numpy(trainer.predict(batch["rows"]).predictions)


def prediction(plan: dict) -> LogitsOf:
    """Returns the work of predict.py, from texts to answers."""
    set_up_device()
    script = load_script()
    model = RobertaForSequenceClassification(RobertaConfig(**plan["shape"])).eval()
    model.train_only(())
    cast_frozen(model, getattr(torch, plan["weights"]))
    model.to(plan["device"])
    bank = AdapterBank(model)
    for name in sorted({name for entry in plan["batches"] for name in entry["adapters"]}):
        bank.add(name, make_adapter(model, plan["rank"], plan["alpha"]))
    precision = Precision(getattr(torch, plan["autocast"] or "float32"), plan["device"])
    tokenizer = make_tokenizer(PreTrainedTokenizerFast, plan)
    collate = PackedCollator(DataCollatorWithPadding(tokenizer))

    def logits_of(batch: Batch) -> Tensor:
        lines = [{"text": first, "text_pair": second} for first, second in batch["pairs"]]
        rows, _ = script.tokenize(lines, tokenizer, tokenizer.model_max_length)
        size = plan["rows"]
        logits = script.compute_logits(
            model, bank, batch["adapters"], rows, collate, precision, size
        )
        for row in logits:
            script.answer(row, ("no", "yes"))
        return torch.from_numpy(np.stack(logits))

    return logits_of


def load_script() -> ModuleType:
    """Imports predict.py as a module."""
    path = ROOT / "examples" / "text-classification" / "predict.py"
    spec = importlib.util.spec_from_file_location("predict", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    run(make_step, make_batch, {"this project": transformers.__version__})
