"""Tests the config.json next to a GPT-2's weights, for settings that the weights do not show."""

import json

import pytest
from gpt2_files import draw_base, write_plain, write_safe

from checkpoints import read_base
from loralib.errors import CheckpointError

# As upstream writes it for weights in the shape of the smallest card.
SETTINGS = {
    "model_type": "gpt2",
    "n_embd": 128,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 1024,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
}


@pytest.fixture
def read(tmp_path):
    """Reads weights of a card's shape next to a config.json with this content."""

    def read(content, write=write_safe):
        path = write(draw_base(width=128, blocks=4), tmp_path)
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "config.json").write_text(text)
        return read_base(str(path))

    return read


@pytest.mark.parametrize("write", [write_plain, write_safe])
@pytest.mark.parametrize(
    ("field", "value", "ours"),
    [
        ("n_head", 8, "4"),
        ("n_positions", 512, "1024"),
        ("activation_function", "gelu", "gelu_new"),
        ("activation_function", "relu", "gelu_new"),
        ("layer_norm_epsilon", 0.1, "1e-05"),
        ("scale_attn_weights", False, "True"),
        ("scale_attn_by_inverse_layer_idx", True, "False"),
    ],
)
def test_another_model_of_a_cards_shape_is_refused(read, tmp_path, field, value, ours, write):
    with pytest.raises(CheckpointError) as caught:
        read({**SETTINGS, field: value}, write)
    message = str(caught.value)
    assert "\n" not in message
    assert f"{tmp_path / 'config.json'}: {field} is {value}, but gpt2.xs has {ours}, and" in message
    assert (
        "give another base or, if this config.json belongs to other weights, keep the two"
        in message
    )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"activation_function": "gelu_pytorch_tanh"},
        {"reorder_and_upcast_attn": True},  # in another order, but the same arithmetic
        {"model_type": "roberta", "n_head": 8},
    ],
)
def test_settings_that_fit_or_are_of_another_family_are_accepted(read, caplog, change):
    assert read({**SETTINGS, **change}).fingerprint
    assert caplog.text == ""


def test_settings_that_are_missing_count_as_equal(read, caplog):
    read({"n_layer": 4})
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read (Expecting property name enclosed in double quotes"),
        ("[]", "cannot be read (it is not a JSON object)"),
        ({**SETTINGS, "n_layer": 12, "n_head": 12}, "is ignored: its n_layer is 12, but that of"),
        ({**SETTINGS, "n_embd": 768}, "is ignored: its n_embd is 768, but that of the"),
    ],
)
def test_a_damaged_config_or_one_of_other_weights_is_ignored_with_a_warning(
    read, tmp_path, caplog, content, reason
):
    assert read(content).fingerprint
    [record] = caplog.records
    assert record.getMessage().startswith(f"{tmp_path / 'config.json'}: {reason}")
