"""Tests of saving adapters of any model in every format, and loading them into a plain copy."""

import copy

import pytest
import torch
from adapted_models import CASES, run_suggested_save
from compare import assert_same_bits
from covering import covering
from torch import nn

import loralib as lora
from loralib.adapters.merging import merge_into
from loralib.errors import CheckpointError, NeedsMergingError, WrongBaseError
from loralib.text import counted

pytestmark = pytest.mark.slow

VARIANTS = ("lora", "rslora", "dora", "rslora+dora")
INITIALIZATIONS = ("default", "orthogonal", "pissa", "olora")
TABLE = covering(CASES, VARIANTS, INITIALIZATIONS)


def close(ours, theirs):
    """Allows float32's rounding in sums of up to some hundred terms of about 1."""
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def outputs(model, case):
    with torch.no_grad():
        return model(*case.inputs)


def trained_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(("name", "variant", "initialization"), TABLE)
def test_a_plain_copy_that_loads_the_file_is_the_same_model(
    tmp_path, name, variant, initialization
):
    """Bit-exact, with the same parameters trained, and it saves the same file."""
    case = CASES[name]
    model = case.adapted(variant=variant, initialization=initialization)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    plain = case.build()
    before = {n: tensor.clone() for n, tensor in plain.state_dict().items()}
    weights = dict(plain.named_parameters())
    adapted = lora.load_adapter(plain, tmp_path / "a.safetensors")
    assert_same_bits(plain.state_dict(), model.state_dict())
    assert torch.equal(outputs(plain, case), outputs(model, case))
    assert trained_names(plain) == trained_names(model)
    assert all(plain.get_parameter(n) is weight for n, weight in weights.items())
    frozen = before.keys() - trained_names(model)
    assert_same_bits({n: plain.state_dict()[n] for n in frozen}, {n: before[n] for n in frozen})
    halves = {name for name in model.state_dict() if name.endswith(".lora_A")}
    assert {f"{name}.lora_A" for name in adapted} == halves
    lora.save_adapter(plain, tmp_path / "b.safetensors")
    files = [(tmp_path / f"{name}.safetensors").read_bytes() for name in "ab"]
    assert files[0] == files[1]


@pytest.mark.parametrize(("name", "variant", "initialization"), TABLE)
def test_merging_and_banks_compute_what_the_model_does(tmp_path, name, variant, initialization):
    case = CASES[name]
    model = case.adapted(variant=variant, initialization=initialization)
    expected = outputs(model, case)
    assert (outputs(case.build(), case) - expected).abs().max() > 1e-2
    lora.save_adapter(model, tmp_path / "a.safetensors")
    adapter = lora.read_adapter(tmp_path / "a.safetensors")
    merged = case.build()
    merge_into(merged, adapter)
    close(outputs(merged, case), expected)
    close(outputs(lora.merge(model), case), expected)
    plain = case.build()
    bank = lora.AdapterBank(plain)
    if not case.in_bank:
        with pytest.raises(NeedsMergingError):
            bank.add("a", adapter)
        return
    bank.add("a", adapter)
    with bank.use("a"):
        close(outputs(plain, case), expected)
    other = case.adapted(variant=variant, initialization=initialization)
    for parameter in other.parameters():
        parameter.data.mul_(0.9 if parameter.requires_grad else 1)
    lora.save_adapter(other, tmp_path / "b.safetensors")
    bank.add("b", lora.read_adapter(tmp_path / "b.safetensors"))
    with bank.use(["a", "b", "a"]):
        mixed = outputs(plain, case)
    close(mixed[[0, 2]], expected[[0, 2]])
    close(mixed[1], outputs(other, case)[1])


