"""Times predictions of this project's RoBERTa with a bank of adapters, as in predict.py."""

import our_bank
import torch
from adapter_rows import inputs_of
from our_bank import banked
from timing import Batch, Step, run
from torch import Tensor

import transformers
from loralib.nn.packing import PackedRows
from loralib.training.determinism import set_up_device
from loralib.training.precision import Precision, cast_frozen
from transformers import RobertaConfig, RobertaForSequenceClassification


def make_batch(plan: dict, index: int, entry: dict) -> Batch:
    """Makes a batch as predict.py collates it, with packed_rows; for switches without."""
    batch = our_bank.make_batch(plan, index, entry)
    if not entry["lengths"]:
        return batch
    return {**batch, "packed_rows": PackedRows(batch["attention_mask"])}


def make_step(plan: dict) -> Step:
    """Returns the work that the plan asks for: a batch's logits, or switches."""
    set_up_device()
    model = RobertaForSequenceClassification(RobertaConfig(**plan["shape"])).eval()
    model.train_only(())
    cast_frozen(model, getattr(torch, plan["weights"]))
    model.to(plan["device"])
    precision = Precision(getattr(torch, plan["autocast"] or "float32"), plan["device"])

    @torch.inference_mode()
    def plain(batch: Batch) -> Tensor:
        with precision.autocast():
            rows = batch.get("packed_rows")
            return model(**inputs_of(batch), packed_rows=rows)["logits"].float()

    return banked(plan, model, plain)


if __name__ == "__main__":
    run(make_step, make_batch, {"this project": transformers.__version__})
