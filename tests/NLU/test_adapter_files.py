"""Files of bottleneck adapters and BitFit: this project's, AdapterHub's, whole checkpoints."""

import json
from dataclasses import replace

import pytest
import torch
from adapted_encoders import ADAPTED, CROSS, FAMILIES, close, settings_of

from loralib.adapters.adapter import LORA
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.errors import CheckpointError, SettingsError, adding_ways_out
from loralib.io.tensors import read_tensors
from transformers import (
    RobertaConfig,
    RobertaForSequenceClassification,
)
from transformers.adapter_kinds import BITFIT, BOTTLENECK, KINDS, fitting_flag
from transformers.utils.cli import WAYS_OUT

pytestmark = pytest.mark.slow

# ---- files ----


def expected_names(model, kind):
    """The tensors that a file should have: those of its kind, and the head's."""
    start = f"{model.base_model_prefix}."
    names = {name for name in model.state_dict() if not name.startswith(start)}
    for name in model.state_dict():
        if name.startswith(start):
            is_bias = "bias" in name and ".adapter." not in name
            of_kind = {LORA: "lora_" in name, BOTTLENECK: ".adapter." in name, BITFIT: is_bias}
            names |= {name} if of_kind[kind] else set()
    return names


@pytest.mark.parametrize("format", [".bin", ".safetensors"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", CROSS, ids="+".join)
def test_files_restore_a_model(build_adapted, batch, tmp_path, family, names, format):
    trained = build_adapted(family, names)
    fresh = build_adapted(family, names)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    assert not torch.allclose(trained(**batch).logits, fresh(**batch).logits, atol=1e-2)
    adapters = []
    for kind in trained.adapted_by:
        path = tmp_path / f"{kind.file}{format}"
        write_adapter(path, trained.adapter(kind))
        assert read_tensors(path)[0].keys() == expected_names(trained, kind)
        adapters.append(read_adapter(path, kind))
    assert fresh.load_adapters(adapters) == []
    close(trained(**batch).logits, fresh(**batch).logits)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name]), name


def test_metadata_of_each_kind_of_file(build_adapted, tmp_path):
    model = build_adapted("roberta", ["lora", "pfeiffer", "bitfit"], finetuning_task="mnli")
    model.config.base_name_or_path = "roberta-base"
    switches = ("apply_lora", "apply_adapter", "apply_bitfit")
    own = {
        LORA: {"rank": 2, "alpha": 6, "targets": ["query", "value"], "bias": "none"},
        BOTTLENECK: {"adapter_type": "pfeiffer", "adapter_size": 5},
        BITFIT: {"biases": "all"},
    }
    for kind in KINDS:
        write_adapter(tmp_path / "x.safetensors", model.adapter(kind))
        metadata = read_tensors(tmp_path / "x.safetensors")[1]
        assert {n: json.loads(metadata[n]) for n in metadata.keys() - {"format", "digest"}} == {
            **own[kind],
            "base": "roberta-base",
            "head": "sequence_classification",
            "task": "mnli",
            "labels": ["LABEL_0", "LABEL_1", "LABEL_2"],
            "trained_with": [switch for switch in switches if switch != kind.switch],
        }
        info = read_adapter(tmp_path / "x.safetensors", kind).metadata
        assert info == model.adapter(kind).metadata


