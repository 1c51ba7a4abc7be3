"""Adapters for other heads than GLUE's: in every format, in a bank, and refused by other heads."""

import importlib
import json
import os
from dataclasses import replace

import pytest
import torch
from adapted_encoders import ADAPTED
from compare import assert_same_bits
from head_cases import (
    TRAINED,
    build,
    close,
    given,
    logits_of,
    real,
    without_labels,
)
from launches import fork_server
from safetensors.torch import load_file, save_file
from two_predictions import make_mlm

import loralib as lora
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.merging import merge_into
from loralib.adapters.peft import CONFIG_NAME, WEIGHTS_NAMES
from loralib.errors import CheckpointError, NeedsMergingError
from loralib.serving.prepared import prepare
from transformers.adapter_kinds import BITFIT, BOTTLENECK
from transformers.models.auto.modeling_auto import auto_model_for

LORA, POSITIONS = ADAPTED["lora"], {"lora_positions": True}
KINDS = {
    "lora": (lora.adapters.adapter.LORA, LORA),
    "adapter": (BOTTLENECK, ADAPTED["houlsby"]),
    "bitfit": (BITFIT, ADAPTED["bitfit"]),
}
NAMES = ("O", "B-PER", "I-PER")
TASK_TYPES = {
    "token_classification": "TOKEN_CLS",
    "question_answering": "QUESTION_ANS",
    "multiple_choice": None,
    "causal_lm": "CAUSAL_LM",
}
HEADS = {
    "token_classification": {"classifier"},
    "question_answering": {"qa_outputs"},
    "multiple_choice": {"classifier", "roberta.pooler"},
    "causal_lm": {"lm_head"},
}


def adapted(family, head, **settings):
    """A model with these settings and random weights, LoRA's B and adapters included."""
    labels = {"id2label": dict(enumerate(NAMES))} if head == "token_classification" else {}
    positions = POSITIONS if family == "deberta" and settings.get("apply_lora") else {}
    return build(family, head, finetuning_task="mine", **labels, **positions, **settings)


@pytest.mark.parametrize("head", HEADS)
def test_other_heads_record_no_text_columns(head):
    model = adapted("roberta", head, **LORA, text_columns=["premise", "claim"])
    assert model.adapter().metadata.text_columns is None


@pytest.mark.parametrize("family", ["roberta", "deberta"])
def test_the_bias_of_a_masked_lm_head_is_not_taken_for_the_base_s(tmp_path, family):
    """Not by loralib alone either, without the fork, which knows the family."""
    adapter = make_mlm(family, **LORA).adapter()
    write_adapter(tmp_path / "lora.safetensors", adapter)
    code = f"import loralib, sys; a = loralib.read_adapter({str(tmp_path / 'lora.safetensors')!r})"
    code += "; assert 'transformers' not in sys.modules; print(len(a.tensors), a.metadata.bias)"
    done = fork_server("torch").run(["-c", code], os.environ, 60)
    assert done.stdout.split() == [str(len(adapter.tensors)), "none"], done.stderr