@pytest.mark.parametrize(("name", "variant", "initialization"), TABLE)
def test_pefts_folder_holds_the_same_adapter(tmp_path, name, variant, initialization):
    """With the same metadata and tensors, except that a start is joined to the trained update."""
    case = CASES[name]
    model = case.adapted(variant=variant, initialization=initialization)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    original = lora.read_adapter(tmp_path / "a.safetensors")
    if not case.of_peft or ("dora" in variant and not case.of_peft_with_dora):
        with pytest.raises(NeedsMergingError, match="merge it into its base"):
            lora.save_adapter(model, tmp_path / "peft")
        assert not (tmp_path / "peft").exists()
        return
    lora.save_adapter(model, tmp_path / "peft")
    back = lora.read_adapter(tmp_path / "peft")
    plain = case.build()
    lora.load_adapter(plain, tmp_path / "peft")
    if not original.lora.has_start:
        assert back.metadata == original.metadata
        assert_same_bits(back.tensors, original.tensors)
        assert_same_bits(plain.state_dict(), model.state_dict())
        assert torch.equal(outputs(plain, case), outputs(model, case))
    else:
        assert back.lora.initialization is None
        assert back.lora.rank == 2 * original.lora.rank
        close(outputs(plain, case), outputs(model, case))


@pytest.mark.parametrize("name", CASES)
def test_lora_state_dict_can_be_loaded_with_its_alpha_if_it_is_enough(tmp_path, name):
    """It is refused if it does not show all of the update; a head and biases are not in it."""
    case = CASES[name]
    model = case.adapted()
    torch.save(lora.lora_state_dict(model), tmp_path / "a.pt")
    plain = case.build()
    if name in ("linear", "kernels", "groups", "separate", "attention"):
        lora.load_adapter(plain, tmp_path / "a.pt", lora_alpha=3)
        assert torch.equal(outputs(plain, case), outputs(model, case))
    elif name in ("patterns", "embedding", "slices", "every slice", "a slice"):
        before = copy.deepcopy(plain.state_dict())
        with pytest.raises(ValueError, match=r"a\.pt"):
            lora.load_adapter(plain, tmp_path / "a.pt", lora_alpha=3)
        assert_same_bits(plain.state_dict(), before)
    elif name == "own out_proj":  # has several alphas
        lora.load_adapter(plain, tmp_path / "a.pt", lora_alpha=3)
        assert not torch.equal(outputs(plain, case), outputs(model, case))
    else:  # has a head or biases, which are not in the file
        lora.load_adapter(plain, tmp_path / "a.pt", lora_alpha=3)
        assert torch.equal(plain.layers[1]["out"].lora_B, model.layers[1]["out"].lora_B)


def test_a_frozen_A_stays_frozen(tmp_path):
    case = CASES["linear"]
    model = case.adapted(freeze_A=True)
    for path in ("a.safetensors", "peft"):
        lora.save_adapter(model, tmp_path / path)
        plain = case.build()
        lora.load_adapter(plain, tmp_path / path)
        assert trained_names(plain) == trained_names(model)
        assert all(name.endswith("lora_B") for name in trained_names(plain))


def test_metadata_record_the_settings_the_base_and_the_task(tmp_path):
    model = CASES["patterns"].adapted(variant="dora", lora_dropout=0.25)
    model.config = type("Config", (), {"_name_or_path": "some/base"})()
    lora.save_adapter(model, tmp_path / "a.safetensors", task="mnli", labels=["x", "y", "z"])
    metadata = lora.read_adapter(tmp_path / "a.safetensors").lora
    assert (metadata.rank, metadata.rank_pattern) == (2, {"layers.0.out": 4})
    alphas = {"layers.0.out": 3, "layers.1.out": 7, "words": 1}
    assert {name: metadata.alpha_of(name) for name in alphas} == alphas
    assert (metadata.variant, metadata.embeddings) == ("dora", ("words",))
    assert (metadata.base, metadata.task, metadata.labels) == ("some/base", "mnli", ("x", "y", "z"))
    assert metadata.dropout == 0.25
    assert metadata.base_fingerprint
    lora.save_adapter(model, tmp_path / "b.safetensors", base="other/base")
    assert lora.read_adapter(tmp_path / "b.safetensors").lora.base == "other/base"
    half = CASES["linear"].adapted().half()
    lora.save_adapter(half, tmp_path / "c.safetensors")
    assert lora.read_adapter(tmp_path / "c.safetensors").lora.base_fingerprint is None


