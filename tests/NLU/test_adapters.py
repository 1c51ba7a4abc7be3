"""Bottleneck adapters and BitFit: the formulas, what trains, and their files."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from compare import assert_close_to_rounding
from encoder_options import ENCODER_TERMS

from loralib.adapters.adapter import LORA
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.errors import CheckpointError
from loralib.io.tensors import read_tensors
from loralib.training.precision import Precision, hold_frozen_in
from transformers import (
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)
from transformers.adapter_kinds import BITFIT, BOTTLENECK, KINDS

FAMILIES = ("roberta", "deberta")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ADAPTED = {
    "lora": {"apply_lora": True, "lora_r": 2, "lora_alpha": 6},
    "houlsby": {"apply_adapter": True, "adapter_type": "houlsby", "adapter_size": 5},
    "pfeiffer": {"apply_adapter": True, "adapter_type": "pfeiffer", "adapter_size": 5},
    "bitfit": {"apply_bitfit": True},
}
# Each alone, each pair, all three; with either type of adapter.
CROSS = [
    names
    for size in (1, 2, 3)
    for names in itertools.combinations(ADAPTED, size)
    if not {"houlsby", "pfeiffer"} <= set(names)
]


def settings_of(names):
    return {key: value for name in names for key, value in ADAPTED[name].items()}


@pytest.fixture
def build(make_classifier):
    """A classifier of three classes that is adapted in these ways, and frozen accordingly."""

    def make(family, names=(), **settings):
        settings = {"num_labels": 3, "pad_token_id": 1, **settings_of(names), **settings}
        model = make_classifier(family, **settings)
        if model.adapted_by:
            model.train_only(kind.part for kind in model.adapted_by)
        return model

    return make


def close(ours, theirs, terms=ENCODER_TERMS):
    assert_close_to_rounding(ours, theirs, terms)


# ---- the formulas ----


def plain_output(layer, adapter, drop):
    """What a sub-layer's output computes, from its weights: (computed, residual) -> hidden."""

    def norm(x):
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + eps).sqrt()
        return x * layer.LayerNorm.weight + layer.LayerNorm.bias

    def bottleneck(x, activation):
        inner = activation(x @ adapter.adapter_A.weight.T + adapter.adapter_A.bias)
        return inner @ adapter.adapter_B.weight.T + adapter.adapter_B.bias

    def compute(computed, residual):
        h = drop(computed @ layer.dense.weight.T + layer.dense.bias)
        if adapter is None:
            return norm(h + residual)
        if not adapter.sees_residual:
            return norm(h + bottleneck(h, lambda x: x * x.sigmoid()) + residual)
        y = bottleneck(norm(h + residual), lambda x: x.clamp(min=0)) + h
        return norm(y + residual)

    eps = layer.LayerNorm.eps
    return compute


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["houlsby", "pfeiffer"])
def test_logits_and_gradients_of_the_plain_formulas(build, batch, family, name, monkeypatch):
    model, plain = (build(family, [name], **NO_DROPOUT).train() for _ in "12")
    adapters = 0
    for layer in plain.base_model.encoder.layer:
        for part in (layer.attention.output, layer.output):
            adapters += part.adapter is not None
            formula = plain_output(part, part.adapter, lambda x: x)
            monkeypatch.setattr(part, "forward", formula)
    assert adapters == (4 if name == "houlsby" else 2)
    outputs = [each(**batch) for each in (model, plain)]
    for output in outputs:
        output.loss.backward()
    close(outputs[0].logits, outputs[1].logits)
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None)
        if parameter.grad is not None:
            close(parameter.grad, expected.grad, 2 * ENCODER_TERMS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["houlsby", "pfeiffer"])
def test_an_adapter_comes_after_the_dropout(build, family, name, drawn_masks):
    layer = build(family, [name]).train().base_model.encoder.layer[1].output
    computed, residual = torch.randn(6, 48), torch.randn(6, 32)
    ours = layer(computed, residual)
    (mask,) = drawn_masks
    assert 0 < (mask == 0).double().mean() < 0.5
    close(ours, plain_output(layer, layer.adapter, lambda x: x * mask)(computed, residual))


