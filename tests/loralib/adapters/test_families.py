"""Tests of families: how they are registered, and how adapters of unregistered ones are handled."""

import json
import logging
import os
import shutil
from dataclasses import replace

import all_families  # noqa: F401
import pytest
import torch
from adapter_files import FAMILIES, MODULES, TARGETS, adapter_of, peft_folder, refused, tensors_of
from compare import assert_same_bits
from launches import fork_server
from safetensors.torch import load_file, save_file

from loralib.adapters import families
from loralib.adapters.adapter import Adapter, adapter_tensors
from loralib.adapters.canonical import canonical_names
from loralib.adapters.checks import check_family
from loralib.adapters.checksums import with_checksum
from loralib.adapters.deltas import deltas_of, ranks_of
from loralib.adapters.families import Family, Head, family_of, register
from loralib.adapters.formats import FORMATS, read_adapter, write_adapter
from loralib.adapters.metadata import LoraMetadata
from loralib.errors import CheckpointError, NeedsMergingError, adding_ways_out


@pytest.fixture
def unregistered(monkeypatch):
    """No family is registered, as if the library were used alone."""
    monkeypatch.setattr(families, "_REGISTERED", {})


def test_nlu_and_nlg_register_their_families():
    names = {family: family_of(MODULES[family]) for family in FAMILIES}
    assert {name: family and family.title for name, family in names.items()} == {
        "roberta": "RoBERTa",
        "deberta": "DeBERTa-v2",
        "gpt2": "GPT-2",
        "plain": None,
    }


@pytest.mark.parametrize(
    ("family", "module"),
    [
        *((family, modules[0]) for family, modules in MODULES.items() if family != "plain"),
        ("roberta", "roberta.embeddings.word_embeddings"),
        ("roberta", "encoder.layer.0.attention.self.query"),  # of the backbone alone
        ("roberta", "model.roberta.encoder.layer.0.attention.self.query"),
        ("roberta", "classifier.dense"),
        ("gpt2", "lm_head"),
    ],
)
def test_an_adapter_of_any_part_of_a_familys_models_may_belong_to_it(family, module):
    check_family(lora_of(module), family_of(MODULES[family]))


@pytest.mark.parametrize(
    ("family", "module", "theirs"),
    [
        ("deberta", MODULES["roberta"][0], "RoBERTa, but the layers of DeBERTa-v2"),
        ("gpt2", MODULES["roberta"][0], "RoBERTa, but the layers of GPT-2"),
        ("roberta", MODULES["gpt2"][0], "GPT-2, but the layers of RoBERTa"),
        ("gpt2", "model.layers.0.q", r"model\.layers\.0\.q, but the layers of GPT-2"),
    ],
)
def test_an_adapter_of_another_family_is_refused(family, module, theirs):
    with pytest.raises(CheckpointError, match=f"^a: holds an adapter of {theirs} are called "):
        check_family(lora_of(module), family_of(MODULES[family]))


def lora_of(module):
    halves = {f"{module}.lora_A": torch.ones(2, 6), f"{module}.lora_B": torch.ones(6, 2)}
    return Adapter({**halves, "classifier.bias": torch.ones(2)}, None, "a")


def test_earlier_names_become_canonical_under_any_prefix():
    tensors = {"body.0.query_lora_a.weight": torch.ones(2, 4)}
    assert canonical_names(tensors, "a").keys() == {"body.0.query_proj.lora_A"}


@pytest.mark.slow
def test_the_library_itself_registers_no_family():
    code = "import loralib; loralib.read_adapter; from loralib.adapters import families as f"
    code = f"{code}; print(f.registered())"
    done = fork_server("torch").run(["-c", code], os.environ, 60)
    assert done.stdout.strip() == "()", done.stderr


OTHERS = {
    "GPT-J": ("attn.q_proj", "mlp.fc_in"),
    "GPT-Neo": ("attn.attention.q_proj", "mlp.c_fc"),
    "BLOOM": ("self_attention.dense", "mlp.dense_h_to_4h"),
}


