"""Encoders that are adapted by LoRA, adapters and BitFit, alone or together."""

import itertools

from compare import assert_close_to_rounding
from encoder_options import ENCODER_TERMS

FAMILIES = ("roberta", "deberta")
ADAPTED = {
    "lora": {"apply_lora": True, "lora_r": 2, "lora_alpha": 6},
    "houlsby": {"apply_adapter": True, "adapter_type": "houlsby", "adapter_size": 5},
    "pfeiffer": {"apply_adapter": True, "adapter_type": "pfeiffer", "adapter_size": 5},
    "bitfit": {"apply_bitfit": True},
}
# Each kind alone, each pair of kinds, and all three, with either type of adapter.
CROSS = [
    names
    for size in (1, 2, 3)
    for names in itertools.combinations(ADAPTED, size)
    if not {"houlsby", "pfeiffer"} <= set(names)
]


def settings_of(names):
    return {key: value for name in names for key, value in ADAPTED[name].items()}


def close(ours, theirs, terms=ENCODER_TERMS):
    assert_close_to_rounding(ours, theirs, terms)
