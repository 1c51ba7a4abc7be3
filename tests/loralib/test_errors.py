"""Tests of the library's errors: each message is one line, and pickling preserves them."""

import pickle

import pytest

from loralib import errors
from loralib.training.resume import DamagedStateError

CASES = [
    errors.CheckpointError("a file"),
    errors.AlphaError("a file"),
    errors.AlphaError("a file", found=8, given=16),
    errors.WrongBaseError("a file", "roberta-base", "feed", "beef"),
    errors.WrongBaseError("a file", None, "feed", "beef"),
    errors.AdapterAsModelError("a file", "roberta-base"),
    errors.AdapterAsModelError("a file"),
    errors.ModelAsAdapterError("a file"),
    errors.FullModelError("a file", "a.weight"),
    errors.MissingLayersError("a file", "LoRA", "apply_lora"),
    errors.SettingsError("a file", "rank", 4, 2),
    errors.SettingsError("a file", "targets", ("query", "value"), ("key",), "layer.0"),
    errors.MissingPartError("a file", "apply_bitfit"),
    errors.NeedsMergingError("a file", "has biases"),
    DamagedStateError("a file"),
]


@pytest.mark.parametrize("error", CASES, ids=lambda error: type(error).__name__)
def test_pickling_preserves_an_error_and_its_message_is_one_line(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))
    assert len(str(copy).splitlines()) == 1


@pytest.mark.parametrize(
    ("base", "theirs", "advice"),
    [
        ("roberta-base", "'roberta-base'", "give 'roberta-base'"),
        (None, "one of unknown name", "give the base that it was trained on"),
    ],
)
def test_the_message_for_a_wrong_base_says_what_can_be_done(base, theirs, advice):
    assert str(errors.WrongBaseError("a file", base, "feed", "beef")) == (
        f"a file: was trained on another base than the one given: {theirs} (fingerprint feed), "
        f"not one of fingerprint beef; {advice} or, if words were added to it, "
        "the model saved with them"
    )


def test_every_checkpoint_error_is_tested_above():
    kinds = {errors.CheckpointError, *errors.CheckpointError.__subclasses__()}
    assert {type(case) for case in CASES} == {
        kind for kind in kinds if kind.__module__.startswith("loralib.")
    }
