"""Makes sets of pairs of texts for evaluation.py, and checks the contestants' logits.

Its plan has the fields of timing.py, and

batches    each a set: {"pairs": [[text, text]], "lengths": of their rows, "adapters": names}
vocab      the two files of a byte-level BPE; null: every byte is a token
work       "evaluation" or "predict.py"        rows      in a batch
rank, alpha   LoRA's                           order     "by length", or "as it comes"
"""

from collections.abc import Callable
from typing import Any

import torch
from adapter_rows import TOLERANCE
from timing import Batch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

LONGEST = 512
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")

# A set -> its logits, (texts, labels), in the set's order.
LogitsOf = Callable[[Batch], Tensor]


def make_tokenizer(tokenizer_class: type, plan: dict) -> Any:
    """Builds RoBERTa's tokenizer, from a class that both sides have under the same name."""
    tokenizer = tokenizer_class(
        tokenizer_object=_joining_pairs(plan),
        cls_token="<s>",
        pad_token="<pad>",
        sep_token="</s>",
        unk_token="<unk>",
        model_max_length=LONGEST,
    )
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


def _joining_pairs(plan: dict) -> Tokenizer:
    """Builds a byte-level BPE that joins pairs as RoBERTa's does, with its special tokens' ids."""
    pieces, merges = {}, []
    if plan["vocab"]:
        pieces, merges = models.BPE.read_file(*plan["vocab"])
    names = sorted(pieces, key=pieces.get) or sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *(name for name in names if name not in SPECIAL)]
    ids = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ends = (("</s>", ids["</s>"]), ("<s>", ids["<s>"]))
    tokenizer.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=False)
    return tokenizer


def make_batch(tokenizer_class: type, plan: dict, index: int, entry: dict) -> Batch:
    """Makes a set: for predict.py the entry as it is, else with its "rows" of ids and labels.

    Raises:
        ValueError: the texts do not have the lengths in the plan, from which the amount of work is
            computed.
    """
    if plan["work"] == "predict.py":
        return entry
    texts = map(list, zip(*entry["pairs"], strict=True))
    encoded = make_tokenizer(tokenizer_class, plan)(*texts, truncation=True)["input_ids"]
    lengths = [len(ids) for ids in encoded]
    if lengths != entry.get("lengths", lengths):
        raise ValueError(f"texts have {lengths} tokens, not {entry['lengths']}")
    rows = [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "label": number % 2}
        for number, ids in enumerate(encoded)
    ]
    return {**entry, "rows": rows}


def order_of(plan: dict, lengths: list[int]) -> list[int]:
    """Returns the order in which a peer computes rows of these lengths."""
    rows = list(range(len(lengths)))
    return rows if plan["order"] == "as it comes" else sorted(rows, key=lambda row: -lengths[row])


def in_place(order: list[int], logits: Tensor) -> Tensor:
    """Returns rows that were computed in `order` in the set's order again."""
    placed = torch.empty_like(logits)
    placed[order] = logits
    return placed


def check_answers(
    plan: dict, make_batch: Callable[[dict, int, dict], Batch], logits_of: LogitsOf
) -> None:
    """Checks, on short texts, that a text has the same logits in a set as alone.

    Args:
        plan: the worker's plan.
        make_batch: the worker's function of that name.
        logits_of: computes the worker's logits.

    Raises:
        ValueError: a text has not; or all texts have the same logits, so that the times would not
            be those of real work.
    """
    entry = plan["batches"][0]
    pairs = [[a[: 3 + 5 * (n % 7)], b[: 4 + n]] for n, (a, b) in enumerate(entry["pairs"][:9])]
    adapters = entry["adapters"][: len(pairs)]

    def logits_of_some(some: slice) -> Tensor:
        return logits_of(make_batch(plan, 0, {"pairs": pairs[some], "adapters": adapters[some]}))

    together = logits_of_some(slice(None))
    alone = torch.cat([logits_of_some(slice(n, n + 1)) for n in range(len(pairs))])
    tolerance = TOLERANCE[plan["autocast"] or plan["weights"]]
    error = (together - alone).abs().max().item()
    if not error <= tolerance:
        raise ValueError(f"logits of a batch differ by {error:.2g} from those of each text alone")
    if (together - together[0]).abs().max().item() <= tolerance:
        raise ValueError("all texts have the same logits")
