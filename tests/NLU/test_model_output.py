"""ModelOutput, which models return, is a dictionary, a tuple and an object in one."""

import copy
import operator
import pickle
from dataclasses import dataclass

import pytest
import torch

from transformers import ModelOutput
from transformers.modeling_outputs import SequenceClassifierOutput


@dataclass
class Numbers(ModelOutput):
    """Fields as users declare them; the first has no default."""

    a: float
    b: float | None = None
    c: float | None = None


class TestModelOutput:
    logits = torch.ones(2)
    loss = torch.tensor(3.0)

    def test_attributes_keys_and_indices_give_the_same_values(self):
        output = SequenceClassifierOutput(logits=self.logits)
        assert list(output) == ["logits"]
        assert output.loss is None
        assert output["logits"] is output.logits is output[0] is output[-1]
        assert output[:1] == (self.logits,)
        with pytest.raises(KeyError):
            output["loss"]
        with pytest.raises(IndexError):
            output[1]

    @pytest.mark.parametrize("by_item", [True, False])
    def test_a_field_that_is_set_later_takes_its_declared_place(self, by_item):
        output = SequenceClassifierOutput(logits=self.logits)
        if by_item:
            output["loss"] = self.loss
        else:
            output.loss = self.loss
        assert output["loss"] is output.loss is output[0] is self.loss
        assert output.to_tuple() == (self.loss, self.logits)
        output.loss = None
        assert "loss" not in output
        assert output.to_tuple() == (self.logits,)

    @pytest.mark.parametrize(
        "clone", [copy.copy, copy.deepcopy, lambda output: pickle.loads(pickle.dumps(output))]
    )
    def test_copies_are_equal_and_of_the_same_type(self, clone):
        copied = clone(SequenceClassifierOutput(self.loss, self.logits))
        assert type(copied) is SequenceClassifierOutput
        assert list(copied) == ["loss", "logits"]
        assert torch.equal(copied.logits, self.logits)
        assert copied["logits"] is copied.logits
        assert copied.hidden_states is None

    @staticmethod
    def consistent_names(output):
        """Checks that all views of an output agree, and returns the names that are set."""
        assert output.to_tuple() == tuple(output.values()) == output[:]
        assert all(output[name] is getattr(output, name) for name in output)
        declared = [name for name in output.__dataclass_fields__ if name in output]
        assert list(output)[: len(declared)] == declared
        unset = output.__dataclass_fields__.keys() - output.keys()
        assert all(getattr(output, name) is None for name in unset)
        return list(output)

    @pytest.mark.parametrize("by_item", [True, False])
    def test_all_views_follow_what_is_set(self, by_item):
        def put(output, name, value):
            if by_item:
                output[name] = value
            else:
                setattr(output, name, value)

        output = SequenceClassifierOutput()
        assert self.consistent_names(output) == []
        for name, value, names in (
            ("hidden_states", (self.logits,), ["hidden_states"]),
            ("own", self.loss, ["hidden_states", "own"]),
            ("loss", self.loss, ["loss", "hidden_states", "own"]),
            ("logits", self.logits, ["loss", "logits", "hidden_states", "own"]),
            ("loss", self.logits, ["loss", "logits", "hidden_states", "own"]),
            ("logits", None, ["loss", "hidden_states", "own"]),
            ("logits", None, ["loss", "hidden_states", "own"]),
            ("own", None, ["loss", "hidden_states"]),
        ):
            put(output, name, value)
            assert self.consistent_names(output) == names
            assert getattr(output, name) is value

    @pytest.mark.parametrize(
        "change",
        [
            lambda output: output.pop("loss"),
            lambda output: output.pop("none", None),
            lambda output: output.popitem(),
            lambda output: output.clear(),
            lambda output: output.update(loss=1),
            lambda output: output.update({"loss": 1}),
            lambda output: output.setdefault("hidden_states", 1),
            lambda output: output.move_to_end("loss"),
            lambda output: output.__delitem__("loss"),
            lambda output: delattr(output, "loss"),
            lambda output: operator.ior(output, {"loss": 1}),
        ],
    )
    def test_other_changes_are_refused(self, change):
        output = SequenceClassifierOutput(self.loss, self.logits)
        with pytest.raises(TypeError, match=r"SequenceClassifierOutput has no .*: set its fields"):
            change(output)
        assert self.consistent_names(output) == ["loss", "logits"]
        assert output[0] is self.loss

    def test_operations_that_make_another_dict(self):
        output = SequenceClassifierOutput(self.loss, self.logits)
        assert output | {"loss": 1} == {"loss": 1, "logits": self.logits}
        assert {"loss": 1, "x": 2} | output == {"loss": self.loss, "x": 2, "logits": self.logits}
        again = output.copy()
        again.loss = None
        assert self.consistent_names(output) == ["loss", "logits"]
        assert self.consistent_names(again) == ["logits"]

    @pytest.mark.parametrize(
        "given", [{"a": 3, "c": 1}, [("a", 3), ("c", 1)], (["a", 3], ["c", 1])]
    )
    def test_fields_from_a_dict_or_from_pairs(self, given):
        output = Numbers(given)
        assert output == Numbers(3, c=1)
        assert (output.a, output.b, output.c, output[1:]) == (3, None, 1, (1,))
        assert self.consistent_names(output) == ["a", "c"]

    @pytest.mark.parametrize("given", [[1, 2], ((1, 2), (3, 4)), [], {}, "ab", 0])
    def test_a_first_field_without_names_is_a_value(self, given):
        output = Numbers(given)
        assert output.a == given
        assert Numbers({"a": 1}, 2).a == {"a": 1}