def with_other_weights(model, seed=3):
    """Replaces the trained weights of a model by other random ones."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name in model.adapter(model.adapted_by[0]).tensors:
            parameter.data.normal_(std=0.2, generator=generator)
    return model


def loss_of(model, head):
    with torch.no_grad():
        return model(**given(head)).loss


# ---- files ----


@pytest.mark.parametrize(("family", "head"), TRAINED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_files_restore_models_with_other_heads(family, head, kind, suffix, tmp_path):
    kind, settings = KINDS[kind]
    model = adapted(family, head, **settings)
    if family == "deberta" and suffix == ".bin":
        model.config.lora_positions = False
        model = build(family, head, **{**settings, "id2label": model.config.id2label})
    adapter = model.adapter(kind)
    assert {name for name in adapter.tensors if not kind.holds(name, (f"{family}.",))} == {
        name
        for name in model.state_dict()
        if name.startswith(tuple(f"{module}." for module in HEADS[head]))
        and name not in model.tied_weights
    }
    write_adapter(tmp_path / f"a{suffix}", adapter)
    read = read_adapter(tmp_path / f"a{suffix}", kind)
    # Language models' heads are alike, and a .bin has no metadata.
    is_lm = head == "causal_lm" and suffix == ".bin"
    assert read.head == ("masked_lm" if is_lm else head)
    if suffix == ".safetensors":
        assert read.metadata == adapter.metadata
        assert read.metadata.head == head
        assert read.metadata.labels == (NAMES if head == "token_classification" else None)
    again = with_other_weights(type(model)(model.config).eval())
    weights = {n: t for n, t in model.state_dict().items() if n not in adapter.tensors}
    again.load_state_dict(weights, strict=False)
    assert loss_of(again, head) != loss_of(model, head)
    assert again.load_adapters([read]) == []
    assert_same_bits(again.state_dict(), model.state_dict())


@pytest.mark.parametrize(("family", "head"), [pair for pair in TRAINED if pair[1] != "causal_lm"])
def test_a_folder_in_pefts_format(family, head, tmp_path):
    model = adapted(family, head, **LORA)
    adapter = model.adapter()
    remarks = write_adapter(tmp_path / "a", adapter, "peft")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["task_type"] == TASK_TYPES[head]
    assert config["modules_to_save"] == sorted(HEADS[head])
    assert any("head" in remark for remark in remarks) == (TASK_TYPES[head] is None)
    read = read_adapter(tmp_path / "a")
    assert_same_bits(read.tensors, adapter.tensors)
    assert read.metadata == adapter.metadata
    # A folder that PEFT itself wrote has no metadata but its config.
    _without_metadata(tmp_path / "a" / "adapter_model.safetensors")
    theirs = read_adapter(tmp_path / "a")
    assert theirs.metadata.head == (head if TASK_TYPES[head] else None)
    assert theirs.head == head


def test_pefts_format_has_no_head_that_is_tied_to_the_base(tmp_path):
    """PEFT saves whole modules, so that the file would have a copy of the vocabulary."""
    adapter = adapted("roberta", "causal_lm", **LORA).adapter()
    with pytest.raises(NeedsMergingError, match=r"brings lm_head, whose lm_head.decoder.weight is"):
        write_adapter(tmp_path / "a", adapter, "peft")
    # LoRA alone, with the base's own head, is what PEFT trains for a language model.
    alone = {name: tensor for name, tensor in adapter.tensors.items() if "lora_" in name}
    write_adapter(tmp_path / "a", replace(adapter, tensors=alone), "peft")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("CAUSAL_LM", None)
    model = adapted("roberta", "causal_lm", **LORA)
    assert model.load_adapters([read_adapter(tmp_path / "a")]) == []


def _without_metadata(path):
    from safetensors.torch import load_file, save_file

    save_file({name: tensor.clone() for name, tensor in load_file(path).items()}, path)


def test_a_folder_whose_task_was_changed_is_refused(tmp_path):
    write_adapter(tmp_path / "a", adapted(*TRAINED[0], **LORA).adapter(), "peft")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(path.read_text().replace("TOKEN_CLS", "SEQ_CLS"))
    with pytest.raises(CheckpointError, match=r"head token_classification, .* sequence_classif"):
        read_adapter(tmp_path / "a")


@pytest.mark.parametrize(("family", "head"), TRAINED)
@pytest.mark.parametrize("part", KINDS)
def test_split_lora_takes_adapters_of_other_heads_out_of_checkpoints(family, head, part, tmp_path):
    split_lora = importlib.import_module("split_lora")
    kind, settings = KINDS[part]
    model = adapted(family, head, **settings, text_columns=["premise", "claim"])
    model.save_pretrained(tmp_path / "full")
    split_lora.split(tmp_path / "full", tmp_path / f"{part}.safetensors", part)
    ours, theirs = read_adapter(tmp_path / f"{part}.safetensors", kind), model.adapter(kind)
    assert_same_bits(ours.tensors, theirs.tensors)
    same_base = {"base_fingerprint": theirs.metadata.base_fingerprint}
    assert replace(ours.metadata, **same_base) == theirs.metadata


@pytest.mark.parametrize(("family", "head"), TRAINED)
def test_convert_merges_adapters_of_other_heads(family, head, tmp_path):
    convert = importlib.import_module("convert")
    model = adapted(family, head, **LORA)
    base = type(model)(replace_config(model, apply_lora=False)).eval()
    base.load_state_dict(model.state_dict(), strict=False)
    base.base_model.save_pretrained(tmp_path / "base")
    settings = json.loads((tmp_path / "base" / "config.json").read_text())
    settings.pop("is_decoder", None)
    (tmp_path / "base" / "config.json").write_text(json.dumps(settings))
    write_adapter(tmp_path / "a.safetensors", model.adapter())
    arguments = [tmp_path / "a.safetensors", tmp_path / "out", "--to", "merged"]
    convert.main([*map(str, arguments), "--base", str(tmp_path / "base")])
    merged = auto_model_for(head).from_pretrained(tmp_path / "out")
    assert type(merged) is type(model)
    assert not merged.newly_initialized
    assert not merged.adapted_by
    if head == "token_classification":
        assert merged.config.id2label == dict(enumerate(NAMES))
    close(loss_of(merged, head), loss_of(model, head))


def replace_config(model, **changes):
    return type(model.config)(**{**model.config.to_dict(), **changes})


# ---- heads that are not the model's ----


OTHER_HEADS = [
    (family, head, other)
    for family, head in TRAINED
    for other in ("sequence_classification", *TASK_TYPES)
    if other != head and (other == "sequence_classification" or (family, other) in TRAINED)
]


@pytest.mark.parametrize(("family", "head", "other"), OTHER_HEADS)
def test_an_adapter_of_another_head_is_refused(family, head, other):
    adapter = adapted(family, head, **LORA).adapter()
    config = adapted(family, head, **LORA).config
    model = auto_model_for(other).from_config(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=f"^adapter: was trained with head {head}, .* {other}$"
    ):
        model.load_adapters([adapter])
    # Without a recorded head, the names of the head's tensors do not fit.
    unrecorded = replace(adapter, metadata=replace(adapter.metadata, head=None))
    model.newly_initialized = frozenset(model.state_dict())
    with pytest.raises(CheckpointError, match=r"lacks|that the model does not have"):
        model.load_adapters([unrecorded])
    assert_same_bits(model.state_dict(), before)


def test_a_decoders_adapter_is_refused_by_an_encoder_and_the_reverse():
    decoder = adapted("roberta", "causal_lm", **LORA)
    other = build("roberta", "bidirectional_lm", **LORA)
    with pytest.raises(CheckpointError, match=r"was trained with is_decoder True, .* False$"):
        other.load_adapters([decoder.adapter()])
    with pytest.raises(CheckpointError, match=r"was trained with is_decoder False, .* True$"):
        decoder.load_adapters([other.adapter()])


# ---- bank ----


@pytest.mark.parametrize(("family", "head"), TRAINED)
def test_a_bank_gives_each_adapters_own_outputs(family, head):
    """Each row of a batch, or question with choices, has its adapter; heads differ in width."""
    plain, adapters, own = build(family, head), {}, {}
    for seed, (name, labels) in enumerate({"a": 3, "b": 5}.items()):
        labels = {"num_labels": labels} if head == "token_classification" else {}
        model = build(family, head, **LORA, **(POSITIONS if family == "deberta" else {}), **labels)
        adapters[name] = replace(with_other_weights(model, seed).adapter(), source=name)
        alone = type(model)(replace_config(model, apply_lora=False)).eval()
        weights = {n: t for n, t in plain.state_dict().items() if n in alone.state_dict()}
        alone.load_state_dict(
            {n: t for n, t in weights.items() if t.shape == alone.state_dict()[n].shape},
            strict=False,
        )
        merge_into(alone, adapters[name])
        own[name] = alone
    arguments = without_labels(head, given(head))
    before = plain(**arguments)
    bank = lora.AdapterBank(plain)
    for name, adapter in adapters.items():
        bank.add(name, adapter)
    rows = ["a", "b", "b", "a"]
    if head == "multiple_choice":
        rows = ["a", "a", "b", "b"]
    with bank.use(rows), torch.no_grad():
        mixed = plain(**arguments)
    for name in logits_of(head):
        alone = {each: model(**arguments)[name] for each, model in own.items()}
        assert (alone["a"] - before[name]).nan_to_num(0).abs().max() > 0.1
        for row, each in enumerate(rows[:: 2 if head == "multiple_choice" else 1]):
            part = {key: value[row] for key, value in arguments.items()}
            theirs = real(alone[each][row], part)
            ours = real(mixed[name][row], part)[..., : theirs.shape[-1]]
            close(ours, theirs)
    for name in logits_of(head):
        assert torch.equal(plain(**arguments)[name], before[name])
    assert all(parameter.requires_grad for parameter in plain.parameters())


def test_a_bank_shares_a_heads_tied_weights_with_the_base():
    """The vocabulary is in memory once, and the base's parameters stay as they are."""
    plain, adapter = (
        build("roberta", "causal_lm"),
        adapted("roberta", "causal_lm", **LORA).adapter(),
    )
    words = plain.roberta.embeddings.word_embeddings.weight
    for source in (adapter, replace(adapter, source="other")):
        head = prepare(plain, source).heads["lm_head"]
        assert head.decoder.weight is words
        assert head.decoder.bias is head.bias
        assert head.bias is not plain.lm_head.bias
        assert {name for name, p in head.named_parameters() if p.requires_grad} == {
            "decoder.weight"
        }
    assert words.requires_grad