def drawn(family, **settings):
    """A model as its class draws it."""
    torch.manual_seed(3)
    shape = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    classes = {
        "roberta": (RobertaConfig, RobertaForSequenceClassification),
        "deberta": (DebertaV2Config, DebertaV2ForSequenceClassification),
    }
    config_type, model_type = classes[family]
    return model_type(config_type(**shape, intermediate_size=48, num_labels=3, **settings)).eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["houlsby", "pfeiffer"])
def test_a_fresh_adapter_is_the_identity(family, name, batch, tmp_path):
    base = drawn(family)
    base.base_model.save_pretrained(tmp_path)
    # Drawn with the model, and drawn beside weights that are read.
    new = drawn(family, **ADAPTED[name])
    read = type(base).from_pretrained(tmp_path, num_labels=3, **ADAPTED[name])
    for model in (new, read):
        downs = [p for n, p in model.named_parameters() if "adapter.adapter_A.weight" in n]
        assert len(downs) == (4 if name == "houlsby" else 2)
        assert all(0.015 < down.std() < 0.025 for down in downs)
        missing = model.load_state_dict(base.state_dict(), strict=False).missing_keys
        assert missing
        assert all(".adapter." in key for key in missing)
        close(model(**batch).logits, base(**batch).logits)


# ---- what trains ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", CROSS, ids="+".join)
def test_what_trains(build, batch, family, names):
    """The head; inside the backbone, names with lora, adapter or bias; and all of it learns."""
    model = build(family, names).train()
    parts = {"lora": "lora", "bitfit": "bias", "houlsby": "adapter", "pfeiffer": "adapter"}
    wanted = [parts[name] for name in names]
    expected = {
        name
        for name, _ in model.named_parameters()
        if not name.startswith(f"{family}.") or any(part in name for part in wanted)
    }
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == expected
    head = {name for name in trained if not name.startswith(f"{family}.")}
    assert len(head) == 4
    assert len(trained) > len(head)
    model(**batch).loss.backward()
    # Without one for each of them, several processes could not train together.
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == trained


@pytest.mark.parametrize("family", FAMILIES)
def test_bitfit_leaves_out_what_has_no_bias_in_its_name(build, family):
    model = build(family, ["bitfit"])
    inside = {n for n, p in model.base_model.named_parameters() if p.requires_grad}
    assert "embeddings.LayerNorm.bias" in inside
    assert "encoder.layer.1.intermediate.dense.bias" in inside
    assert inside == {n for n, _ in model.base_model.named_parameters() if n.endswith("bias")}


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_switch_everything_trains(build, batch, family):
    model = build(family).train()
    assert model.adapted_by == ()
    model(**batch).loss.backward()
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())


LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
XXLARGE = {
    "num_hidden_layers": 48,
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "position_buckets": 256,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "conv_kernel_size": 3,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "shape", "settings", "expected", "published"),
    [
        ("roberta", {}, {"lora_r": 8, "lora_alpha": 16}, 294_912, "0.3M"),
        ("roberta", LARGE, {"lora_r": 8, "lora_alpha": 16}, 786_432, "0.8M"),
        ("deberta", XXLARGE, {"lora_r": 16, "lora_alpha": 32}, 4_718_592, "4.7M"),
        # The recipes: two adapters of 2 · 1024 · 8 + 8 + 1024 values a layer, and one of 16 wide.
        ("roberta", LARGE, {"adapter_type": "houlsby", "adapter_size": 8}, 835_968, "0.8M"),
        ("roberta", LARGE, {"adapter_type": "pfeiffer", "adapter_size": 16}, 811_392, "0.8M"),
        # RoBERTa-base: nine biases a layer, of 768 but for one of 3072, and the embeddings' norm.
        ("roberta", {}, {"apply_bitfit": True}, 12 * (8 * 768 - 768 + 3072) + 768, "0.1M"),
    ],
)
def test_published_sizes(model_type, shape, settings, expected, published):
    switch = {"lora_r": "apply_lora", "adapter_size": "apply_adapter"}
    settings = {**settings, **{switch[name]: True for name in settings if name in switch}}
    with torch.device("meta"):
        if model_type == "roberta":
            model = RobertaForSequenceClassification(RobertaConfig(**shape, **settings))
        else:
            model = DebertaV2ForSequenceClassification(DebertaV2Config(**shape, **settings))
    model.train_only(kind.part for kind in model.adapted_by)
    count = sum(p.numel() for p in model.base_model.parameters() if p.requires_grad)
    assert count == expected
    assert f"{count / 1e6:.1f}M" == published


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", [("houlsby",), ("pfeiffer", "lora"), ("bitfit", "houlsby")])
def test_frozen_weights_in_bfloat16(build, batch, family, names):
    model = build(family, names, **NO_DROPOUT).train()
    expected = model(**batch)
    hold_frozen_in(model, torch.bfloat16)
    precision = Precision(torch.bfloat16, "cpu")
    with precision.autocast():
        output = model(**batch)
    error = (output.logits - expected.logits).abs().max()
    assert 0 < error < 0.15
    precision.backward(output.loss)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or parameter.grad.dtype == torch.float32


