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
        ("roberta-base", "'roberta-base'", "give that one"),
        (None, "one of unknown name", "give the base that it was trained on"),
    ],
)
def test_a_wrong_base_is_told_with_what_can_be_done(base, theirs, way_out):
    assert str(errors.WrongBaseError("a file", base, "feed", "beef")) == (
        f"a file: was trained on another base than the one given: {theirs} (fingerprint feed), "
        f"not one of fingerprint beef; {way_out}"
    )


def test_every_error_of_a_checkpoint_is_tried():
    assert {type(case) for case in CASES} == {
        errors.CheckpointError,
        *errors.CheckpointError.__subclasses__(),
    }


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], ""),
        (["b", "a"], "b, a"),
        ([str(n) for n in range(10)], "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"),
        ([str(n) for n in range(3_200)], "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 … and 3,190 more"),
        (["a" * 61], "a" * 60 + "…"),
        (["a\nb", "c"], "a b, c"),
        ([letter * 60 for letter in "abcd"], f"{'a' * 60}, {'b' * 60}, {'c' * 60} … and 1 more"),
        (["a" * 300, "b" * 300] * 9, f"{'a' * 60}…, {'b' * 60}…, {'a' * 60}… … and 15 more"),
    ],
)
def test_names_in_short(names, said):
    assert errors.in_short(iter(names)) == said


def test_names_in_quotes_are_closed_where_they_are_cut():
    assert errors.quoted(iter(["b", " a"])) == "'b', ' a'"
    assert errors.quoted(["a" * 61, "b"]) == f"'{'a' * 60}…', 'b'"


def test_fewer_names_where_there_is_less_room():
    assert errors.in_short(["one", "two", "three"], width=10) == "one, two … and 1 more"
    assert errors.in_short(["a" * 50, "two"], width=10) == f"{'a' * 50} … and 1 more"