def test_without_a_suffix_or_format_the_path_becomes_pefts_folder(tmp_path):
    model = CASES["linear"].adapted()
    lora.save_adapter(model, tmp_path / "a")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    lora.save_adapter(model, tmp_path / "b.safetensors")
    lora.save_adapter(model, tmp_path / "c", "lora")
    assert (tmp_path / "c" / "pytorch_model_lora.safetensors").is_file()
    lost = lora.save_adapter(model, tmp_path / "d.pt")
    assert any(line.startswith("not in this format: alpha 3") for line in lost)


def test_a_compiled_model_is_saved_under_its_own_names(tmp_path):
    model = CASES["linear"].adapted()
    lora.save_adapter(torch.compile(model), tmp_path / "a.safetensors")
    lora.save_adapter(model, tmp_path / "b.safetensors")
    compiled, own = (lora.read_adapter(tmp_path / f"{name}.safetensors") for name in "ab")
    assert_same_bits(compiled.tensors, own.tensors)
    assert compiled.metadata == own.metadata


def test_a_rank_larger_than_a_dimension_can_be_loaded(tmp_path):
    """PEFT allows it, and joining a start to the trained update can lead to it."""
    case = CASES["attention"]
    model = case.adapted(initialization="pissa")
    lora.save_adapter(model, tmp_path / "peft")
    plain = case.build()
    lora.load_adapter(plain, tmp_path / "peft")
    assert plain.last.lora_B.shape == (3, 4)
    close(outputs(plain, case), outputs(model, case))


def test_dropout_is_recorded_although_attentions_have_none(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "up": nn.Linear(8, 8)})
    plain = copy.deepcopy(model)
    lora.add_lora(model, "up", r=2, lora_dropout=0.5)
    lora.add_lora(model, "out_proj", r=2)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    lora.load_adapter(plain, tmp_path / "a.safetensors")
    assert plain["up"].lora_dropout.p == 0.5
    assert not list(plain["attn"].out_proj.children())


@pytest.mark.parametrize(("second", "warns"), [(0.5, False), (0.1, True), (0.0, True)])
def test_dropouts_that_differ_are_a_warning(tmp_path, caplog, second, warns):
    model = nn.ModuleDict(
        {"up": nn.Linear(8, 8), "down": nn.Linear(8, 8), "at": nn.Embedding(3, 8)}
    )
    lora.add_lora(model, "up", r=2, lora_dropout=0.5)
    lora.add_lora(model, "down", r=2, lora_dropout=second)
    lora.add_lora(model, "at", r=2)
    remarks = lora.save_adapter(model, tmp_path / "a.safetensors")
    of_dropout = [each for each in remarks if "dropouts" in each]
    expected = f"its layers have dropouts from {second:g} to 0.5, but only 0.5 is recorded: "
    assert [each.startswith(expected) for each in of_dropout] == [True] * warns
    assert sum("dropouts" in record.getMessage() for record in caplog.records) == warns