def test_loading_a_head_sets_the_model_s_labels_and_text_columns(build_adapted):
    """If the adapter does not name its labels, the model keeps its own."""
    names = {0: "no", 1: "maybe", 2: "yes"}
    any_order = dict(reversed(names.items()))
    trained = build_adapted("roberta", ["lora"], id2label=any_order, text_columns=["review"])
    adapter = trained.adapter()
    assert adapter.metadata.labels == tuple(names.values())
    fresh = build_adapted("roberta", ["lora"], text_columns=["premise", "claim"])
    fresh.load_adapters([adapter])
    assert (fresh.config.id2label, fresh.config.text_columns) == (names, ["review"])
    assert fresh.config.label2id == {"no": 0, "maybe": 1, "yes": 2}
    assert fresh.adapter().metadata == adapter.metadata
    # An adapter without text columns, one without labels, and one without a head.
    fresh.load_adapters([replace(adapter, metadata=replace(adapter.metadata, text_columns=None))])
    assert (fresh.config.id2label, fresh.config.text_columns) == (names, None)
    unnamed = replace(adapter.metadata, labels=("LABEL_0", "LABEL_1", "LABEL_2"))
    fresh.load_adapters([replace(adapter, metadata=unnamed)])
    assert (fresh.config.id2label, fresh.config.text_columns) == (names, ["review"])
    headless = {name: tensor for name, tensor in adapter.tensors.items() if "lora_" in name}
    others = replace(adapter.metadata, labels=("a", "b", "c"), text_columns=("text",))
    fresh.load_adapters([replace(adapter, tensors=headless, metadata=others)])
    assert (fresh.config.id2label, fresh.config.text_columns) == (names, ["review"])
    similar = replace(adapter.metadata, labels=("LABEL_no", "LABEL_maybe", "LABEL_yes"))
    fresh.load_adapters([replace(adapter, metadata=similar)])
    assert fresh.config.label_names == similar.labels
    # With a new head, as for another task, the model keeps its own.
    other = build_adapted("roberta", ["lora"], text_columns=["premise", "claim"])
    other.load_adapters([adapter], new_head=True)
    assert other.config.text_columns == ["premise", "claim"]
    assert other.config.id2label[0] == "LABEL_0"


def test_a_folder_may_hold_adapters_of_several_kinds(build_adapted, tmp_path):
    model = build_adapted("deberta", ["lora", "houlsby"])
    for kind in (LORA, BOTTLENECK):
        for name in kind.files:
            write_adapter(tmp_path / name, model.adapter(kind))
    for kind in (LORA, BOTTLENECK):
        loaded = read_adapter(tmp_path, kind)
        assert loaded.kind is kind
        assert loaded.metadata == model.adapter(kind).metadata
        # A .bin has no metadata of its own; the file next to it has.
        assert read_adapter(tmp_path / kind.files[1], kind).metadata == loaded.metadata
    with pytest.raises(CheckpointError, match="holds no adapter: none of pytorch_model_bitfit"):
        read_adapter(tmp_path, BITFIT)


