"""With the same A, B and m, outputs and gradients match PEFT's and those of the formulas."""

import pytest
import torch
from models import CASES, VARIANTS, Case, output_of
from ours import assert_close, reference_step, step, with_lora
from theirs import adapter_of, as_computed, with_peft

import loralib as lora

IN_PEFT = [(case, variant) for case in CASES for variant in case.in_peft]
ALL = [(case, variant) for case in CASES for variant in VARIANTS]


@pytest.mark.parametrize(("case", "variant"), IN_PEFT, ids=str)
def test_outputs_and_gradients_match_pefts(case: Case, variant: str):
    theirs = with_peft(case, variant)
    adapter = adapter_of(theirs)
    output, grads = step(theirs, case.batch())
    ours = with_lora(case, variant, as_computed(adapter, "lora_B"))
    own_output, own_grads = step(ours, case.batch())
    assert sum(name.endswith("lora_A") for name in adapter) == case.adapted
    assert_close(own_output, output)
    assert own_grads.keys() == grads.keys() == adapter.keys()
    for name, grad in as_computed(grads, "lora_A").items():
        assert_close(own_grads[name], grad, what=name)


@pytest.mark.parametrize(("case", "variant"), ALL, ids=str)
def test_outputs_and_gradients_match_the_formulas(case: Case, variant: str):
    model = with_lora(case, variant)
    output, grads = reference_step(case, adapter_of(model), variant)
    own_output, own_grads = step(model, case.batch())
    assert_close(own_output, output)
    assert own_grads.keys() == grads.keys()
    assert sum(name.endswith("lora_A") for name in grads) == case.adapted
    for name, grad in grads.items():
        assert_close(own_grads[name], grad, what=name)


@pytest.mark.parametrize(("case", "variant"), ALL, ids=str)
@torch.no_grad()
def test_evaluation_mode_and_merged_models_match_training_mode(case: Case, variant: str):
    model = with_lora(case, variant)
    adapted = output_of(model, case.batch())
    assert (adapted - output_of(case.build(), case.batch())).abs().max() > 0.01
    assert_close(output_of(model.eval(), case.batch()), adapted)
    assert lora.merge(model) is model
    assert not adapter_of(model)
    assert_close(output_of(model, case.batch()), adapted)
