"""Tests LoRA on any of GPT-2's projections: its results, its files, and what is refused."""

import json

import pytest
import torch
from compare import assert_close_to_rounding, assert_same_bits
from gpt2_files import BLOCKS, POSITIONS, VOCABULARY, WIDTH, parameters, parse, refuses

import checkpoints
import loralib as lora
from checkpoints import open_model, save_model
from family import TARGETS, enabled_slices, in_order, targets_of
from gpt2_ft_arguments import parse_args
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.loading import load_into
from loralib.adapters.merging import merge_into
from loralib.errors import CheckpointError, NeedsMergingError
from model import GPT2LMModel

pytestmark = pytest.mark.slow

ALL = tuple(TARGETS)
DEFAULT = ("query", "value")
CASES = (
    *((name,) for name in TARGETS),
    DEFAULT,
    ("query", "key", "value"),
    ("key", "mlp_down"),
    ("attention_output", "mlp_up", "mlp_down"),
    ALL,
)
# A block's linear layers -> the size of a slice of the output.
LAYERS = {"attn.c_attn": WIDTH, "attn.c_proj": WIDTH, "mlp.c_fc": 4 * WIDTH, "mlp.c_proj": WIDTH}
# How many additions follow one another: in each block, three products over WIDTH terms and one over
# 4 WIDTH, and attention; in the head, one over WIDTH.
TERMS = BLOCKS * (3 * WIDTH + 4 * WIDTH + 4 + POSITIONS) + WIDTH
RANK, ALPHA = 2, 6
IDS = torch.arange(3 * POSITIONS).view(3, POSITIONS) % VOCABULARY

by_targets = pytest.mark.parametrize("targets", CASES, ids="-".join)


@pytest.fixture
def open_on(base_path):
    """``open_on(targets)``: a model with new LoRA on them, and its base."""

    def opened(targets):
        flags = ("--lora_dim", RANK, "--lora_alpha", ALPHA, "--lora_targets", *targets)
        return open_model(parse("--init_checkpoint", base_path, *flags))

    return opened


@pytest.fixture
def trained_on(open_on):
    """``trained_on(targets)``: the same, with LoRA's tensors far from their initial values."""

    def trained(targets):
        model, base = open_on(targets)
        lora.mark_only_lora_as_trainable(model)
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
        return model.eval(), base

    return trained


@pytest.fixture
def file_on(trained_on, tmp_path):
    """``file_on(targets)``: the file of such a model's LoRA, as gpt2_ft.py writes it."""

    def written(targets):
        save_model(tmp_path / "model.5.pt", *trained_on(targets), lora_only=True)
        return tmp_path / "model.5.pt"

    return written


@torch.no_grad()
def logits_of(model):
    return model.eval()(IDS)


def plain_of(model, targets):
    """Returns the base in float64, with s · B A of every slice added to its columns."""
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    for block in range(BLOCKS):
        for layer, width in LAYERS.items():
            name = f"transformer.h.{block}.{layer}"
            enabled = [index for index, on in enumerate(enabled_slices(targets, layer)) if on]
            for place, index in enumerate(enabled):
                A = weights[f"{name}.lora_A"][place * RANK : (place + 1) * RANK]
                B = weights[f"{name}.lora_B"][place * width : (place + 1) * width]
                columns = slice(index * width, (index + 1) * width)
                weights[f"{name}.weight"][:, columns] += ALPHA / RANK * (B @ A).T
    plain = GPT2LMModel(checkpoints.config_of("gpt2.md")).double()
    plain.load_state_dict({name: t for name, t in weights.items() if "lora_" not in name})
    return plain


# ---- names ----


@by_targets
def test_targets_of_is_the_inverse_of_enabled_slices(targets):
    slices = {layer: enabled_slices(targets, layer) for layer in LAYERS}
    updated = [(layer, enabled) for layer, enabled in slices.items() if any(enabled)]
    assert targets_of(updated * BLOCKS) == targets


@pytest.mark.parametrize(
    "layers",
    [
        [("attn.c_attn", (True,))],
        [("attn.c_attn", (True, False, True)), ("attn.c_attn", (True, True, True))],
        [("mlp.c_fc", (True, True))],
        [("ln_1", (True,))],
        [("mlp.c_fc", (True,)), ("wte", (True,))],
        [],
    ],
)
def test_layers_that_are_no_targets(layers):
    assert targets_of(layers) is None


def test_targets_have_one_order():
    assert in_order(reversed(ALL)) == ALL
    assert checkpoints.config_of("gpt2.md", lora_targets=["value", "query"]).lora_targets == DEFAULT
    assert checkpoints.config_of("gpt2.md").lora_targets == DEFAULT


# ---- what is computed ----


