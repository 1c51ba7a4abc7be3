"""Tests of what optimizer steps are recorded to train, and of warnings of LoRA left untrained."""

import copy
import gc
import pickle
import sys
import threading
import weakref

import pytest
import torch
from adapted_models import CASES
from torch import nn

import loralib as lora
from loralib.steps import trained_along

HEAD = CASES["head"]


def steps(model, *optimizers, count=12, every=None):
    """Trains with several optimizers, which each step once in as many batches as `every` says."""
    for batch in range(count):
        model(*HEAD.inputs).square().mean().backward()
        for optimizer, period in zip(optimizers, every or [1] * len(optimizers), strict=True):
            if (batch + 1) % period == 0:
                optimizer.step()
                optimizer.zero_grad()


def with_earlier_optimizer(**settings):
    """A model with LoRA, and an optimizer that was created before `add_lora`."""
    model = HEAD.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    lora.add_lora(model, "out", r=2, **settings)
    return model, optimizer


def base_and_updates(model):
    named = list(model.named_parameters())
    return [p for name, p in named if "lora_" not in name], [p for n, p in named if "lora_" in n]


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizers_step_is_compiled_once(fused):
    model = HEAD.adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=torch.tensor(0.1), fused=fused)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    compiled = []
    outputs = []
    for _ in range(12):
        model.train()(*HEAD.inputs).square().mean().backward()
        step()
        optimizer.zero_grad()
        outputs.append(model.eval()(*HEAD.inputs).detach())  # of a new merged copy
        compiled.append(sum(torch._dynamo.utils.counters["frames"].values()))
    assert compiled[2] == compiled[-1]
    assert len({output.sum().item() for output in outputs}) == 12


# ---- warnings about optimizers without LoRA ----


@pytest.mark.parametrize("trained", [(), "score"])
@pytest.mark.parametrize("earlier", ["nothing", "another model"])
def test_an_optimizer_created_before_add_lora_is_warned_of_once(caplog, trained, earlier):
    if earlier == "another model":  # trained correctly, as in an earlier cell of a notebook
        other = HEAD.adapted()
        steps(other, torch.optim.AdamW(other.parameters(), lr=0.1))
    model, optimizer = with_earlier_optimizer(modules_to_train=trained)
    steps(model, optimizer, count=9)
    assert not caplog.records
    steps(model, optimizer, count=21)
    (record,) = caplog.records
    assert record.getMessage().startswith("AdamW holds frozen weights that have LoRA, but none of")
    assert (
        "created before add_lora, create it again; otherwise give it LoRA's parameters"
        in record.message
    )

    caplog.clear()  # what the warning suggests
    steps(model, torch.optim.AdamW(model.parameters(), lr=0.1), optimizer)
    assert not caplog.records
    assert all(layer["out"].lora_B.any() for layer in model.layers)


def test_an_optimizer_of_a_copy_of_the_model_is_warned_of(caplog):
    model, optimizer = with_earlier_optimizer()
    steps(model, torch.optim.AdamW(base_and_updates(model)[1], lr=0.1), optimizer)
    new = copy.deepcopy(model)
    steps(new, torch.optim.SGD(base_and_updates(new)[0], lr=0.1))
    assert [record.args for record in caplog.records] == [("SGD",)]


def test_an_optimizer_beside_one_with_lora_is_not_warned_of(caplog):
    for order, every in ((1, (1, 1)), (-1, (1, 1)), (1, (1, 4)), (-1, (4, 1))):
        model = HEAD.build()
        lora.add_lora(model, "out", r=2, modules_to_train="score")
        pair = [torch.optim.SGD(each, lr=0.1) for each in base_and_updates(model)]
        steps(model, *pair[::order], every=every)
        assert not caplog.records


