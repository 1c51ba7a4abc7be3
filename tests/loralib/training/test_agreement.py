"""Tests that processes with different settings, data or weights end with an error."""

import pytest
import torch
from torch import nn

from loralib.errors import TrainingError
from loralib.training import agreement
from loralib.training.agreement import check_alike, check_same_code, check_same_weights


def _reported(each):
    return agreement._Reported(*each) if isinstance(each, tuple) else each


@pytest.fixture
def others(monkeypatch):
    """The list of what the other processes report, one entry per call: hosts and settings."""
    reports = []

    def gather(value, world_size):
        found = [value, *(_reported(each) for each in reports.pop(0))]
        assert len(found) == world_size
        return found

    monkeypatch.setattr(agreement, "gather_objects", gather)
    monkeypatch.setattr(agreement.socket, "gethostname", lambda: "first")
    return reports


def test_equal_settings_pass_and_nan_equals_nan(others):
    settings = {"--seed": 3, "--lr": 0.5, "nothing": float("nan")}
    others.append([("second", dict(settings)), ("third", {**settings, "nothing": float("nan")})])
    check_alike(settings, 3)
    check_alike(settings, 1)


@pytest.mark.parametrize(("ours", "theirs"), [(float("nan"), 1.0), (1.0, float("nan"))])
def test_nan_differs_from_any_number(others, ours, theirs):
    others.append([("second", {"--lr": theirs})])
    with pytest.raises(TrainingError, match=f"has --lr {theirs}, process 0 on first has {ours}"):
        check_alike({"--lr": ours}, 2)


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        ({"--seed": 4, "--lr": 0.5}, "--seed 4, process 0 on first has 3"),
        ({"--seed": 3}, "--lr None, process 0 on first has 0.5"),
        ({"--seed": 3, "--lr": 0.5, "--new": True}, "--new True, process 0 on first has None"),
    ],
)
def test_the_error_names_the_setting_and_the_process_that_differ(others, theirs, difference):
    settings = {"--seed": 3, "--lr": 0.5}
    others.append([("second", settings), ("third", theirs)])
    with pytest.raises(TrainingError, match=f"process 2 on third has {difference}: give all"):
        check_alike(settings, 3)


def test_the_error_names_processes_at_another_step(others):
    """Such as sharing warnings while the others begin an evaluation."""
    others.append([("second", {"--seed": 3}), ["a warning", "another"]])
    with pytest.raises(TrainingError, match=r"^another step of the run was called by process 2: "):
        check_alike({"--seed": 3}, 3)


def test_digests_are_shortened_in_the_error(others):
    others.append([("second", {"data": "ab" * 32})])
    with pytest.raises(TrainingError, match=r"has data abababababababab…, .* cdcdcdcdcdcdcdcd…:"):
        check_alike({"data": "cd" * 32}, 2)


def test_other_versions_of_loralib_are_an_error_and_of_pytorch_a_warning(
    others, monkeypatch, caplog
):
    version = {"version of loralib": agreement.__version__}
    found = [["2.13.0", "2.13.0"], ["2.13.0", "2.6.0"], []]
    monkeypatch.setattr(agreement, "gather_on_first", lambda *_: found.pop(0))
    for expected in ([], ["process 1 has PyTorch 2.6.0, process 0 has 2.13.0: "], []):
        others.append([("second", version)])
        caplog.clear()
        check_same_code(0, 2)
        assert [line[: len(expected[0])] for line in caplog.messages] == expected
    check_same_code(0, 1)
    others.append([("second", {"version of loralib": "0.1.2"})])
    with pytest.raises(TrainingError, match=r"has version of loralib 0\.1\.2"):
        check_same_code(0, 2)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def model_of(*tensors):
    """A model whose tensors are called b0, b1, …: parameters if they can be, else buffers."""
    model = nn.Module()
    for number, tensor in enumerate(tensors):
        if tensor.is_floating_point() or tensor.is_complex():
            model.register_parameter(f"b{number}", nn.Parameter(tensor))
        else:
            model.register_buffer(f"b{number}", tensor)
    return model


def reported_by(*tensors):
    """What a process with such a model reports."""
    digests = agreement._digests({f"b{number}": each for number, each in enumerate(tensors)})
    return {f"weights of {name} (shape, digest)": each for name, each in digests.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_compared_by_their_bits(others, dtype):
    """Strides make no difference; a single changed value does."""
    values = torch.randint(2, (6, 4)).to(dtype)
    twice = torch.stack([values, values], dim=2)[:, :, 0]
    known = reported_by(torch.ones(3), values)
    assert known == reported_by(torch.ones(3), values.t().contiguous().t())
    assert known == reported_by(torch.ones(3), twice)
    changed = values.clone()
    changed[0, 0] = values[0, 0] == 0
    others.append([("second", known)])
    message = r"on second has weights of b1 \(.*\) 6x4, \w+, process 0 on first has 6x4, "
    with pytest.raises(TrainingError, match=message):
        check_same_weights(model_of(torch.ones(3), changed), 2)


@pytest.mark.parametrize("place", range(4))
def test_weights_that_differ_in_one_sign_differ(others, place):
    """The sign is the highest bit, which an even factor would lose."""
    values = torch.arange(1.0, 5.0, dtype=torch.float64)
    changed = values.clone()
    changed[place] *= -1
    others.append([("second", reported_by(values))])
    with pytest.raises(TrainingError, match="process 1 on second has weights of b0"):
        check_same_weights(model_of(changed), 2)


VALUES = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize(
    "theirs",
    [VALUES.t(), VALUES.flip(0), VALUES.flip(1), VALUES.reshape(4), VALUES.reshape(1, 4)],
    ids=["transposed", "other rows", "other columns", "a vector", "one row"],
)
def test_the_same_values_in_another_order_or_shape_differ(others, theirs):
    others.append([("second", reported_by(VALUES))])
    with pytest.raises(TrainingError, match="process 1 on second has weights of b0"):
        check_same_weights(model_of(theirs), 2)


def test_a_digest_does_not_depend_on_the_block_size(monkeypatch):
    tensors = [torch.randn(37), torch.empty(0), torch.tensor(3), torch.randn(5, 7)]
    known = reported_by(*tensors)
    for size in (1, 4, 36, 37):
        monkeypatch.setitem(agreement._BLOCK, "cpu", size)
        assert reported_by(*tensors) == known


def test_only_the_named_weights_are_compared(others):
    others.append([("second", reported_by(VALUES))])
    check_same_weights(model_of(VALUES, torch.ones(3)), 2, names=["b0", "of another"])
    others.append([("second", {})])
    check_same_weights(model_of(VALUES), 2, names=[])


def test_models_without_tensors_agree(others):
    others.append([("second", {})])
    check_same_weights(nn.ReLU(), 2)


def test_one_process_computes_no_digest(monkeypatch):
    monkeypatch.setattr(agreement, "_digests", None)
    check_same_weights(model_of(VALUES), 1)
