"""Times evaluation and prediction of sets of texts by PEFT on upstream Transformers.

Runs in the environment of requirements-peers.txt.
"""

import tempfile
from functools import partial
from itertools import groupby

import torch
from adapter_rows import TARGETS, draw_weights
from evaluation_texts import (
    LogitsOf,
    check_answers,
    in_place,
    make_batch,
    make_tokenizer,
    order_of,
)
from mixed_adapters_peers import with_adapters
from peft import LoraConfig, get_peft_model
from timing import Batch, Step, run
from torch import Tensor
from upstream import versions

from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    Trainer,
    TrainingArguments,
)

make_batch = partial(make_batch, PreTrainedTokenizerFast)


def make_step(plan: dict) -> Step:
    """Returns the work that the plan asks for.

    Attention, the adapters' dtype and the heads are PEFT's defaults.
    """
    base = AutoModelForSequenceClassification.from_config(
        RobertaConfig(**plan["shape"]), dtype=getattr(torch, plan["weights"])
    )
    work = {"evaluation": evaluation, "predict.py": prediction}[plan["work"]]
    logits_of = work(plan, base)
    check_answers(plan, make_batch, logits_of)
    return logits_of


def evaluation(plan: dict, base: PreTrainedModel) -> LogitsOf:
    """Returns the Trainer's evaluation, on rows that are sorted first."""
    settings = LoraConfig(
        task_type="SEQ_CLS",
        r=plan["rank"],
        lora_alpha=plan["alpha"],
        target_modules=list(TARGETS),
    )
    model = get_peft_model(base, settings)
    draw_weights(parameter for parameter in model.parameters() if parameter.requires_grad)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_eval_batch_size=plan["rows"],
        bf16=plan["autocast"] == "bfloat16",
        use_cpu=plan["device"] == "cpu",
        report_to="none",
        disable_tqdm=True,
    )
    collator = DataCollatorWithPadding(make_tokenizer(PreTrainedTokenizerFast, plan))
    trainer = Trainer(model, arguments, data_collator=collator)

    def logits_of(batch: Batch) -> Tensor:
        rows = batch["rows"]
        order = order_of(plan, [len(row["input_ids"]) for row in rows])
        logits = trainer.predict([rows[index] for index in order]).predictions
        return in_place(order, torch.from_numpy(logits).float())

    return logits_of


def prediction(plan: dict, base: PreTrainedModel) -> LogitsOf:
    """Returns the work from texts to probabilities: one adapter after the other, on sorted rows."""
    names = sorted({name for entry in plan["batches"] for name in entry["adapters"]})
    model = with_adapters(base, plan, names).to(plan["device"]).eval()
    tokenizer = make_tokenizer(PreTrainedTokenizerFast, plan)
    collate = DataCollatorWithPadding(tokenizer)
    device, autocast = plan["device"], plan["autocast"]
    dtype = getattr(torch, autocast) if autocast else None

    @torch.inference_mode()
    def logits_of(batch: Batch) -> Tensor:
        texts = map(list, zip(*batch["pairs"], strict=True))
        ids = tokenizer(*texts, truncation=True)["input_ids"]
        order = sorted(order_of(plan, list(map(len, ids))), key=lambda row: batch["adapters"][row])
        found = []
        for name, group in groupby(order, key=lambda row: batch["adapters"][row]):
            model.set_adapter(name)
            rows = list(group)
            for start in range(0, len(rows), plan["rows"]):
                chosen = [{"input_ids": ids[row]} for row in rows[start : start + plan["rows"]]]
                inputs = collate(chosen).to(device)
                with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                    found.append(model(**inputs).logits.float().cpu())
        logits = in_place(order, torch.cat(found))
        logits.softmax(1).tolist()
        return logits

    return logits_of


if __name__ == "__main__":
    run(make_step, make_batch, versions())