@pytest.mark.parametrize(
    ("first", "second", "recorded"),
    [
        ({"initialization": "orthogonal"}, {}, (None, None)),
        ({}, {"initialization": "orthogonal"}, (None, None)),
        ({"initialization": "orthogonal"}, {"initialization": "orthogonal"}, ("orthogonal", None)),
        ({"freeze_A": True}, {}, (None, None)),
        ({"freeze_A": True}, {"freeze_A": True}, (None, True)),
    ],
)
@pytest.mark.parametrize("file", ["a", "a.safetensors", "a.bin"])
def test_initialization_and_freezing_of_A_may_differ_between_layers(
    tmp_path, file, first, second, recorded
):
    """A trained update depends on neither of them."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    model, plain, x = build(), build(), torch.randn(3, 8)
    lora.add_lora(model, "0", r=2, **first)
    lora.add_lora(model, "2", r=2, **second)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    remarks = lora.save_adapter(model, tmp_path / file)
    of_frozen = [each for each in remarks if "A is frozen in some of its layers" in each]
    assert len(of_frozen) == (first.get("freeze_A") != second.get("freeze_A"))
    if file != "a.bin":  # a.bin records neither
        metadata = lora.read_adapter(tmp_path / file).lora
        assert (metadata.initialization, metadata.freeze_A) == recorded
    lora.load_adapter(plain, tmp_path / file, lora_alpha=16)
    assert torch.equal(plain(x), model(x))
    again = build()
    lora.add_lora(again, "0", r=2, **first)
    lora.add_lora(again, "2", r=2, **second)
    lora.load_adapter(
        again, tmp_path / file, lora_alpha=16
    )  # into layers like those it was trained in
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("persistent", [True, False])
def test_an_infinite_persistent_buffer_of_a_head_is_refused_with_advice(tmp_path, persistent):
    def build():
        torch.manual_seed(0)
        model = nn.ModuleDict({"up": nn.Linear(8, 8), "head": nn.Linear(8, 8)})
        mask = torch.tensor([0.0, -torch.inf])
        model["head"].register_buffer("mask", mask, persistent=persistent)
        return model

    model = build()
    lora.add_lora(model, "up", r=2, modules_to_train="head")
    if persistent:
        with pytest.raises(CheckpointError, match=r"buffer head\.mask holds inf.*persistent=False"):
            lora.save_adapter(model, tmp_path / "a.safetensors")
        assert not any(tmp_path.iterdir())
    else:
        lora.save_adapter(model, tmp_path / "a.safetensors")
        assert lora.load_adapter(build(), tmp_path / "a.safetensors") == ("up",)


@pytest.mark.parametrize("values", [[torch.nan, 0.0], [torch.nan, torch.inf]])
def test_diverged_running_statistics_are_not_taken_for_a_mask(tmp_path, values):
    model = nn.ModuleDict({"up": nn.Linear(8, 8), "norm": nn.BatchNorm1d(2)})
    lora.add_lora(model, "up", r=2, modules_to_train="norm")
    model["norm"].running_mean.copy_(torch.tensor(values))
    with pytest.raises(CheckpointError, match=r"norm\.running_mean holds .* not finite$"):
        lora.save_adapter(model, tmp_path / "a.safetensors")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["linear", "attention", "separate"])
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_weight_that_is_trained_with_its_lora_is_refused_with_advice(tmp_path, name, is_trained):
    case = CASES[name]
    model = case.adapted()
    model.requires_grad_(True)
    advice = "it: call mark_only_lora_as_trainable and save again, if nothing has changed it yet;"
    if is_trained:
        advice = r"it: lora\.merge\(model\), then .*; or .* because now it is too late$"
        optimizer = torch.optim.AdamW(model.parameters())
        model(*case.inputs).square().mean().backward()
        optimizer.step()
    with pytest.raises(
        CheckpointError, match=rf"^the weight of .* is trained as well as its LoRA.* {advice}"
    ) as caught:
        lora.save_adapter(model, tmp_path / "a.safetensors")
    assert not any(tmp_path.iterdir())
    expected = model.eval()(*case.inputs)
    plain = case.build().eval()
    merged = lora.merge(copy.deepcopy(model))
    plain.load_state_dict(run_suggested_save(str(caught.value), merged, tmp_path))
    torch.testing.assert_close(plain(*case.inputs), expected)
    if not is_trained:
        lora.mark_only_lora_as_trainable(model)
        lora.save_adapter(model, tmp_path / "a.safetensors")
        plain = case.build()
        lora.load_adapter(plain, tmp_path / "a.safetensors")
        torch.testing.assert_close(plain.eval()(*case.inputs), expected)


def test_loading_an_adapter_does_not_decompose_weights(tmp_path, monkeypatch):
    case = CASES["linear"]
    model, plain = case.adapted(initialization="pissa"), case.build()
    lora.save_adapter(model, tmp_path / "a.safetensors")
    monkeypatch.delattr(torch.linalg, "svd")
    lora.load_adapter(plain, tmp_path / "a.safetensors")
    close(outputs(plain, case), outputs(model, case))


def test_a_module_with_two_names_is_saved_once(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model.add_module("again", model[0])
    model.add_module("last", model[2])
    plain = copy.deepcopy(model)
    assert lora.add_lora(model, "0", r=2, modules_to_train="2") == ("0",)
    nn.init.normal_(model[0].lora_B)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    names = {"0.lora_A", "0.lora_B", "2.bias", "2.weight"}
    assert lora.read_adapter(tmp_path / "a.safetensors").tensors.keys() == names
    loaded = copy.deepcopy(plain)
    assert lora.load_adapter(loaded, tmp_path / "a.safetensors") == ("0",)
    assert torch.equal(loaded.again.lora_B, model[0].lora_B)


def test_pefts_folder_cannot_hold_a_module_that_is_in_two_places(tmp_path):
    """PEFT adapts only the first place. A shared block with the module in it is no problem."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    plain.add_module("again", plain[0])
    lora.add_lora(model, "0", r=2)
    lora.save_adapter(model, tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="adapts 0, which the model uses in several places"):
        lora.load_adapter(plain, tmp_path / "theirs")
    in_other_order = nn.ModuleDict({"again": plain[0], "0": plain[0], "2": plain[2]})
    with pytest.raises(CheckpointError, match="adapts 0, which the model uses in several places"):
        lora.load_adapter(in_other_order, tmp_path / "theirs")
    lora.add_lora(plain, "0", r=2)
    with pytest.raises(
        CheckpointError, match="0 is the same module as again, and PEFT adapts only one"
    ):
        lora.save_adapter(plain, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    blocks = nn.ModuleDict({"a": nn.ModuleDict({"up": nn.Linear(8, 8)})})
    blocks["b"] = blocks["a"]
    lora.add_lora(blocks, "b.up", r=2)
    lora.save_adapter(blocks, tmp_path / "blocks")
    again = copy.deepcopy(blocks)
    lora.remove_lora(again)
    assert lora.load_adapter(again, tmp_path / "blocks") == ("a.up",)


def test_a_trained_head_is_not_part_of_the_fingerprint_of_a_tied_base(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(11, 8), "up": nn.Linear(8, 8)})
    model["head"] = nn.Linear(8, 11, bias=False)
    model["head"].weight = model["embed"].weight
    plain = copy.deepcopy(model)
    lora.add_lora(model, "up", r=2, modules_to_train=["embed", "head"])
    nn.init.normal_(model["head"].weight)
    lora.save_adapter(model, tmp_path / "a.safetensors")
    lora.load_adapter(plain, tmp_path / "a.safetensors")
    assert torch.equal(plain["embed"].weight, model["head"].weight)
    other = copy.deepcopy(plain)
    lora.remove_lora(other)
    nn.init.normal_(other["up"].weight)
    with pytest.raises(WrongBaseError):
        lora.load_adapter(other, tmp_path / "a.safetensors")


