"""The cases of roberta_fixture.safetensors, and how results are compared with them."""

from compare import assert_close_to_rounding
from encoder_options import ENCODER_TERMS
from paths import FIXTURES

from transformers import RobertaForMaskedLM, RobertaForSequenceClassification

FIXTURE = FIXTURES / "roberta_fixture.safetensors"
CASES = ("padded", "types", "holes", "row0", "row1", "row2", "row3")
KINDS = {
    "mlm": (RobertaForMaskedLM, {}),
    "classifier": (RobertaForSequenceClassification, {"num_labels": 3}),
    "regressor": (RobertaForSequenceClassification, {"num_labels": 1}),
}
LABELS = {"mlm": "tokens_wanted", "classifier": "classes", "regressor": "scores"}
LORA = {"apply_lora": True, "lora_r": 2, "lora_alpha": 6}


def part(upstream, start):
    return {name.removeprefix(start): t for name, t in upstream.items() if name.startswith(start)}


def real(tensor, arguments):
    """The values at real tokens."""
    mask = arguments.get("attention_mask")
    return tensor if mask is None else tensor[mask == 1]


def close(ours, theirs, terms=ENCODER_TERMS):
    assert_close_to_rounding(ours, theirs, terms)