@by_targets
def test_new_lora_changes_nothing(open_on, base_path, targets):
    plain, _ = open_model(parse("--init_checkpoint", base_path))
    model, _ = open_on(targets)
    ours = parameters(model)
    adapted = {n.removesuffix(".lora_A") for n in ours if n.endswith("lora_A")}
    layers = {TARGETS[name] for name in targets}
    assert adapted == {f"transformer.h.{block}.{n}" for block in range(BLOCKS) for n in layers}
    assert_same_bits({n: t for n, t in ours.items() if "lora_" not in n}, parameters(plain))
    assert_same_bits({"logits": logits_of(model)}, {"logits": logits_of(plain)})


@by_targets
def test_logits_follow_the_formula(trained_on, targets):
    model, _ = trained_on(targets)
    expected = plain_of(model, targets)(IDS)
    assert (expected - logits_of(model.train())).abs().max() < 0.01
    assert_close_to_rounding(logits_of(model), expected.float(), TERMS)


@by_targets
def test_merged_weights_follow_the_formula(trained_on, targets):
    model, _ = trained_on(targets)
    plain = plain_of(model, targets)
    merged = lora.merge(model)
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    for name, weight in plain.named_parameters():
        module = merged.get_submodule(name.rpartition(".")[0])
        is_transposed = isinstance(module, torch.nn.Linear) and weight.dim() == 2
        expected = weight.T if is_transposed else weight
        assert_close_to_rounding(merged.get_parameter(name), expected.float(), RANK + 1)
    assert_close_to_rounding(logits_of(merged), plain(IDS).float(), TERMS)