def test_an_optimizer_with_lora_is_not_warned_of(caplog):
    model = HEAD.adapted()
    steps(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    model = HEAD.adapted()
    base, updates = base_and_updates(model)
    groups = [{"params": base}, {"params": updates, "lr": 0.0}]  # as at the start of a warm-up
    steps(model, torch.optim.AdamW(groups, lr=0.1))
    assert not caplog.records


def test_an_optimizer_of_weights_as_well_as_their_lora_is_warned_of_once(caplog):
    model = HEAD.adapted().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps(model, optimizer)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "besides LoRA, AdamW trains the weights that it updates (layers.0.out, layers.1.out), which"
    )
    caplog.clear()
    lora.mark_only_lora_as_trainable(model)  # what the warning suggests
    model.score.requires_grad_(True)
    steps(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    assert not caplog.records


def test_an_optimizer_of_weights_that_are_not_frozen_is_not_warned_of(caplog):
    model = HEAD.adapted().requires_grad_(True)
    base, _ = base_and_updates(model)
    steps(model, torch.optim.AdamW(base, lr=0.1))
    assert not caplog.records


def test_an_optimizer_of_a_weight_that_lora_no_longer_has_is_not_warned_of(caplog):
    model = nn.Sequential(lora.Linear(8, 8, r=2), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    earlier, model[0].weight = model[0].weight, nn.Parameter(torch.ones(8, 8))
    trained_for(12, model[1:], torch.optim.SGD([earlier, *model[1].parameters()], lr=0.1))
    assert not caplog.records


def test_an_optimizer_of_a_base_is_not_warned_of(caplog):
    model = HEAD.build()
    lora.add_lora(model, "out", r=2)
    lora.remove_lora(model)
    base = list(model.requires_grad_(True).parameters())
    model.words.weight.requires_grad_(False)
    steps(model, torch.optim.AdamW(base, lr=0.1))
    # A teacher with LoRA that is frozen as a whole.
    student, teacher = HEAD.build(), HEAD.build()
    optimizer = torch.optim.SGD([*student.parameters(), *teacher.parameters()], lr=0.1)
    lora.add_lora(teacher, "out", r=2)
    teacher.requires_grad_(False)
    steps(student, optimizer)
    assert not caplog.records


def test_saving_names_an_optimizer_from_before_add_lora_as_a_cause(tmp_path):
    model, optimizer = with_earlier_optimizer()
    steps(model, optimizer, count=2)
    remark = lora.save_adapter(model, tmp_path / "zero.safetensors")[-1]
    assert remark.startswith("the updates of 2 of 2 modules are zero (layers.0.out … and 1 more)")
    assert "as by an optimizer from before add_lora" in remark
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1), count=2)  # as suggested
    assert not lora.save_adapter(model, tmp_path / "trained.safetensors")


class Same(nn.Module):
    def forward(self, x):
        return x * 1

    def right_inverse(self, x):
        return x.clone()


def parametrize(layer):
    for name in ("lora_A", "lora_B"):
        nn.utils.parametrize.register_parametrization(layer, name, Same())


def norm_weights(layer):
    nn.init.ones_(layer.lora_B)
    for name in ("lora_A", "lora_B"):
        nn.utils.parametrizations.weight_norm(layer, name)


def set_new_parameters(layer):
    layer.lora_A = nn.Parameter(torch.randn_like(layer.lora_A))
    layer.lora_B = nn.Parameter(torch.zeros_like(layer.lora_B))


def replace(layer):
    """As wrappers do, without `__setattr__`."""
    for name in ("lora_A", "lora_B"):
        layer._parameters[name] = nn.Parameter(layer._parameters[name].detach().clone())


