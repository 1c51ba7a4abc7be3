"""Defines what the study compares: methods that adapt its encoder, and its GPT-2."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reproduction.ablation_rows import ALL, HEAD_ALONE, Row, lora

QV = "query value"
RANKS = (1, 2, 4, 8, 64)

# Learning rates about a factor of three apart. Methods that train the base's own weights need small
# ones. Methods that start without any change to the base need large ones.
SMALL_RATES = (1e-4, 3e-4, 1e-3, 3e-3)
LARGE_RATES = (3e-4, 1e-3, 3e-3)


@dataclass(frozen=True)
class Method:
    """A row of the study's tables.

    Args:
        row: the method's name, and its flags of run_glue.py.
        rates: the learning rates to choose from.
        trains_base: whether all of the base's own weights are trained.
        tuned_as: another method whose learning rate is used; None to choose one.
    """

    row: Row
    rates: Sequence[float] = LARGE_RATES
    trains_base: bool = False
    tuned_as: "Method | None" = None

    @property
    def name(self) -> str:
        """The method's name in the tables, which is unique."""
        return self.row.name


def _lora(targets: str, r: int, words: str) -> Method:
    return Method(lora(targets, r, f"LoRA, {words}, r = {r}"))


def _like(method: Method, targets: str, r: int, words: str) -> Method:
    return replace(_lora(targets, r, words), tuned_as=method)


ADAPTERS = {"apply_adapter": True, "adapter_type": "houlsby", "adapter_size": 16}
FULL = Method(Row("full fine-tuning", {}), SMALL_RATES, trains_base=True)
LORA = {r: _lora(QV, r, "query + value") for r in RANKS}
METHODS = (
    FULL,
    *LORA.values(),
    Method(Row("bottleneck adapters", ADAPTERS)),
    Method(Row("BitFit", {"apply_bitfit": True})),
    Method(HEAD_ALONE),
)
"""The methods that adapt every task."""

_SINGLE = {"query": "query", "key": "key", "value": "value", "attention_output": "output"}
PROJECTIONS = (
    *(_like(LORA[8], target, 8, words) for target, words in _SINGLE.items()),
    _like(LORA[4], "query key", 4, "query + key"),
    LORA[4],
    _like(LORA[2], ALL, 2, "all four"),
)
"""The paper's table 5: which projections to adapt with the same number of parameters."""
BY_RANK = tuple(
    LORA[r] if targets == QV else _like(LORA[r], targets, r, words)
    for targets, words in (("query", "query"), (QV, ""), (ALL, "all four"))
    for r in RANKS
)
"""The paper's table 6: which rank suffices."""
WEIGHTS_TASK = "sst2"
"""The task of tables 5 and 6. A row has the learning rate chosen for query + value at its rank."""


@dataclass(frozen=True)
class Gpt2Method:
    """A way to adapt GPT-2.

    Args:
        name: the method's name in the tables.
        flags: its flags of gpt2_ft.py.
        rates: the learning rates to choose from.
    """

    name: str
    flags: Mapping[str, Any]
    rates: Sequence[float]


GPT2_METHODS = (
    Gpt2Method("GPT-2, full fine-tuning", {}, (*SMALL_RATES, 1e-2)),
    # The base has learned little that helps with the task, so the update has to become large.
    Gpt2Method("GPT-2, LoRA, r = 4", {"lora_dim": 4, "lora_alpha": 32}, (*LARGE_RATES, 1e-2, 3e-2)),
)