@pytest.mark.parametrize("tie", [True, False])
def test_an_untied_vocabulary_belongs_to_the_adapter(tie, tmp_path):
    """A tied one is the base's."""
    model = adapted("roberta", "causal_lm", **LORA, tie_word_embeddings=tie)
    adapter = model.adapter()
    assert ("lm_head.decoder.weight" in adapter.tensors) == (not tie)
    assert "lm_head.decoder.bias" not in adapter.tensors
    write_adapter(tmp_path / "a.safetensors", adapter)
    read = read_adapter(tmp_path / "a.safetensors")
    again = adapted("roberta", "causal_lm", **LORA, tie_word_embeddings=tie)
    assert with_other_weights(again).load_adapters([read]) == []
    assert_same_bits(again.state_dict(), model.state_dict())
    if not tie:
        write_adapter(tmp_path / "a", adapter, "peft")
        assert_same_bits(read_adapter(tmp_path / "a").tensors, adapter.tensors)
        with pytest.raises(
            CheckpointError, match=r"that the model does not have:.* lm_head.decoder.weight"
        ):
            adapted("roberta", "causal_lm", **LORA).load_adapters([read])


def test_a_folder_of_peft_may_hold_all_biases_of_a_language_model(tmp_path):
    """One of them has two names, of which reading keeps one; here the two are one tensor."""
    settings = {**LORA, "tie_word_embeddings": False}  # else PEFT would save the vocabulary as well
    trained = adapted("roberta", "causal_lm", **settings)
    write_adapter(tmp_path / "a", trained.adapter(), "peft")
    weights, config = (tmp_path / "a" / name for name in (WEIGHTS_NAMES[0], CONFIG_NAME))
    tensors = load_file(weights)
    for name, bias in trained.named_parameters(remove_duplicate=False):
        if name.endswith(".bias"):
            owner = name.removesuffix(".bias")
            is_adapted = isinstance(trained.get_submodule(owner), lora.LoRALayer)
            place = f"base_model.model.{owner}{'.base_layer' if is_adapted else ''}.bias"
            bias.data.copy_(tensors.setdefault(place, bias.data + 1))
    save_file(tensors, weights)  # without our metadata
    config.write_text(json.dumps({**json.loads(config.read_text()), "bias": "all"}))
    model = with_other_weights(adapted("roberta", "causal_lm", **settings))
    lora.load_adapter(model, tmp_path / "a")
    assert_same_bits(model.state_dict(), trained.state_dict())
    tensors["base_model.model.lm_head.decoder.bias"] += 1  # as training unties them in PEFT
    save_file(tensors, weights)
    with pytest.raises(CheckpointError, match=r"lm_head.decoder.bias .* is tied to lm_head.bias"):
        lora.load_adapter(model, tmp_path / "a")


def test_a_vocabulary_that_an_adapter_has_untied_stays_its_own(tmp_path, caplog):
    """In the next adapter, in a checkpoint with LoRA, and in the merged model."""
    trained = adapted("roberta", "causal_lm", **LORA, tie_word_embeddings=False)
    write_adapter(tmp_path / "a.safetensors", trained.adapter())
    model = with_other_weights(adapted("roberta", "causal_lm", **LORA))
    lora.load_adapter(model, tmp_path / "a.safetensors")
    assert not model.config.tie_word_embeddings  # a run that is resumed compares it
    assert_same_bits(model.adapter().tensors, trained.adapter().tensors)
    inputs = without_labels("causal_lm", given("causal_lm"))
    with torch.no_grad():
        expected = real(model.eval()(**inputs).logits, inputs)
        model.save_pretrained(tmp_path / "with_lora")
        lora.merge(model).save_pretrained(tmp_path / "merged")
        for name in ("with_lora", "merged"):
            again = type(model).from_pretrained(tmp_path / name).eval()
            close(real(again(**inputs).logits, inputs), expected)
    assert "tie_word_embeddings" not in caplog.text  # the model has noted it