@pytest.mark.parametrize("modules", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("prefix", ["transformer.h.", "h."])
def test_models_with_names_like_gpt2s_are_not_taken_for_gpt2(tmp_path, modules, prefix):
    """Their names stay as they are, and their head is their own."""
    tensors = {"lm_head.weight": torch.ones(7, 6)} if prefix.startswith("transformer") else {}
    for module in modules:
        names = [f"base_model.model.{prefix}0.{module}.lora_{half}.weight" for half in "AB"]
        tensors |= {names[0]: torch.ones(2, 6), names[1]: torch.ones(6, 2)}
    tensors = {n if "lora" in n else f"base_model.model.{n}": t for n, t in tensors.items()}
    saved = ["lm_head"] if len(tensors) > 4 else None
    targets = {"target_modules": [*modules], "modules_to_save": saved}
    peft_folder(tmp_path / "in", tensors, task_type="CAUSAL_LM", **targets)
    adapter = read_adapter(tmp_path / "in")
    assert {f"{prefix}0.{module}" for module in modules} == ranks_of(adapter.tensors, "a").keys()
    write_adapter(tmp_path / "a.safetensors", adapter)
    write_adapter(tmp_path / "out", read_adapter(tmp_path / "a.safetensors"), "peft")
    assert_same_bits(load_file(tmp_path / "out" / "adapter_model.safetensors"), tensors)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["fan_in_fan_out"], config["task_type"]) == (False, "CAUSAL_LM")


def test_the_task_of_a_classifier_on_gpt2_is_kept(tmp_path):
    module = "base_model.model.transformer.h.0.mlp.c_fc"
    tensors = {
        f"{module}.lora_A.weight": torch.ones(2, 6),
        "base_model.model.score.weight": torch.ones(3, 6),
    }
    tensors[f"{module}.lora_B.weight"] = torch.ones(6, 2)
    targets = {"target_modules": ["c_fc"], "modules_to_save": ["score"]}
    peft_folder(tmp_path / "in", tensors, task_type="SEQ_CLS", **targets)
    write_adapter(tmp_path / "a.safetensors", read_adapter(tmp_path / "in"))
    write_adapter(tmp_path / "out", read_adapter(tmp_path / "a.safetensors"), "peft")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["fan_in_fan_out"], config["task_type"]) == (True, "SEQ_CLS")


@pytest.mark.parametrize(("rank", "rows"), [(3, 18), (2, 8)])
def test_an_update_that_cannot_be_divided_into_gpt2s_blocks_is_one(tmp_path, rank, rows):
    module = "base_model.model.transformer.h.0.attn.c_attn"
    tensors = {f"{module}.lora_A.weight": torch.ones(rank, 6)}
    tensors[f"{module}.lora_B.weight"] = torch.zeros(rows, rank)
    peft_folder(tmp_path / "in", tensors, r=rank, target_modules=["c_attn"])
    adapter = read_adapter(tmp_path / "in")
    assert (adapter.lora.rank, adapter.lora.alpha) == (rank, 3)
    assert_same_bits(
        {f"base_model.model.{n}.weight": t for n, t in adapter.tensors.items()}, tensors
    )


def test_a_family_is_registered_once(unregistered):
    family = Family(name="a", title="A", backbone="a.", layers="a.layer.")
    assert register(family) is family
    assert register(replace(family)) == family
    assert families.registered() == (family,)
    with pytest.raises(ValueError, match="another family is already called 'a'"):
        register(replace(family, backbone="b."))