@by_targets
def test_two_steps_train_all_of_lora_and_nothing_else(open_on, targets):
    """The first step changes B alone: A's gradient is 0 as long as B is."""
    model, _ = open_on(targets)
    lora.mark_only_lora_as_trainable(model.train())
    before = {name: tensor.clone() for name, tensor in parameters(model).items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    for _ in range(2):
        model(IDS, IDS.roll(-1, 1), torch.ones(IDS.shape)).backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = {n for n, tensor in parameters(model).items() if not torch.equal(tensor, before[n])}
    assert changed == {name for name in before if name.endswith(("lora_A", "lora_B"))}


# ---- files ----


@by_targets
@pytest.mark.parametrize("lora_only", [True, False])
def test_a_file_records_its_targets(trained_on, base_path, tmp_path, targets, lora_only):
    model, base = trained_on(targets)
    path = tmp_path / "model.9.pt"
    save_model(path, model, base, lora_only)
    args = parse("--init_checkpoint", base_path if lora_only else path)
    again, _ = open_model(args, str(path) if lora_only else None)
    assert (args.lora_dim, args.lora_alpha, args.lora_targets) == (RANK, ALPHA, targets)
    assert_same_bits(parameters(again), parameters(model))
    assert_same_bits({"logits": logits_of(again)}, {"logits": logits_of(model)})
    metadata = torch.load(path, weights_only=True)["metadata"]
    slices = list(enabled_slices(targets, "attn.c_attn"))
    usual = not any(slices) or slices == [True, False, True]
    names = [f"transformer.h.{block}.attn.c_attn" for block in range(BLOCKS)]
    assert json.loads(metadata.get("slices", "null")) == (
        None if usual else dict.fromkeys(names, slices)
    )


@by_targets
@pytest.mark.parametrize("format", ["lora", "peft"])
def test_other_formats_are_bit_exact(file_on, base_path, tmp_path, targets, format):
    path = tmp_path / {"lora": "out.safetensors", "peft": "out"}[format]
    adapter = read_adapter(file_on(targets))
    write_adapter(path, adapter, format)
    again = read_adapter(path)
    assert_same_bits(again.tensors, adapter.tensors)
    assert again.metadata == adapter.metadata
    args = parse("--init_checkpoint", base_path)
    open_model(args, str(path))
    assert args.lora_targets == targets


@pytest.mark.parametrize(
    ("targets", "expected_remarks"),
    [
        (("key",), []),
        (
            ("query", "key"),
            [
                "for PEFT, the 2 updates of rank 2 in one c_attn become one of rank 4 and alpha "
                "12, which computes the same"
            ],
        ),
        (("mlp_up", "mlp_down"), []),
    ],
)
def test_the_user_is_told_of_stacked_updates(file_on, tmp_path, targets, expected_remarks):
    remarks = write_adapter(tmp_path / "out", read_adapter(file_on(targets)), "peft")
    assert [remark for remark in remarks if "updates" in remark] == expected_remarks


@by_targets
def test_merging_a_file_into_the_base_follows_the_formula(file_on, trained_on, base_path, targets):
    plain, _ = open_model(parse("--init_checkpoint", base_path))
    merge_into(plain, read_adapter(file_on(targets)))
    expected = plain_of(trained_on(targets)[0], targets)
    for name, weight in expected.named_parameters():
        assert_close_to_rounding(plain.get_parameter(name), weight.float(), RANK + 1)


@by_targets
def test_the_releases_format_holds_only_query_and_value(file_on, tmp_path, targets):
    adapter = read_adapter(file_on(targets))
    path = tmp_path / "release.pt"
    if targets == DEFAULT:
        write_adapter(path, adapter, "release")
        assert_same_bits(read_adapter(path).tensors, adapter.tensors)
        return
    in_attention = [name for name in targets if TARGETS[name] == "attn.c_attn"]
    slices_are_others = in_attention and tuple(in_attention) != DEFAULT
    message = (
        "has slices, which this" if slices_are_others else "where the release's GPT-2 has no LoRA"
    )
    with pytest.raises(NeedsMergingError, match=message) as caught:
        write_adapter(path, adapter, "release")
    assert "\n" not in str(caught.value)
    assert not path.exists()


# ---- refused ----


@pytest.mark.parametrize(
    ("trained", "built"),
    [(("query", "value"), ("query", "key")), (("query", "key"), ("query", "value"))],
)
def test_a_model_with_lora_on_other_slices_of_the_same_shape(file_on, open_on, trained, built):
    model, base = open_on(built)
    before = {name: tensor.clone() for name, tensor in parameters(model).items()}
    adapter = read_adapter(file_on(trained))
    with pytest.raises(CheckpointError, match=r"trained with slices of transformer\.h\.0\.attn"):
        load_into(model, adapter, base.fingerprint)
    assert_same_bits(parameters(model), before)


def test_targets_that_contradict_the_file_are_refused(file_on, trained_on, base_path, tmp_path):
    path = file_on(("query", "mlp_up"))
    flags = ("--lora_targets", "query", "value")
    message = "was trained with targets query mlp_up, but --lora_targets is query value"
    refuses([f"{path}: {message}"], ("--init_checkpoint", base_path, *flags), path)
    whole = tmp_path / "whole.pt"
    save_model(whole, *trained_on(("query", "mlp_up")), lora_only=False)
    refuses([f"{whole}: {message}"], ("--init_checkpoint", whole, *flags))
    # The order in which they are given does not matter.
    open_model(parse("--init_checkpoint", whole, "--lora_targets", "mlp_up", "query"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lora_dim", 2, "--lora_targets", "query", "query"), "lora_targets names query twice"),
        (("--lora_targets", "mlp_up"), "--lora_targets needs LoRA: add --lora_dim"),
    ],
)
def test_invalid_flags_are_refused(base_path, flags, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        open_model(parse("--init_checkpoint", base_path, *flags))


@pytest.mark.parametrize(("trains", "estimate"), [(True, False), (True, True), (False, False)])
def test_an_alpha_without_a_rank(base_path, caplog, trains, estimate):
    """Training refuses it, because it would train the full model. Decoding and estimates ignore it.

    An estimate reads no files, and one of them may record the rank.
    """
    args = parse("--init_checkpoint", base_path, "--lora_alpha", 32)
    if trains:
        args.lora_dropout, args.estimate = 0.0, estimate
    if trains and not estimate:
        with pytest.raises(ValueError, match=r"^--lora_alpha needs LoRA: add --lora_dim$"):
            open_model(args)
        return
    assert open_model(args)[0].config.lora_attn_dim == 0
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (("--lora_dim", 2), ["--lora_alpha is not given: it is 128, the release's default"]),
        (("--lora_dim", 2, "--lora_alpha", 128), []),
        (("--lora_dim", 0, "--lora_alpha", 32), []),  # no LoRA
        ((), []),
    ],
)
def test_new_lora_without_a_given_alpha_is_warned_of(base_path, caplog, flags, warned):
    """An estimate does not warn: it reads no files, and one of them may record alpha."""
    for estimate in (True, False):
        args = parse("--init_checkpoint", base_path, *flags)
        args.lora_dropout, args.estimate = 0.0, estimate  # flags of gpt2_ft.py
        open_model(args)
    found = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage().partition(";")[0] for record in found] == warned


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ["c_attn"],
            r"unknown lora_targets 'c_attn' \(known: query, key, value, attention_output,",
        ),
        ([], "lora_targets is empty: name some of query, key"),
        ("query", "lora_targets must be a list of strings"),
    ],
)
def test_invalid_targets_of_a_configuration_are_refused(targets, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        checkpoints.config_of("gpt2.md", lora_targets=targets)


def test_an_unknown_target_on_the_command_line(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--train_data", "x", "--valid_data", "x", "--lora_targets", "c_proj"])
    assert "invalid choice: 'c_proj'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ({"transformer.h.0.attn.c_attn": [True, False, False]}, "2 stacked blocks, and it is"),
        ({"transformer.h.0.attn.c_attn": [False, False, False]}, "in its metadata"),
        ({"transformer.h.0.attn.c_attn": [1, 0, 1]}, "in its metadata"),
        ([True, False, True], "in its metadata"),
    ],
)
def test_wrong_metadata_is_refused(file_on, base_path, slices, message):
    path = file_on(("query", "key"))
    content = torch.load(path, weights_only=True)
    content["metadata"]["slices"] = json.dumps(slices)
    torch.save(content, path)
    refuses([f"{path}: ", message], ("--init_checkpoint", base_path), path)