# ---- files ----


def expected_names(model, kind):
    """Names of a file's tensors by the rule: those of its kind, and the head's."""
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
def test_files_bring_a_model_back(build, batch, tmp_path, family, names, format):
    trained = build(family, names)
    fresh = build(family, names)
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


def test_what_the_files_say(build, tmp_path):
    model = build("roberta", ["lora", "pfeiffer", "bitfit"], finetuning_task="mnli")
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
            "task": "mnli",
            "labels": ["LABEL_0", "LABEL_1", "LABEL_2"],
            "trained_with": [switch for switch in switches if switch != kind.switch],
        }
        info = read_adapter(tmp_path / "x.safetensors", kind).metadata
        assert info == model.adapter(kind).metadata


def test_a_folder_is_asked_for_each_kind(build, tmp_path):
    model = build("deberta", ["lora", "houlsby"])
    for kind in (LORA, BOTTLENECK):
        for name in kind.files:
            write_adapter(tmp_path / name, model.adapter(kind))
    for kind in (LORA, BOTTLENECK):
        loaded = read_adapter(tmp_path, kind)
        assert loaded.kind is kind
        assert loaded.metadata == model.adapter(kind).metadata
        # The .bin says nothing; the file beside it does.
        assert read_adapter(tmp_path / kind.files[1], kind).metadata == loaded.metadata
    with pytest.raises(CheckpointError, match="holds no adapter: none of pytorch_model_bitfit"):
        read_adapter(tmp_path, BITFIT)