def test_a_new_family_needs_nothing_else(unregistered, tmp_path):
    """Its earlier names, tied tensor and stacked projections work once it is registered."""
    register(
        Family(
            name="new",
            title="New",
            backbone="model.",
            layers="model.layers.",
            stacked={"qkv": (False, True, True)},
            tied={"out.weight": "model.embed.weight"},
            old_names={r"^layers\.": "model.layers."},
        )
    )
    pair = {"lora_A": torch.ones(4, 3), "lora_B": torch.ones(8, 2)}
    tensors = {f"layers.0.qkv.{name}": tensor for name, tensor in pair.items()}
    torch.save(tensors, tmp_path / "a.bin")
    adapter = read_adapter(tmp_path / "a.bin", lora_alpha=2)
    assert adapter.tensors.keys() == {f"model.layers.0.qkv.{name}" for name in pair}
    write_adapter(tmp_path / "a", adapter, "peft")
    assert_same_bits(read_adapter(tmp_path / "a").tensors, adapter.tensors)
    delta = deltas_of(adapter)["model.layers.0.qkv"]
    assert delta.starts == (4, 8)
    embed, other = torch.ones(2), torch.zeros(2)
    names = {**adapter.tensors, "model.embed.weight": embed}
    assert canonical_names({**names, "out.weight": embed.clone()}, "a").keys() == names.keys()
    for wrong in ({**names, "out.weight": other}, {**adapter.tensors, "out.weight": embed}):
        refused(lambda wrong=wrong: canonical_names(wrong, "a.bin"), "a.bin", "out.weight", "New")


# ---- heads ----

OUT, POOL, LM = ("out.weight", "out.bias"), ("model.pool.weight",), ("lm.bias", "lm.up.weight")
LAYER = ("model.layers.0.up.lora_A", "model.layers.0.up.weight")


@pytest.fixture
def with_heads(unregistered):
    return register(
        Family(
            name="new",
            title="New",
            backbone="model.",
            layers="model.layers.",
            heads={
                "labels": Head(("out",), "out", labeled=True),
                "pooled": Head(("out", "model.pool"), "out"),
                "words": Head(("lm",)),
            },
            tied={"lm.decoder.weight": "model.embed.weight"},
        )
    )


@pytest.mark.parametrize(
    ("names", "head"),
    [
        (OUT, "labels"),
        ((*OUT, *POOL), "pooled"),
        (LM, "words"),
        (("out.bias",), None),
        (("out.up.weight",), None),
        ((*OUT, *LM), None),
        ((*LM, *POOL), None),
        (("other.weight",), None),
        ((), None),
    ],
)
def test_the_head_is_derived_from_names_unless_metadata_record_it(with_heads, names, head):
    assert with_heads.head_of([*LAYER, *names]) == head
    tensors = dict.fromkeys([*LAYER, *names], torch.ones(1))
    assert Adapter(tensors, None).head == head
    metadata = LoraMetadata(rank=1, alpha=1, targets=("up",), head="other")
    assert Adapter(tensors, metadata).head == "other"


def test_a_head_may_have_modules_within_the_backbone(with_heads):
    """They are trained and saved with their head, and no other head uses them."""
    assert [families.in_known_backbone(name) for name in (*LAYER, *POOL)] == [True, True, False]
    assert [families.top_module(name) for name in (LAYER[0], *POOL, *OUT)] == [
        *("model", "model.pool", "out", "out")
    ]
    state = dict.fromkeys([*LAYER, *OUT, *POOL], torch.ones(1))
    assert adapter_tensors(state).keys() == {LAYER[0], *OUT, *POOL}
    tied = dict.fromkeys(["model.embed.weight", "lm.decoder.weight"], torch.ones(1))
    assert adapter_tensors(state | tied).keys() == {LAYER[0], *OUT, *POOL}
    untied = {**tied, "lm.decoder.weight": torch.ones(1)}
    assert "lm.decoder.weight" in adapter_tensors(state | untied)
    assert with_heads.unused_by_head([*LAYER, *LM, *POOL]) == {*POOL}
    assert with_heads.unused_by_head([*LAYER, *OUT, *POOL]) == set()


# ---- families that are not registered ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", FORMATS)
def test_files_of_a_family_can_be_read_without_it(request, tmp_path, caplog, family, format):
    """With the same tensors; PEFT's folder records which slices stacked updates reach."""
    adapter = adapter_of(family)
    write_adapter(tmp_path / TARGETS[format], adapter, format)
    known = read_adapter(tmp_path / TARGETS[format], lora_alpha=3)
    request.getfixturevalue("unregistered")
    with caplog.at_level(logging.INFO, "loralib"):
        found = read_adapter(tmp_path / TARGETS[format], lora_alpha=3 if format != "peft" else None)
    assert "is for a kind of model that is not known here, whose layers may" in caplog.text
    assert_same_bits(found.tensors, known.tensors)
    if (family, format) == ("gpt2", "peft"):
        assert found.metadata.slices == dict.fromkeys(MODULES["gpt2"], (True, False, True))
        assert all(delta.starts == (0, 12) for delta in deltas_of(found).values())


