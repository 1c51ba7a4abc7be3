"""Tests of the checks before an adapter is loaded: of its settings, tensors and base."""

from dataclasses import replace

import pytest
import torch
from tiny_adapters import INFO, A, Tiny, refuses, tiny_adapter

from loralib.adapters.adapter import Adapter
from loralib.adapters.checks import check_together
from loralib.adapters.loading import load_into
from loralib.errors import CheckpointError, MissingPartError, WrongBaseError
from transformers.adapter_kinds import BITFIT, BiasMetadata


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"rank": 4}, ["trained with rank 2, the model was built with 4"]),
        ({"alpha": 8}, ["trained with alpha 4.0, the model was built with 8"]),
        (
            {"targets": ("key", "value")},
            ["trained with targets query, value, the model was built with key, value"],
        ),
        (
            {"targets": ("query",)},
            ["trained with targets query, value, the model was built with query"],
        ),
        ({"labels": 2}, ["classifier.", "(3", "in the file, (2", "in the model"]),
        ({"targets": ()}, ["no LoRA layers to take it", "apply_lora"]),
    ],
)
def test_a_model_with_other_settings_is_refused(settings, parts):
    refuses(Tiny(**settings), tiny_adapter(), *parts)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"rank": 4}, [A, "(2, 8) in the file, (4, 8) in the model: rank 2, not 4"]),
        (
            {"targets": ("query", "key")},
            ["trained with targets query, value, the model was built with key, query"],
        ),
        ({"targets": ()}, ["no LoRA layers to take it"]),
    ],
)
def test_a_file_without_metadata_is_checked_by_its_tensors(settings, parts):
    refuses(Tiny(**settings), tiny_adapter(metadata=None), *parts)


@pytest.mark.parametrize(
    ("theirs", "ours", "fits"),
    [("a", "a", True), ("a", None, True), (None, "a", True), (None, None, True), ("a", "b", False)],
)
def test_another_base_is_refused_if_both_fingerprints_are_known(theirs, ours, fits):
    model, adapter = Tiny(), tiny_adapter(replace(INFO, base_fingerprint=theirs))
    if fits:
        assert load_into(model, adapter, base_fingerprint=ours) == []
    else:
        parts = ("'some/base' (fingerprint a)", "not one of fingerprint b", "give 'some/base'")
        refuses(model, adapter, *parts, base_fingerprint=ours)
        with pytest.raises(WrongBaseError) as caught:
            load_into(model, adapter, base_fingerprint=ours)
        assert (caught.value.expected, caught.value.found) == (theirs, ours)


@pytest.mark.parametrize(
    ("initialization", "fits"), [("orthogonal", True), ("pissa", False), ("olora", False)]
)
def test_an_initialization_must_fit_if_the_update_is_relative_to_it(initialization, fits):
    model, adapter = Tiny(), tiny_adapter(replace(INFO, initialization=initialization))
    if fits:
        assert load_into(model, adapter) == []
    else:
        refuses(
            model, adapter, f"initialization {initialization}, the model was built with default"
        )


def test_adapters_that_were_trained_together_must_be_given_together():
    with_biases = tiny_adapter(replace(INFO, trained_with=("apply_bitfit",)))
    biases = {"roberta.layer.0.query.bias": torch.ones(8)}
    biases["classifier.bias"] = with_biases.tensors["classifier.bias"]
    info = BiasMetadata(trained_with=("apply_lora",))
    bitfit = Adapter(biases, info, "bias file", kind=BITFIT)
    check_together([with_biases, bitfit])
    for alone, missing in ((with_biases, "apply_bitfit"), (bitfit, "apply_lora")):
        message = rf"^{alone.source}: was trained with {missing} as well, whose weights are in"
        with pytest.raises(MissingPartError, match=message):
            check_together([alone])
    check_together([tiny_adapter(metadata=None), replace(bitfit, metadata=None)])
    other = replace(bitfit, tensors={**biases, "classifier.bias": torch.zeros(3)})
    message = (
        "^bias file: does not belong to the same run as lora file: their classifier.bias differ$"
    )
    with pytest.raises(CheckpointError, match=message):
        check_together([with_biases, other])


def test_the_error_says_if_the_adapters_base_has_more_layers():
    adapter = tiny_adapter()
    more = {f"roberta.layer.4.query.lora_{part}": torch.ones(2, 2) for part in "AB"}
    message = (
        "have: roberta.layer.4.query.lora_A, …: its base has at least 5 layers, this model has"
    )
    refuses(Tiny(), replace(adapter, tensors={**adapter.tensors, **more}), message)


def change(**tensors):
    def changed(info):
        adapter = tiny_adapter(info)
        remaining = {**adapter.tensors, **{n.replace("__", "."): t for n, t in tensors.items()}}
        remaining = {name: tensor for name, tensor in remaining.items() if tensor is not None}
        return replace(adapter, tensors=remaining)

    return changed


def many_extra(info):
    adapter = tiny_adapter(info)
    extra = {f"extra.{number}": torch.zeros(1) for number in range(6)}
    return replace(adapter, tensors={**adapter.tensors, **extra})


def in_other_modules(info):
    adapter = tiny_adapter(info)
    renamed = {n.replace("layer.", "block."): t for n, t in adapter.tensors.items()}
    return replace(adapter, tensors=renamed)


def for_a_wider_base(info):
    adapter = tiny_adapter(info)
    wide = {
        n: torch.zeros(2, 16) if n.endswith("lora_A") else t for n, t in adapter.tensors.items()
    }
    return replace(adapter, tensors=wide)


@pytest.mark.parametrize("info", [INFO, None], ids=["metadata", "no metadata"])
@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (change(roberta__layer__1__value__lora_B=None),
         ["lacks 1 tensor: roberta.layer.1.value.lora_B"]),
        (change(classifier__weight=None, classifier__bias=None),
         ["lacks 2 tensors: classifier.bias, classifier.weight"]),
        (change(roberta__layer__2__value__lora_B=torch.zeros(8, 2)),
         ["has 1 tensor that the model does not have: roberta.layer.2.value.lora_B"]),
        (change(pooler__bias=torch.zeros(1)), ["that the model does not have: pooler.bias"]),
        (many_extra, ["6 tensors that the model does not have: extra.0, extra.1, extra.2, "]),
        (in_other_modules,
         ["matches no layer of the model", "roberta.block.0.query.lora_A",
          "roberta.layer.0.query.lora_A"]),
        (for_a_wider_base,
         ["lora_A is (2, 16) in the file, (2, 8) in the model: a base of another size"]),
        (change(roberta__layer__0__query__lora_B=torch.zeros(9, 2)),
         ["roberta.layer.0.query.lora_B is (9, 2) in the file, (8, 2) in the model"]),
        (change(roberta__layer__1__query__lora_B=torch.full((8, 2), torch.nan)),
         ["roberta.layer.1.query.lora_B holds values that are not finite"]),
        (change(classifier__bias=torch.tensor([0, 1, torch.inf])),
         ["classifier.bias holds values that are not finite"]),
    ],
)  # fmt: skip
def test_adapters_whose_tensors_do_not_fit_are_refused(info, make, parts):
    refuses(Tiny(seed=3), make(info), *parts)