def refuses(model, adapters, message):
    """Checks that `load_adapters` raises a one-line error and leaves the model as it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        model.load_adapters(adapters)
    assert "\n" not in str(caught.value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("has_metadata", [True, False], ids=["metadata", "no metadata"])
@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("houlsby", {"adapter_size": 6}, "adapter_size 5, .*built with 6"),
        ("houlsby", {"adapter_type": "pfeiffer"}, "adapter_type houlsby, .*built with pfeiffer"),
        ("pfeiffer", {"adapter_type": "houlsby"}, "adapter_type pfeiffer, .*built with houlsby"),
        ("houlsby", {"hidden_size": 16}, "16"),
        (
            "houlsby",
            {"num_hidden_layers": 1},
            "has 8 tensors that the model does not have: .*layer.1.",
        ),
        ("houlsby", {"num_hidden_layers": 3}, "lacks 8 tensors: .*layer.2."),
        (
            "houlsby",
            {"apply_adapter": False},
            "no adapter layers to take it: build it",
        ),
        ("houlsby", {"num_labels": 2}, r"\(3.* in the file, \(2.* in the model"),
        ("bitfit", {"num_hidden_layers": 1}, "tensors that the model does not have: "),
        ("bitfit", {"num_hidden_layers": 3}, "lacks "),
        ("bitfit", {"intermediate_size": 40}, r"dense.bias is \(48,\) in the file, \(40,\) in the"),
    ],
)
def test_a_file_that_does_not_fit_the_model_is_refused(
    build_adapted, family, has_metadata, name, changed, message
):
    adapter = build_adapted(family, [name]).adapter(BITFIT if name == "bitfit" else BOTTLENECK)
    if not has_metadata:
        adapter = replace(adapter, metadata=None)
        message = {
            "adapter_size 5, .*built with 6": r"adapter_A.\w+ is \(5.*in the file, \(6.*"
            "adapter_size 5, not 6",
            "adapter_type houlsby, .*built with pfeiffer": "after attention.output, output of .*"
            "the model has them after output: give",
            "adapter_type pfeiffer, .*built with houlsby": "after output of .*"
            "the model has them after attention.output, output: give",
        }.get(message, message)
    refuses(build_adapted(family, [name], **changed), [adapter], message)


def test_missing_extra_and_nan_tensors_are_refused(build_adapted):
    model = build_adapted("roberta", ["houlsby"])
    name = "roberta.encoder.layer.1.attention.output.adapter.adapter_B.weight"
    adapter = model.adapter(BOTTLENECK)
    tensors = dict(adapter.tensors)
    more = {**tensors, name.replace("1", "2"): tensors[name]}
    message = f"1 tensor that the model does not have: {name.replace('1', '2')}"
    refuses(model, [replace(adapter, tensors=more)], message)
    nan = {**tensors, name: tensors[name] * float("nan")}
    refuses(model, [replace(adapter, tensors=nan)], f"{name} holds values that are not finite")
    del tensors[name]
    refuses(model, [replace(adapter, tensors=tensors)], f"lacks 1 tensor: {name}")
    bias = "roberta.embeddings.LayerNorm.bias"
    model = build_adapted("roberta", ["bitfit"])
    less = dict(model.adapter(BITFIT).tensors)
    del less[bias]
    refuses(model, [replace(model.adapter(BITFIT), tensors=less)], f"lacks 1 tensor: {bias}")


@pytest.mark.parametrize("name", ["houlsby", "bitfit"])
def test_an_adapter_of_another_base_is_refused(build_adapted, tmp_path, name):
    base = build_adapted("roberta")
    base.save_pretrained(tmp_path / "a")
    weight = base.get_parameter("roberta.encoder.layer.0.output.dense.weight")
    weight.data.mul_(1.5)
    base.save_pretrained(tmp_path / "b")
    kind = BITFIT if name == "bitfit" else BOTTLENECK
    models = [
        RobertaForSequenceClassification.from_pretrained(tmp_path / folder, **ADAPTED[name])
        for folder in "aab"
    ]
    adapter = models[0].adapter(kind)
    assert models[1].load_adapters([adapter]) == []
    refuses(models[2], [adapter], "was trained on another base than the one given: '.*/a'")


def test_training_does_not_change_the_base_s_fingerprint(build_adapted, tmp_path):
    """Biases and adapters are not part of it, so that a whole checkpoint still names its base."""
    build_adapted("roberta").save_pretrained(tmp_path / "base")
    names = ("houlsby", "bitfit")
    model = RobertaForSequenceClassification.from_pretrained(
        tmp_path / "base", **settings_of(names)
    )
    for name, parameter in model.named_parameters():
        if "adapter" in name or "bias" in name:
            parameter.data.add_(0.3)
    model.save_pretrained(tmp_path / "trained")
    again = RobertaForSequenceClassification.from_pretrained(tmp_path / "trained")
    assert again.base_fingerprint == model.base_fingerprint
    assert again.adapted_by == (BOTTLENECK, BITFIT)
    assert again.config.base_name_or_path == str(tmp_path / "base")
    # Once no adaptation is switched on, the checkpoint is a base of its own.
    off = RobertaConfig.from_pretrained(tmp_path / "trained", apply_bitfit=False)
    assert off.base_name_or_path == str(tmp_path / "base")
    build_adapted("roberta", ["bitfit"]).save_pretrained(tmp_path / "biases")
    off = RobertaConfig.from_pretrained(tmp_path / "biases", apply_bitfit=False)
    assert off.base_name_or_path == str(tmp_path / "biases")


def test_files_of_one_run_have_to_be_loaded_together(build_adapted):
    model = build_adapted("roberta", ["lora", "bitfit"])
    lora, biases = model.adapter(LORA), model.adapter(BITFIT)
    refuses(model, [lora], "trained with apply_bitfit as well, .* give that file too")
    refuses(model, [biases], "trained with apply_lora as well, .* give that file too")
    other = {**biases.tensors, "classifier.dense.bias": biases.tensors["classifier.dense.bias"] + 1}
    message = "does not belong to the same run as adapter: their classifier.dense.bias differ"
    refuses(model, [lora, replace(biases, tensors=other)], message)
    assert model.load_adapters([lora, biases]) == []
    # The release's format does not record what it was trained with.
    assert model.load_adapters([replace(lora, metadata=None)]) == []


def test_with_a_new_head_the_model_keeps_its_own(build_adapted):
    adapter = build_adapted("deberta", ["bitfit"]).adapter(BITFIT)
    model = build_adapted("deberta", ["bitfit"], num_labels=2)
    refuses(model, [adapter], r"classifier.\w+ is \(3")
    skipped = model.load_adapters([adapter], new_head=True)
    assert skipped == ["classifier.bias", "classifier.weight"]
    # A bias of the backbone is never skipped.
    bias = "deberta.embeddings.LayerNorm.bias"
    tensors = {**adapter.tensors, bias: torch.zeros(5)}
    with pytest.raises(CheckpointError, match=rf"{bias} is \(5,\)"):
        model.load_adapters([replace(adapter, tensors=tensors)], new_head=True)


@pytest.mark.parametrize(
    ("held", "asked", "message"),
    [
        ("lora", BOTTLENECK, "none of its 12 tensors is adapter's"),
        ("lora", BITFIT, "none of its 12 tensors is BitFit's"),
        ("houlsby", LORA, "none of its 20 tensors is LoRA's"),
        ("houlsby", BITFIT, "none of its 20 tensors is BitFit's"),
        ("bitfit", LORA, "tensors is LoRA's"),
        ("bitfit", BOTTLENECK, "tensors is adapter's"),
    ],
)
def test_a_file_of_another_kind_is_refused(build_adapted, tmp_path, held, asked, message):
    model = build_adapted("roberta", [held])
    write_adapter(tmp_path / "x.bin", model.adapter(model.adapted_by[0]))
    with pytest.raises(CheckpointError, match=rf"x.bin: .*{message}"):
        read_adapter(tmp_path / "x.bin", asked)


@pytest.mark.parametrize(
    ("kind", "metadata", "message"),
    [
        (BOTTLENECK, {"adapter_type": '"houlsby"'}, "metadata is damaged"),
        (BOTTLENECK, {"adapter_type": '"houlsby"', "adapter_size": "0"}, "adapter_size 0"),
        (BOTTLENECK, {"adapter_type": "1", "adapter_size": "8"}, "adapter_type 1"),
        (BOTTLENECK, {"adapter_type": "houlsby", "adapter_size": "8"}, "metadata is damaged"),
        (BITFIT, {"biases": "{"}, "metadata is damaged"),
    ],
)
def test_damaged_metadata_is_refused(kind, metadata, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        kind.metadata.from_metadata(metadata, tmp_path / "x.safetensors")
    assert kind.metadata.from_metadata({"format": "pt"}, tmp_path) is None


# ---- AdapterHub's folders ----

# Parts of AdapterHub's names -> of this project's.
HUB_PARTS = {"adapter_down.0": "adapter_A", "adapter_up": "adapter_B"}
HUB_HEADS = {"1": "dense", "4": "out_proj"}


def hub_folder(folder, adapter, task="rte", flexible=True, changed=lambda tensors: tensors):
    """Writes a folder in AdapterHub's format with the tensors of a RoBERTa's adapter.

    Args:
        folder: where to write it.
        adapter: the adapter.
        task: the name that its adapters and its head have.
        flexible: the head is a sequence of numbered modules, not the model class's own.
        changed: changes the tensors before they are written.
    """
    inner, head = {}, {}
    for name, tensor in adapter.tensors.items():
        if name.startswith("classifier."):
            for number, module in HUB_HEADS.items() if flexible else ():
                name = name.replace(f"classifier.{module}", f"heads.{task}.{number}")
            head[name] = tensor
            continue
        for theirs, ours in HUB_PARTS.items():
            name = name.replace(f".adapter.{ours}.", f".adapters.{task}.{theirs}.")
        inner[name] = tensor
    folder.mkdir()
    torch.save(changed(inner), folder / "pytorch_adapter.bin")
    torch.save(changed(head), folder / "pytorch_model_head.bin")
    return folder


@pytest.fixture
def randomized(build_adapted):
    """Makes a RoBERTa with random adapters and biases, and the same model untrained."""

    def make(name):
        trained, fresh = build_adapted("roberta", [name]), build_adapted("roberta", [name])
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in trained.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.2)
        return trained, fresh

    return make


@pytest.mark.parametrize("flexible", [True, False])
@pytest.mark.parametrize("name", ["houlsby", "pfeiffer"])
@pytest.mark.parametrize("task", ["rte", "sst-2"])
def test_a_folder_of_adapterhub_s_is_read(randomized, batch, tmp_path, name, flexible, task):
    trained, fresh = randomized(name)
    folder = hub_folder(tmp_path / "a", trained.adapter(BOTTLENECK), task, flexible)
    assert not torch.allclose(trained(**batch).logits, fresh(**batch).logits, atol=1e-2)
    for source in (folder, folder / "pytorch_adapter.bin"):
        adapter = read_adapter(source, BOTTLENECK)
        assert (adapter.format, adapter.metadata) == ("hub", None)
        for key, tensor in trained.adapter(BOTTLENECK).tensors.items():
            assert torch.equal(adapter.tensors.pop(key), tensor)
        assert adapter.tensors == {}
    fresh.load_adapters([read_adapter(folder, BOTTLENECK)])
    assert torch.equal(trained(**batch).logits, fresh(**batch).logits)


FIRST = "roberta.encoder.layer.0.output"


def renamed(old, new):
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def with_tensor(like, name):
    """Adds a tensor to the file that has `like`."""
    return lambda tensors: tensors | ({name: tensors[like]} if like in tensors else {})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            with_tensor(
                f"{FIRST}.adapters.rte.adapter_up.bias", f"{FIRST}.adapters.qnli.adapter_up.bias"
            ),
            "a: holds adapters or heads of several tasks, qnli, rte",
        ),
        (
            renamed("heads.rte", "heads.mnli"),
            "heads of several tasks, mnli, rte",
        ),
        (
            with_tensor(
                f"{FIRST}.adapters.rte.adapter_up.bias", f"{FIRST}.adapters.adapter_up.bias"
            ),
            f"a: holds {FIRST}.adapter.adapter_B.bias under two names",
        ),
        (
            with_tensor("heads.rte.4.bias", "classifier.out_proj.bias"),
            "a: holds classifier.out_proj.bias under two names",
        ),
        (
            with_tensor(
                f"{FIRST}.adapters.rte.adapter_up.bias", f"{FIRST}.adapters.rte.adapter_norm.bias"
            ),
            r"pytorch_adapter.bin: holds \S+adapter_norm.bias, which is not a known tensor of",
        ),
        (
            with_tensor("heads.rte.4.bias", "heads.rte.7.bias"),
            "pytorch_model_head.bin: holds heads.rte.7.bias, which is not a known tensor of the",
        ),
        (
            with_tensor("heads.rte.4.bias", "roberta.embeddings.LayerNorm.bias"),
            "pytorch_model_head.bin: holds roberta.embeddings.LayerNorm.bias, which is not",
        ),
    ],
)
def test_bad_folders_of_adapterhub_s_are_refused(randomized, tmp_path, changed, message):
    adapter = randomized("houlsby")[0].adapter(BOTTLENECK)
    folder = hub_folder(tmp_path / "a", adapter, changed=changed)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_adapter(folder, BOTTLENECK)
    assert "\n" not in str(caught.value)


def test_a_folder_of_adapterhub_s_with_missing_or_additional_files_is_refused(randomized, tmp_path):
    adapter = randomized("pfeiffer")[0].adapter(BOTTLENECK)
    folder = hub_folder(tmp_path / "a", adapter)
    (folder / "pytorch_model_head.bin").rename(tmp_path / "head")
    with pytest.raises(CheckpointError, match=r"a: pytorch_model_head.bin is missing"):
        read_adapter(folder, BOTTLENECK)
    (tmp_path / "head").rename(folder / "pytorch_model_head.bin")
    # If this project has written to the folder as well, it is unclear which adapter is meant.
    write_adapter(folder / "pytorch_model_adapter.bin", adapter)
    with pytest.raises(CheckpointError, match=r"holds two adapters, \S+ and AdapterHub"):
        read_adapter(folder, BOTTLENECK)
    (folder / "pytorch_model_adapter.bin").unlink()
    (folder / "pytorch_adapter.bin").unlink()
    with pytest.raises(CheckpointError, match=r"holds no adapter: none of .*pytorch_adapter.bin"):
        read_adapter(folder, BOTTLENECK)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapter_size": 6}, "adapter_size 5, not 6"),
        ({"adapter_type": "houlsby"}, "another --adapter_type"),
        ({"hidden_size": 16}, "a base of another size"),
        ({"num_hidden_layers": 3}, "lacks 4 tensors: .*layer.2."),
    ],
)
def test_a_folder_of_adapterhub_s_that_does_not_fit_the_model_is_refused(
    build_adapted, randomized, tmp_path, settings, message
):
    folder = hub_folder(tmp_path / "a", randomized("pfeiffer")[0].adapter(BOTTLENECK))
    model = build_adapted("roberta", ["pfeiffer"], **settings)
    refuses(model, [read_adapter(folder, BOTTLENECK)], message)


# ---- whole checkpoints ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", [("houlsby",), ("lora", "pfeiffer"), ("bitfit",)], ids="+".join)
def test_a_whole_checkpoint_is_read_as_it_was_trained(
    build_adapted, batch, tmp_path, family, names
):
    model = build_adapted(family, names)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.adapted_by == model.adapted_by
    close(again(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"adapter_size": 6}, "was trained with adapter_size 5, not 6"),
        ({"adapter_type": "pfeiffer"}, "was trained with adapter_type houlsby, not pfeiffer"),
        ({"apply_adapter": False}, "was trained with apply_adapter True, not False"),
    ],
)
def test_other_settings_than_the_checkpoint_s_are_refused(build_adapted, tmp_path, asked, message):
    build_adapted("roberta", ["houlsby"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        RobertaForSequenceClassification.from_pretrained(tmp_path, **asked)
    config = RobertaConfig.from_pretrained(tmp_path)
    for name, value in asked.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        RobertaForSequenceClassification.from_pretrained(tmp_path, config)


def test_missing_and_unexpected_adapters_in_a_checkpoint_are_refused(build_adapted, tmp_path):
    model = build_adapted("roberta", ["houlsby"])
    plain = build_adapted("roberta")
    state = model.state_dict()
    message = r"adapter weights that .* no place for.*: build it with apply_adapter and"
    with pytest.raises(CheckpointError, match=message) as caught, adding_ways_out(WAYS_OUT):
        plain.load_checkpoint(state, "here")
    assert str(caught.value).endswith("adapter_type and adapter_size (--apply_adapter)")
    del state["roberta.encoder.layer.1.output.adapter.adapter_B.bias"]
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor: .*1.output.adapter\S+_B.bias"):
        model.load_checkpoint(state, "here")
    plain.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="sets apply_adapter, but it has no"):
        RobertaForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapter_type": "bottleneck"}, "unknown adapter_type 'bottleneck' .*houlsby, pfeiffer"),
        ({"adapter_size": 0}, "adapter_size must be a positive integer, not 0"),
        ({"adapter_size": True}, "adapter_size must be"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RobertaConfig(apply_adapter=True, **settings)


def test_a_model_has_no_adapter_of_a_kind_that_it_was_built_without(build_adapted):
    for kind, message in ((LORA, "no LoRA layers"), (BOTTLENECK, "apply_adapter"), (BITFIT, "Bit")):
        with pytest.raises(ValueError, match=message):
            build_adapted("roberta").adapter(kind)


# ---- flags that fit a file ----


@pytest.mark.parametrize(
    ("what", "theirs", "module", "given", "resumed"),
    [
        (
            "rank",
            4,
            "",
            "--lora_r 4, or leave it out: the file records it",
            "give --lora_r 4 as when",
        ),
        (
            "variant",
            "lora",
            "",
            "--lora_variant lora, or leave",
            "give --lora_variant lora as when",
        ),
        (
            "rank",
            4,
            "roberta.a",
            "leave --lora_r, --lora_rank_pattern and --lora_alpha_pattern out: the file records",
            "give the same --lora_r, --lora_rank_pattern and --lora_alpha_pattern as when the run",
        ),
        (
            "targets",
            ("a", "b"),
            "",
            "--lora_targets a b, or leave it out",
            "give --lora_targets a b as",
        ),
        (
            "targets",
            tuple(f"roberta.encoder.layer.{n}.query" for n in range(12)),
            "",
            "leave --lora_targets out: the file records it",
            "give the same --lora_targets as when the run began, or give another --output_dir",
        ),
        ("head", "masked_lm", "", "", ""),
    ],
)
def test_errors_name_the_flags_that_fit_a_file(what, theirs, module, given, resumed):
    error = SettingsError("a file", what, theirs, 2, module)
    assert fitting_flag(error).startswith(given)
    assert bool(given) == bool(fitting_flag(error))
    assert fitting_flag(error, is_resumed=True).startswith(resumed)
    assert len(fitting_flag(error, is_resumed=True)) < 130