def test_stacked_updates_in_a_peft_folder_of_an_earlier_version_become_one(request, tmp_path):
    """It does not record which slices they reach, so they stay as PEFT holds them."""
    folder, adapter = tmp_path / "a", adapter_of("gpt2")
    write_adapter(folder, adapter, "peft")
    known, earlier = read_adapter(folder), tmp_path / "earlier"
    shutil.copytree(folder, earlier)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        tensors, earlier / "adapter_model.safetensors", with_checksum(tensors, adapter.metadata)
    )
    assert read_adapter(earlier).metadata == known.metadata
    request.getfixturevalue("unregistered")
    found = read_adapter(earlier)
    assert (found.metadata.rank, found.metadata.alpha) == (4, 6)
    for name, delta in deltas_of(found).items():
        (part,) = delta.blocks()
        (A_q, A_v), (B_q, B_v) = (known.tensors[f"{name}.lora_{ab}"].chunk(2) for ab in "AB")
        assert torch.equal(part.A, torch.cat([A_q, A_v]))
        nothing = torch.zeros(6, 2)
        query, value = torch.cat([B_q, nothing], dim=1), torch.cat([nothing, B_v], dim=1)
        assert torch.equal(part.B, torch.cat([query, torch.zeros(6, 4), value]))
        assert delta.scaling == 3 / 2


def test_adapters_that_need_their_family_are_refused_without_it(unregistered, tmp_path):
    """Such as stacked updates, and the release's first names, which are not LoRA's usual ones."""
    refused(
        lambda: deltas_of(adapter_of("gpt2")), "this adapter", "to: load it with load_state_dict"
    )
    name = "deberta.encoder.layer.0.attention.self.query_lora_a.weight"
    torch.save({name: torch.ones(2, 6), **tensors_of("deberta")}, tmp_path / "old.bin")
    refused(lambda: read_adapter(tmp_path / "old.bin"), tmp_path / "old.bin", "not the name of a")


@pytest.mark.parametrize("family", ["roberta", "deberta"])
def test_writing_an_adapter_of_no_registered_family_has_a_remark(unregistered, tmp_path, family):
    for format in ("lora", "peft"):
        remarks = write_adapter(tmp_path / TARGETS[format], adapter_of(family), format)
        assert any("is for a kind of model that is not known here" in remark for remark in remarks)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS"


def test_a_full_model_is_recognized_by_its_adapted_weights(unregistered, tmp_path):
    weight = f"{MODULES['roberta'][0]}.weight"
    torch.save({**tensors_of("roberta"), weight: torch.ones(6, 6)}, tmp_path / "full.bin")
    refused(lambda: read_adapter(tmp_path / "full.bin"), tmp_path / "full.bin", "a full model")


# ---- advice that scripts add to errors ----


@pytest.mark.parametrize("way_out", ["--flag", lambda error: f"--{error.reason}"])
def test_scripts_add_their_advice_to_errors(way_out):
    """It depends on the error's class; the error stays the same object."""
    error = NeedsMergingError("a.bin", "flag")
    with pytest.raises(NeedsMergingError) as caught, adding_ways_out({NeedsMergingError: way_out}):
        raise error
    assert caught.value is error
    assert str(error) == "a.bin: flag; merge it into its base (--flag)"
    other = CheckpointError("b.bin: is damaged")
    with pytest.raises(CheckpointError) as caught, adding_ways_out({NeedsMergingError: way_out}):
        raise other
    assert str(caught.value) == "b.bin: is damaged"


def test_stacked_updates_of_an_unknown_family_have_no_release_format(unregistered, tmp_path):
    """Each family's scripts wrap them in their own way."""
    refused(
        lambda: write_adapter(tmp_path / "a.bin", adapter_of("gpt2")), "this adapter", "register"
    )
    assert not list(tmp_path.iterdir())