@pytest.mark.parametrize("change", [parametrize, norm_weights, set_new_parameters, replace])
def test_parameters_of_lora_that_were_replaced_are_recognized(caplog, change):
    model = HEAD.build()
    lora.add_lora(model, "out", r=2)
    for layer in model.layers:
        change(layer["out"])
    steps(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    assert not caplog.records


def renewed(model):
    for layer in model.layers:
        set_new_parameters(layer["out"])
    return model


def emptied(model):
    state = model.state_dict()
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    return model


def converted(model):
    """Returns a model whose conversion has replaced the parameters, as PyTorch may do."""
    is_usual = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(is_usual)


@pytest.mark.parametrize("change", [renewed, emptied, converted, copy.deepcopy])
def test_weights_trained_along_are_recorded_after_a_and_b_were_replaced(change):
    model = change(HEAD.adapted().requires_grad_(True))
    steps(model, torch.optim.AdamW(model.parameters(), lr=0.1), count=2)
    base = {name for name, p in model.named_parameters() if "lora_" not in name}
    assert trained_along(model).keys() == base


# ---- LoRA that gets no gradients ----


class ReadsItsHead(nn.Module):
    """A model that multiplies by its head's weight, as losses do that save the logits' memory."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.is_called = False

    def forward(self, x):
        x = self.body(x)
        return self.head(x) if self.is_called else x @ self.head.weight.t()


def trained_for(count, model, optimizer=None):
    x = torch.ones(2, 8)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("is_copied", [True, False])
def test_lora_without_gradients_is_warned_of_once(caplog, is_copied):
    model = ReadsItsHead()
    lora.add_lora(model, ["body", "head"], r=2)
    if is_copied:
        model = copy.deepcopy(model)
    copy.copy(model.head)  # has the same weight, but not for long
    optimizer = trained_for(9, model)
    optimizer.step()  # without any gradients, so it does not count
    assert not caplog.records
    trained_for(12, model, optimizer)
    (record,) = caplog.records
    assert record.getMessage() == (
        "in 10 steps of SGD, 1 of 2 modules with LoRA got no gradients (head): the loss was "
        "computed without them, or from their weights without calling them, where LoRA has no "
        "effect: leave such modules out of targets, unless later steps call them"
    )


def test_lora_without_gradients_is_warned_of_beside_a_head_that_is_trained(caplog):
    """As in a reentrant checkpoint whose input has no gradients."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    lora.add_lora(model, "0", r=2, modules_to_train="1")
    model.forward = lambda x: model[1](model[0](x).detach())
    trained_for(10, model)
    assert "1 of 1 module with LoRA got no gradients (0)" in caplog.text
    assert "unless torch.no_grad, detach or a checkpoint without use_reentrant=False" in caplog.text


def test_lora_whose_elements_are_in_another_process_is_not_warned_of(caplog):
    """As with FSDP, which shards parameters of several layers together."""
    model = ReadsItsHead()
    lora.add_lora(model, ["body", "head"], r=2)
    for parameter in (model.head.lora_A, model.head.lora_B):
        parameter.data = torch.empty(0)
    trained_for(12, model)
    assert not caplog.records


def test_an_optimizer_of_parameters_that_are_no_longer_the_models_is_warned_of_once(caplog):
    """As those from before FSDP2's `fully_shard`."""
    model = HEAD.adapted()
    optimizer = torch.optim.AdamW(lora.parameter_groups(model, lr=0.1))
    new = copy.deepcopy(model)
    steps(new, optimizer, count=9)
    assert not caplog.records
    steps(new, optimizer, count=12)
    (record,) = caplog.records
    assert record.getMessage() == (
        "in 10 steps of AdamW, no parameter that it holds got a gradient: if it was created "
        "before the model was sharded or copied, create it again"
    )


def test_steps_without_gradients_are_not_warned_of_if_there_is_nothing_to_train(caplog):
    model = HEAD.adapted()
    for group in (
        {"params": lora.parameter_groups(model, lr=0.1)[0]["params"], "lr": 0.0},
        {"params": HEAD.build().parameters()},
        {"params": HEAD.adapted().requires_grad_(False).parameters()},
    ):
        steps(model, torch.optim.SGD([group], lr=0.1))
    assert not caplog.records


def test_layers_that_were_built_with_lora_are_warned_of_by_their_class(caplog):
    model = nn.ModuleDict({name: lora.Linear(8, 8, r=2) for name in "abc"})
    lora.mark_only_lora_as_trainable(model)
    model.forward = model["a"].forward
    trained_for(10, model)
    assert "2 of 3 modules with LoRA got no gradients (Linear)" in caplog.text


def test_another_thread_may_build_layers_meanwhile():
    layers = [lora.Linear(1, 1, r=1) for _ in range(2000)]
    lora.mark_only_lora_as_trainable(layers[0])
    is_done = threading.Event()

    def build():
        while not is_done.is_set():
            layers.append(lora.Linear(1, 1, r=1))

    thread, interval = threading.Thread(target=build), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(5):
            optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)
            layers[0](torch.ones(1, 1)).sum().backward()
            for _ in range(10):
                optimizer.step()
    finally:
        is_done.set()
        thread.join()
        sys.setswitchinterval(interval)


class Unhashable(torch.optim.SGD):
    def __eq__(self, other):
        return self is other


