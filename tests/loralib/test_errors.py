"""The library's errors: one line each, and the same after a trip through another process."""

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
def test_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))
    assert len(str(copy).splitlines()) == 1


@pytest.mark.parametrize(
    ("base", "theirs", "way_out"),
    [
        ("roberta-base", "'roberta-base'", "give 'roberta-base'"),
        (None, "one of unknown name", "give the base that it was trained on"),
    ],
)
def test_a_wrong_base_is_told_with_what_can_be_done(base, theirs, way_out):
    assert str(errors.WrongBaseError("a file", base, "feed", "beef")) == (
        f"a file: was trained on another base than the one given: {theirs} (fingerprint feed), "
        f"not one of fingerprint beef; {way_out}"
    )


def test_every_error_of_a_checkpoint_is_tried():
    kinds = {errors.CheckpointError, *errors.CheckpointError.__subclasses__()}
    assert {type(case) for case in CASES} == {
        kind for kind in kinds if kind.__module__.startswith("loralib.")
    }
