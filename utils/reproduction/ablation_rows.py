"""Defines the questions of utils/ablations.py, and the rows that each compares."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

ALPHA = 16
ALL = "query key value attention_output"


@dataclass(frozen=True)
class Row:
    """A way to adapt the base.

    Args:
        name: the row's name in the tables.
        flags: the flags of run_glue.py in which rows differ.
    """

    name: str
    flags: Mapping[str, Any]

    @cached_property
    def key(self) -> str:
        """The flags as text; rows with the same flags share their runs, also between questions."""
        return json.dumps(self.flags, sort_keys=True)

    @property
    def rank(self) -> int | None:
        """LoRA's r; None without LoRA."""
        return self.flags.get("lora_r")

    def __str__(self) -> str:
        return f"{self.name} (r = {self.rank})"


@dataclass(frozen=True)
class Question:
    """Rows that are compared with each other.

    Args:
        title: the title of the table, and of the picture's panel.
        rows: the rows in the table's order.
        over_rank: whether the picture shows curves over the rank, one for each name of rows.
    """

    title: str
    rows: Sequence[Row]
    over_rank: bool = False


def lora(targets: str, r: int, name: str | None = None, **flags: Any) -> Row:
    """Returns a row with LoRA; alpha is the same for all ranks, as in the paper (section 4.1)."""
    shared = {"apply_lora": True, "lora_alpha": ALPHA}
    own = {"lora_targets": targets.split(), "lora_r": r, **flags}
    return Row(name or targets.replace(" ", ", "), shared | own)


def variant(name: str, **flags: Any) -> Row:
    """Returns a row with LoRA as in the release, on query and value with r = 8."""
    return lora("query value", 8, name, **flags)


HEAD_ALONE = Row("the head alone", {})
QUESTIONS = (
    Question(
        "Which projections (table 5)",
        [
            *(lora("query", 8), lora("key", 8), lora("value", 8)),
            lora("attention_output", 8, "attention output"),
            *(lora("query key", 4), lora("query value", 4), lora(ALL, 2, "all four")),
        ],
    ),
    Question(
        "Which rank (table 6)",
        [
            lora(targets, r, name)
            for targets, name in (("query", None), ("query value", None), (ALL, "all four"))
            for r in (1, 2, 4, 8, 64)
        ],
        over_rank=True,
    ),
    Question(
        "Which variant (query, value, r = 8)",
        [
            variant("LoRA"),
            variant("rsLoRA", lora_variant="rslora"),
            variant("DoRA", lora_variant="dora"),
            variant("rsLoRA + DoRA", lora_variant="rslora+dora"),
            variant("LoRA+, ratio 16", lora_plus_ratio=16),
            variant("PiSSA", lora_init="pissa"),
            variant("OLoRA", lora_init="olora"),
            variant("orthogonal", lora_init="orthogonal"),
            variant("LoRA-FA", lora_freeze_A=True),
        ],
    ),
)