def refuses(model, adapters, message):
    """`load_adapters` raises one line, and the model stays as it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        model.load_adapters(adapters)
    assert "\n" not in str(caught.value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("said", [True, False], ids=["info", "no info"])
@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("houlsby", {"adapter_size": 6}, "adapter_size 5, .*built with 6"),
        ("houlsby", {"adapter_type": "pfeiffer"}, "adapter_type houlsby, .*built with pfeiffer"),
        ("pfeiffer", {"adapter_type": "houlsby"}, "adapter_type pfeiffer, .*built with houlsby"),
        ("houlsby", {"hidden_size": 16}, "16"),
        ("houlsby", {"num_hidden_layers": 1}, "has, unknown to the model, 8 tensors: .*layer.1."),
        ("houlsby", {"num_hidden_layers": 3}, "lacks 8 tensors: .*layer.2."),
        (
            "houlsby",
            {"apply_adapter": False},
            "no adapter layers to take it: build it",
        ),
        ("houlsby", {"num_labels": 2}, r"\(3.* in the file, \(2.* in the model"),
        ("bitfit", {"num_hidden_layers": 1}, "has, unknown to the model, "),
        ("bitfit", {"num_hidden_layers": 3}, "lacks "),
        ("bitfit", {"intermediate_size": 40}, r"dense.bias is \(48,\) in the file, \(40,\) in the"),
    ],
)
def test_models_that_a_file_does_not_fit(build, family, said, name, changed, message):
    adapter = build(family, [name]).adapter(BITFIT if name == "bitfit" else BOTTLENECK)
    if not said:
        adapter = replace(adapter, metadata=None)
        message = {
            "adapter_size 5, .*built with 6": r"adapter_A.\w+ is \(5.*in the file, \(6.*"
            "adapter_size 5, not 6",
            "adapter_type houlsby, .*built with pfeiffer": "behind attention.output, output of .*"
            "the model behind output: another --adapter_type",
            "adapter_type pfeiffer, .*built with houlsby": "behind output of .*"
            "the model behind attention.output, output: another --adapter_type",
        }.get(message, message)
    refuses(build(family, [name], **changed), [adapter], message)


def test_one_tensor_less_or_more(build):
    model = build("roberta", ["houlsby"])
    name = "roberta.encoder.layer.1.attention.output.adapter.adapter_B.weight"
    adapter = model.adapter(BOTTLENECK)
    tensors = dict(adapter.tensors)
    more = {**tensors, name.replace("1", "2"): tensors[name]}
    refuses(model, [replace(adapter, tensors=more)], f"1 tensors: {name.replace('1', '2')}")
    nan = {**tensors, name: tensors[name] * float("nan")}
    refuses(model, [replace(adapter, tensors=nan)], f"{name} holds values that are not finite")
    del tensors[name]
    refuses(model, [replace(adapter, tensors=tensors)], f"lacks 1 tensors: {name}")
    bias = "roberta.embeddings.LayerNorm.bias"
    model = build("roberta", ["bitfit"])
    less = dict(model.adapter(BITFIT).tensors)
    del less[bias]
    refuses(model, [replace(model.adapter(BITFIT), tensors=less)], f"lacks 1 tensors: {bias}")


@pytest.mark.parametrize("name", ["houlsby", "bitfit"])
def test_another_base(build, tmp_path, name):
    base = build("roberta")
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


def test_training_does_not_change_the_base_s_fingerprint(build, tmp_path):
    """Neither trained biases nor adapters count: a whole checkpoint still says its base."""
    build("roberta").save_pretrained(tmp_path / "base")
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
    # Trained on as a whole, it is a base of its own.
    off = RobertaConfig.from_pretrained(tmp_path / "trained", apply_bitfit=False)
    assert off.base_name_or_path == str(tmp_path / "base")
    build("roberta", ["bitfit"]).save_pretrained(tmp_path / "biases")
    off = RobertaConfig.from_pretrained(tmp_path / "biases", apply_bitfit=False)
    assert off.base_name_or_path == str(tmp_path / "biases")


def test_files_that_belong_together(build):
    model = build("roberta", ["lora", "bitfit"])
    lora, biases = model.adapter(LORA), model.adapter(BITFIT)
    refuses(model, [lora], "trained with apply_bitfit as well, .* give that too")
    refuses(model, [biases], "trained with apply_lora as well, .* give that too")
    other = {**biases.tensors, "classifier.dense.bias": biases.tensors["classifier.dense.bias"] + 1}
    message = "not of the same run as adapter: their classifier.dense.bias differ"
    refuses(model, [lora, replace(biases, tensors=other)], message)
    assert model.load_adapters([lora, biases]) == []
    # The release's format does not say what it was trained with.
    assert model.load_adapters([replace(lora, metadata=None)]) == []


def test_a_new_head_keeps_the_model_s_own(build):
    adapter = build("deberta", ["bitfit"]).adapter(BITFIT)
    model = build("deberta", ["bitfit"], num_labels=2)
    refuses(model, [adapter], r"classifier.\w+ is \(3")
    skipped = model.load_adapters([adapter], new_head=True)
    assert skipped == ["classifier.bias", "classifier.weight"]
    # A backbone's bias is never left out.
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
def test_a_file_of_another_kind(build, tmp_path, held, asked, message):
    model = build("roberta", [held])
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
def test_damaged_metadata(kind, metadata, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        kind.metadata.from_metadata(metadata, tmp_path / "x.safetensors")
    assert kind.metadata.from_metadata({"format": "pt"}, tmp_path) is None


# ---- AdapterHub's folders ----

# The rest of a name there -> what it is called here.
HUB_PARTS = {"adapter_down.0": "adapter_A", "adapter_up": "adapter_B"}
HUB_HEADS = {"1": "dense", "4": "out_proj"}


def hub_folder(folder, adapter, task="rte", flexible=True, changed=lambda tensors: tensors):
    """A folder as AdapterHub has them, of the tensors of a RoBERTa's adapter.

    Args:
        folder: where to.
        adapter: the adapter.
        task: what its adapters and its head are called after.
        flexible: the head is a sequence of numbered modules, not the model class's own.
        changed: what becomes of the tensors before they are written.
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
def randomized(build):
    """A RoBERTa with adapters of which nothing is zero, and the same model untrained."""

    def make(name):
        trained, fresh = build("roberta", [name]), build("roberta", [name])
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
def test_a_folder_of_adapterhub_s(randomized, batch, tmp_path, name, flexible, task):
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
            r"pytorch_adapter.bin: holds \S+adapter_norm.bias, which is not a tensor of bottleneck",
        ),
        (
            with_tensor("heads.rte.4.bias", "heads.rte.7.bias"),
            "pytorch_model_head.bin: holds heads.rte.7.bias, which is not a tensor of the head",
        ),
        (
            with_tensor("heads.rte.4.bias", "roberta.pooler.dense.bias"),
            "pytorch_model_head.bin: holds roberta.pooler.dense.bias, which is not",
        ),
    ],
)
def test_folders_of_adapterhub_s_that_are_none(randomized, tmp_path, changed, message):
    adapter = randomized("houlsby")[0].adapter(BOTTLENECK)
    folder = hub_folder(tmp_path / "a", adapter, changed=changed)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_adapter(folder, BOTTLENECK)
    assert "\n" not in str(caught.value)