# By case: the outputs of the trained modules, the labels, and whether there is a warning.
LABELS = {
    "as many": ({"head": 2}, ["no", "yes"], False),
    "fewer": ({"head": 2}, ["no"], True),
    "more": ({"head": 2}, ["no", "yes", "so"], True),
    "none": ({"head": 2}, [], False),
    "unknown": ({"head": 2}, None, False),
    "no head": ({}, ["no"], False),
    "one logit": ({"head": 1}, ["no", "yes"], False),
    "too many for one": ({"head": 1}, ["no", "yes", "so"], True),
    "another head after it": ({"head": 3, "aux": 5}, ["no", "yes", "so"], False),
    "another layer after it": ({"head": 3, "projection": 8}, ["no", "yes", "so"], False),
    "of neither": ({"head": 3, "aux": 5}, ["no"], True),
}


@pytest.mark.parametrize(("heads", "labels", "warns"), LABELS.values(), ids=LABELS)
def test_a_number_of_labels_that_no_head_has_as_outputs_is_a_warning(
    tmp_path, caplog, heads, labels, warns
):
    layers = {name: nn.Linear(8, outputs) for name, outputs in heads.items()}
    model = nn.ModuleDict({**layers, "up": nn.Linear(8, 1)})
    lora.add_lora(model, "up", r=1, modules_to_train=list(heads))
    nn.init.ones_(model["up"].lora_B)
    remarks = lora.save_adapter(model, tmp_path / "a.safetensors", labels=labels)
    assert len(remarks) == len(caplog.records) == warns
    for remark in remarks:
        last = list(heads)[-1]
        outputs = counted(heads[last], "output")
        start = f"the adapter has {counted(len(labels), 'label')}, but {last} has {outputs}"
        assert remark.startswith(f"{start}: a bank takes")