@pytest.mark.parametrize("is_earlier", [True, False])
def test_an_optimizer_without_a_hash_is_counted_too(caplog, is_earlier):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    earlier = list(model.parameters())
    lora.add_lora(model, "0", r=2, modules_to_train="1")
    optimizer = Unhashable(earlier if is_earlier else model.parameters(), lr=0.1)
    model.forward = lambda x: model[1](x) if is_earlier else model[1](model[0](x).detach())
    trained_for(12, model, optimizer)
    (record,) = caplog.records
    said = "none of LoRA's parameters" if is_earlier else "got no gradients"
    assert said in record.getMessage()


def test_lora_with_gradients_now_or_before_is_not_warned_of(caplog):
    model = ReadsItsHead()
    lora.add_lora(model, ["body", "head"], r=2)
    model.is_called = True
    optimizer = trained_for(1, model)
    model.is_called = False
    trained_for(12, model, optimizer)
    model = ReadsItsHead()
    lora.add_lora(model, ["body", "head"], r=2)
    model.head.requires_grad_(False)  # not to be trained
    trained_for(12, model)
    model.head.lora_A.requires_grad_(True)
    of_body = [p for p in model.body.parameters() if p.requires_grad]
    trained_for(12, model, torch.optim.SGD(of_body, lr=0.1))  # nor by this optimizer
    assert not caplog.records


def test_the_name_in_warnings_goes_with_the_lora():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.MultiheadAttention(8, 2, kdim=4)})
    before = {name: vars(module).keys() for name, module in model.named_modules()}
    lora.add_lora(model, ["a", "b"], r=2)
    lora.remove_lora(model)
    assert {name: vars(module).keys() for name, module in model.named_modules()} == before


# ---- weights recorded as trained along with LoRA ----


@pytest.mark.parametrize("undo", [lora.remove_lora, lora.merge])
def test_a_weight_that_no_longer_has_lora_is_not_recorded(undo):
    model = HEAD.adapted()
    undo(model)
    lora.add_lora(model, "words", r=2)
    weight = model.layers[0]["out"].weight.requires_grad_(True)
    steps(model, torch.optim.SGD([weight], lr=0.1), count=1)
    assert not trained_along(model)
    weight = model.words.weight.requires_grad_(True)
    steps(model, torch.optim.SGD([weight], lr=0.1), count=1)
    assert trained_along(model).keys() == {"words.weight"}


@pytest.mark.parametrize("undo", [lora.remove_lora, lora.merge])
def test_a_part_that_no_longer_has_lora_is_not_recorded(undo):
    model = nn.ModuleDict({"part": HEAD.adapted(), "other": HEAD.adapted()})
    undo(model["part"])
    weight = model["part"].layers[0]["out"].weight.requires_grad_(True)
    steps(model["part"], torch.optim.SGD([weight], lr=0.1), count=1)
    assert not trained_along(model)


def test_parameters_that_lora_does_not_update_are_not_recorded():
    """Even after such a parameter of a layer with LoRA was replaced, or a layer of r = 0 copied."""
    model = HEAD.adapted()
    layer = model.layers[0]["out"]
    layer.bias = nn.Parameter(layer.bias.detach().clone())
    layer.register_parameter("lora_extra", None)
    steps(model, torch.optim.SGD([layer.bias, model.score.weight], lr=0.1), count=1)
    assert not trained_along(model)
    plain = copy.deepcopy(lora.Linear(8, 8))
    trained_for(1, plain)
    assert not trained_along(plain)


@pytest.mark.parametrize("rate", [0, 0.0, torch.tensor(0.0)])
def test_a_step_with_a_learning_rate_of_zero_is_not_recorded(rate):
    model = HEAD.adapted().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    steps(model, optimizer, count=1)
    assert not trained_along(model)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    steps(model, optimizer, count=1)
    assert trained_along(model)


def test_a_model_is_freed_and_can_be_pickled():
    model, optimizer = with_earlier_optimizer()
    steps(model, optimizer, count=2)
    pickle.loads(pickle.dumps(model))
    references = [weakref.ref(each) for each in (model, optimizer, model.layers[0]["out"])]
    del model, optimizer
    gc.collect()
    assert not any(each() for each in references)