def test_files_that_are_missing_from_adapterhub_s_folder(randomized, tmp_path):
    adapter = randomized("pfeiffer")[0].adapter(BOTTLENECK)
    folder = hub_folder(tmp_path / "a", adapter)
    (folder / "pytorch_model_head.bin").rename(tmp_path / "head")
    with pytest.raises(CheckpointError, match=r"a: pytorch_model_head.bin is missing"):
        read_adapter(folder, BOTTLENECK)
    (tmp_path / "head").rename(folder / "pytorch_model_head.bin")
    # A folder that this project has written to as well does not say which of the two is meant.
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
def test_models_that_a_folder_of_adapterhub_s_does_not_fit(
    build, randomized, tmp_path, settings, message
):
    folder = hub_folder(tmp_path / "a", randomized("pfeiffer")[0].adapter(BOTTLENECK))
    model = build("roberta", ["pfeiffer"], **settings)
    refuses(model, [read_adapter(folder, BOTTLENECK)], message)


# ---- whole checkpoints ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", [("houlsby",), ("lora", "pfeiffer"), ("bitfit",)], ids="+".join)
def test_a_whole_checkpoint_is_read_as_it_was_trained(build, batch, tmp_path, family, names):
    model = build(family, names)
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
def test_other_settings_than_the_checkpoint_s(build, tmp_path, asked, message):
    build("roberta", ["houlsby"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        RobertaForSequenceClassification.from_pretrained(tmp_path, **asked)
    config = RobertaConfig.from_pretrained(tmp_path)
    for name, value in asked.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        RobertaForSequenceClassification.from_pretrained(tmp_path, config)


def test_adapters_that_a_checkpoint_lost_or_should_not_have(build, tmp_path):
    model = build("roberta", ["houlsby"])
    plain = build("roberta")
    state = model.state_dict()
    with pytest.raises(CheckpointError, match=r"adapter weights that .* no place for.*--apply"):
        plain.load_checkpoint(state, "here")
    del state["roberta.encoder.layer.1.output.adapter.adapter_B.bias"]
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors: .*1.output.adapter\S+_B.bias"):
        model.load_checkpoint(state, "here")
    plain.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="says apply_adapter, its weights hold none"):
        RobertaForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapter_type": "bottleneck"}, "unknown adapter_type 'bottleneck' .*houlsby, pfeiffer"),
        ({"adapter_size": 0}, "adapter_size must be a positive integer, not 0"),
        ({"adapter_size": True}, "adapter_size must be"),
    ],
)
def test_settings_that_are_none(settings, message):
    with pytest.raises(ValueError, match=message):
        RobertaConfig(apply_adapter=True, **settings)


def test_a_model_without_a_kind_has_no_file_of_it(build):
    for kind, message in ((LORA, "no LoRA layers"), (BOTTLENECK, "apply_adapter"), (BITFIT, "Bit")):
        with pytest.raises(ValueError, match=message):
            build("roberta").adapter(kind)
