"""PEFT's adapters of RoBERTa and DeBERTa-v2: PEFT's logits, its files, and what is refused."""

import itertools
import json
import re
import shutil
from dataclasses import replace

import make_peft_fixture as maker
import pytest
import torch
from compare import assert_close_to_rounding, assert_same_bits
from encoder_options import ENCODER_TERMS
from safetensors.torch import load_file, save_file

from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.merging import merge_into
from loralib.adapters.metadata import LoraMetadata
from loralib.adapters.peft import CONFIG_NAME, PREFIX, WEIGHTS_NAMES
from loralib.errors import CheckpointError
from loralib.lora_layer import lora_layers
from transformers import AutoModelForSequenceClassification
from transformers.adaptation_settings import targets_of_modules

PEFT = maker.PeftFixture()
CASES = [case for case in maker.CASES if maker.family_of(case) != "gpt2"]
# Their ranks and alphas differ between modules.
PATTERNS = ["roberta_patterns", "roberta_rslora_patterns"]
# This project's models have LoRA in every layer.
EVERY_LAYER = [case for case in CASES if case != "roberta_one_layer"]
WEIGHTS = WEIGHTS_NAMES[0]


def close(ours, theirs):
    assert_close_to_rounding(ours, theirs, ENCODER_TERMS)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """The folders of the fixture's bases, by family."""
    root = tmp_path_factory.mktemp("bases")
    return {family: PEFT.write_base(root / family, family) for family in ("roberta", "deberta")}


@pytest.fixture(scope="module")
def backbones(bases, tmp_path_factory):
    """The same folders without heads, which are then newly initialized."""
    root = tmp_path_factory.mktemp("backbones")
    for family, base in bases.items():
        shutil.copytree(base, root / family)
        weights = root / family / "model.safetensors"
        tensors = load_file(weights)
        save_file({n: t for n, t in tensors.items() if n.startswith(family)}, weights)
    return {family: root / family for family in bases}


@pytest.fixture
def folder(tmp_path):
    """``folder(case, **changed)``: PEFT's own folder of a case, with these settings changed."""

    def write(case="roberta_query_value", **changed):
        return PEFT.write_adapter(tmp_path / "peft" / case, case, **changed)

    return write


def open_with_layers(base, adapter):
    """A model with the LoRA layers that an adapter is for."""
    return AutoModelForSequenceClassification.from_pretrained(
        base,
        apply_lora=True,
        lora_r=adapter.metadata.rank,
        lora_alpha=adapter.metadata.alpha,
        lora_targets=targets_of_modules(adapter.metadata.targets),
        lora_variant=adapter.metadata.variant or "lora",
        lora_rank_pattern=adapter.metadata.rank_pattern,
        lora_alpha_pattern=adapter.metadata.alpha_pattern,
        **(
            {}
            if adapter.metadata.positions is None
            else {"lora_positions": adapter.metadata.positions}
        ),
    )


@pytest.fixture
def with_layers(bases):
    """``with_layers(case, adapter)``: a model with LoRA layers that the adapter was loaded into."""

    def load(case, adapter):
        model = open_with_layers(bases[maker.family_of(case)], adapter)
        assert model.load_adapters([adapter]) == []
        return model

    return load


@pytest.fixture
def merged_base(bases):
    """``merged_base(case, adapter)``: a plain model into which the adapter was merged."""

    def load(case, adapter):
        model = AutoModelForSequenceClassification.from_pretrained(bases[maker.family_of(case)])
        merge_into(model, adapter)
        return model

    return load


@pytest.fixture
def refusal():
    """``refusal(path, **settings)``: the one line with which an adapter is refused."""

    def read(path, **settings):
        with pytest.raises(CheckpointError) as caught:
            read_adapter(path, **settings)
        message = str(caught.value)
        assert "\n" not in message
        assert message.startswith(str(path if path.is_dir() else path.parent))
        return message

    return read


def logits_of(model):
    """A model's logits, after a check that they are the same with and without gradients."""
    with torch.no_grad():
        merged = model(input_ids=PEFT.ids, attention_mask=PEFT.mask).logits
    close(model(input_ids=PEFT.ids, attention_mask=PEFT.mask).logits, merged)
    return merged


# ---- reading: PEFT's logits ----


@pytest.mark.parametrize("case", EVERY_LAYER)
def test_layers_give_pefts_logits(folder, with_layers, case):
    model = with_layers(case, read_adapter(folder(case)))
    assert len(lora_layers(model)) == (12 if case == "roberta_all_targets" else 4)
    close(logits_of(model), PEFT.logits(case))


@pytest.mark.parametrize("case", CASES)
def test_merging_gives_pefts_logits(folder, merged_base, case):
    model = merged_base(case, read_adapter(folder(case)))
    assert not lora_layers(model)
    close(logits_of(model), PEFT.logits(case))


@pytest.mark.parametrize("case", CASES)
def test_wrong_adapters_do_not_give_pefts_logits(folder, merged_base, bases, case):
    """The base's logits differ, and so do those with twice the alpha, or with layers exchanged."""
    theirs = PEFT.logits(case)
    base = AutoModelForSequenceClassification.from_pretrained(bases[maker.family_of(case)])
    assert (logits_of(base) - theirs).abs().max() > 0.1
    adapter = read_adapter(folder(case))
    alphas = {name: 2 * alpha for name, alpha in (adapter.metadata.alpha_pattern or {}).items()}
    twice = replace(adapter.metadata, alpha=2 * adapter.metadata.alpha, alpha_pattern=alphas)
    doubled = replace(adapter, metadata=twice)
    assert (logits_of(merged_base(case, doubled)) - theirs).abs().max() > 0.1
    tensors = dict(adapter.tensors)
    names = [n for n in tensors if re.search(r"(query|value)(_proj)?\.lora_B", n)]
    pairs = itertools.combinations(names, 2)
    first, second = next(pair for pair in pairs if len({tensors[n].shape for n in pair}) == 1)
    tensors[first], tensors[second] = tensors[second], tensors[first]
    exchanged = replace(adapter, tensors=tensors)
    assert (logits_of(merged_base(case, exchanged)) - theirs).abs().max() > 0.01


def test_metadata_from_pefts_settings(folder):
    case = "roberta_query_value"
    metadata = read_adapter(
        folder(case, base_model_name_or_path="some/base", revision="v2")
    ).metadata
    assert metadata == LoraMetadata(
        rank=4,
        alpha=10,
        targets=("query", "value"),
        dropout=0.1,
        base="some/base",
        base_revision="v2",
        head="sequence_classification",
    )
    info = read_adapter(folder("roberta_bias_all", lora_dropout=0)).metadata
    assert (info.dropout, info.base_revision, info.bias) == (None, None, "all")
    assert read_adapter(folder("roberta_bias_lora_only")).metadata.bias == "lora_only"


def test_ranks_and_alphas_by_module(folder):
    """As in PEFT, the first pattern that fits a module counts."""
    metadata = read_adapter(folder("roberta_patterns")).metadata
    layer = "roberta.encoder.layer.{}.attention.self.{}"
    own = {(0, "query"): (10, 2), (0, "value"): (3, 5), (1, "query"): (5, 4), (1, "value"): (7, 5)}
    for place, strength in own.items():
        name = layer.format(*place)
        assert (metadata.alpha_of(name), metadata.rank_of(name)) == strength
    assert metadata.variant is None
    assert read_adapter(folder("roberta_rslora_patterns")).metadata.variant == "rslora"


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        (r"layer\.0\..*", {0}),
        (r".*\.1\..*query|value", {1}),  # and every value, which this test does not look at
        ("query", {0, 1}),
        (r"encoder.layer.[01].attention.self.query", {0, 1}),
        ("uery", set()),
        (r"^encoder.*query", set()),
        (r"quer", set()),
    ],
)
def test_a_pattern_is_an_expression_for_the_end_of_a_name(folder, pattern, layers):
    metadata = read_adapter(folder(alpha_pattern={pattern: 3})).metadata
    found = {
        layer
        for layer in (0, 1)
        if metadata.alpha_of(f"roberta.encoder.layer.{layer}.attention.self.query") == 3
    }
    assert found == layers


@pytest.mark.parametrize("case", ["roberta_query_value", "deberta_query_value"])
def test_a_head_that_only_the_adapter_has_is_loaded(folder, backbones, case):
    adapter = read_adapter(folder(case))
    model = open_with_layers(backbones[maker.family_of(case)], adapter)
    assert model.load_adapters([adapter]) == []
    close(logits_of(model), PEFT.logits(case))


def refused(model, adapter):
    """The one-line message with which a model, left unchanged, refuses an adapter."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        model.load_adapters([adapter])
    message = str(caught.value)
    assert "\n" not in message
    assert_same_bits(model.state_dict(), before)
    return message


def test_a_pooler_that_neither_file_has_is_refused(folder, backbones):
    adapter = read_adapter(folder("deberta_no_pooler"))
    message = refused(open_with_layers(backbones["deberta"], adapter), adapter)
    assert message.endswith("lacks 2 tensors: pooler.dense.bias, pooler.dense.weight")


def test_layers_that_the_adapter_does_not_have_are_refused(folder, bases):
    adapter = read_adapter(folder("roberta_one_layer"))
    message = refused(open_with_layers(bases["roberta"], adapter), adapter)
    assert "lacks 4 tensors: roberta.encoder.layer.0.attention.self.query.lora_A, " in message


# ---- writing: PEFT's files ----


def adapted_modules(tensors):
    return {
        name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors if ".lora_" in name
    }


def modules_that(config, names):
    """PEFT's rule: target_modules are modules' names, or ends of them; none are in a head."""
    heads, wanted = set(config["modules_to_save"] or ()), config["target_modules"]
    ends = tuple(f".{name}" for name in wanted)
    layers = config.get("layers_to_transform")

    def is_adapted(name):
        index = re.search(r"\.layer\.(\d+)\.", name)
        is_in_layers = layers is None or (index and int(index[1]) in layers)
        in_head = heads & set(name.split("."))
        return name in wanted or (name.endswith(ends) and is_in_layers and not in_head)

    return {name for name in names if is_adapted(name)}


def pefts_own_copies(name):
    """Whether a name is that of a copy of a head's bias, which PEFT writes if bias is "all"."""
    return ".original_module." in name or ".modules_to_save." in name


def by_module(config, setting, modules):
    """PEFT's rule: the first pattern that fits the end of a name, after a dot, counts."""
    patterns = config[{"r": "rank_pattern", "lora_alpha": "alpha_pattern"}[setting]].items()
    return {
        name: next(
            (value for key, value in patterns if re.match(rf"(.*\.)?({key})$", name)),
            config[setting],
        )
        for name in modules
    }


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_written_as_peft_wrote_it(folder, tmp_path, case):
    theirs, path = PEFT.config(case), tmp_path / "out"
    write_adapter(path, read_adapter(folder(case)), "peft")
    assert {file.name for file in path.iterdir()} == {CONFIG_NAME, WEIGHTS}
    expected = {n: t for n, t in PEFT.tensors(case).items() if not pefts_own_copies(n)}
    assert_same_bits(load_file(path / WEIGHTS), expected)

    ours = json.loads((path / CONFIG_NAME).read_text())
    equal = ("peft_type", "task_type", "lora_dropout", "bias", "fan_in_fan_out")
    for name in (*equal, "base_model_name_or_path", "revision"):
        assert ours[name] == theirs[name], name
    for name in ("use_rslora", "use_dora"):
        assert ours.get(name, False) == theirs[name], name
    modules = adapted_modules(expected)
    for name in ("r", "lora_alpha"):
        assert by_module(ours, name, modules) == by_module(theirs, name, modules)
        if case not in PATTERNS:
            assert ours[name] == theirs[name]
    if case not in ("roberta_all_targets", "roberta_one_layer"):  # their names are longer here
        assert set(ours["target_modules"]) == set(theirs["target_modules"])
    head = {name for name in expected if "lora_" not in name and name.endswith("weight")}
    assert set(ours["modules_to_save"]) <= set(theirs["modules_to_save"])
    saved = tuple(f"{PREFIX}{name}." for name in ours["modules_to_save"])
    assert head == {name for name in head if name.startswith(saved)}


@pytest.mark.parametrize("case", CASES)
def test_written_settings_name_the_adapted_modules(folder, tmp_path, bases, case):
    write_adapter(tmp_path / "out", read_adapter(folder(case)), "peft")
    ours = json.loads((tmp_path / "out" / CONFIG_NAME).read_text())
    base = AutoModelForSequenceClassification.from_pretrained(bases[maker.family_of(case)])
    names = [name for name, _ in base.named_modules()]
    assert modules_that(PEFT.config(case), names) == adapted_modules(PEFT.tensors(case))
    assert modules_that(ours, names) == adapted_modules(PEFT.tensors(case))


@pytest.mark.parametrize("case", CASES)
def test_conversions_through_all_formats_are_bit_exact(folder, tmp_path, case):
    first = read_adapter(folder(case))
    write_adapter(tmp_path / "1.safetensors", first)
    lora = read_adapter(tmp_path / "1.safetensors")
    assert (lora.format, lora.metadata) == ("lora", first.metadata)
    release, metadata = lora, first.metadata
    by_module = metadata.rank_pattern or metadata.alpha_pattern
    # Other adapters would compute something else in the release's format.
    if metadata.positions is None and metadata.variant is None and not by_module:
        write_adapter(tmp_path / "2.bin", lora)
        assert read_adapter(tmp_path / "2.bin").metadata is None
        release = read_adapter(tmp_path / "2.bin", lora_alpha=first.metadata.alpha)
        assert release.format == "release"
    write_adapter(tmp_path / "3", release, "peft")
    peft = read_adapter(tmp_path / "3")
    write_adapter(tmp_path / "4.safetensors", peft)
    last = read_adapter(tmp_path / "4.safetensors")
    for adapter in (lora, release, peft, last):
        assert_same_bits(adapter.tensors, first.tensors)
    # The release's format does not hold the rest.
    for name in ("rank", "alpha", "rank_pattern", "alpha_pattern", "variant", "targets", "bias"):
        assert getattr(last.metadata, name) == getattr(first.metadata, name)


def test_pefts_folder_keeps_all_metadata(folder, tmp_path):
    adapter = read_adapter(folder(base_model_name_or_path="a/base", revision="v1"))
    info = replace(
        adapter.metadata, task="mnli", labels=("a", "b", "c"), base_fingerprint="0123456789abcdef"
    )
    remarks = write_adapter(tmp_path / "out", replace(adapter, metadata=info), "peft")
    assert remarks == ["in the metadata, where PEFT does not look: base_fingerprint, task, labels"]
    assert read_adapter(tmp_path / "out").metadata == info
    path = tmp_path / "out" / CONFIG_NAME
    path.write_text(path.read_text().replace('"lora_alpha": 10', '"lora_alpha": 20'))
    with pytest.raises(CheckpointError, match=r"was written with alpha 10, but .* now says 20$"):
        read_adapter(tmp_path / "out")


# ---- what is refused ----


@pytest.mark.parametrize(
    "changed",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "mica"},
        {"init_lora_weights": "orthogonal"},  # here it needs an even rank; PEFT's embeddings do not
        {"init_lora_weights": False},
        {"layers_to_transform": [0, 1]},
        {"from_the_future": None},
        {"inference_mode": False},
        {"peft_version": "9.9"},
    ],
    ids=json.dumps,
)
def test_settings_without_effect_are_accepted(folder, merged_base, changed):
    case = "roberta_query_value"
    adapter = read_adapter(folder(case, **changed))
    assert adapter.metadata.initialization is None
    close(logits_of(merged_base(case, adapter)), PEFT.logits(case))


def test_missing_and_renamed_files_are_refused(folder, refusal):
    path = folder()
    (path / CONFIG_NAME).rename(path / "other.json")
    assert refusal(path / WEIGHTS).endswith("PEFT's adapter_config.json is missing next to it")
    assert "holds no adapter: none of " in refusal(path)
    (path / "other.json").rename(path / CONFIG_NAME)
    (path / WEIGHTS).rename(path / "renamed.safetensors")
    for given in (path, path / CONFIG_NAME):
        message = refusal(given)
        assert "adapter_model.safetensors or adapter_model.bin is missing next to it" in message
    assert "holds weights of PEFT, but is not called" in refusal(path / "renamed.safetensors")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("PROMPT_TUNING", "peft_type is 'PROMPT_TUNING'"),
        (None, "not PEFT's settings (no peft_type)"),
    ],
)
def test_settings_tell_another_kind_before_weights_are_read(folder, refusal, kind, message):
    path = folder(peft_type=kind)
    save_file({"prompt_embeddings": torch.ones(4, 32)}, path / WEIGHTS)
    assert refusal(path).endswith(f"{CONFIG_NAME}: {message}")
    (path / WEIGHTS).rename(path / "adapters.safetensors")  # MLX's name
    assert refusal(path).endswith(f"{CONFIG_NAME}: {message}")


QUERY = f"{PREFIX}roberta.encoder.layer.0.attention.self.query"


def without(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{QUERY}.lora_B.weight"), "lacks roberta.encoder.layer.0.attention.self.query"),
        (
            put(f"{QUERY}.lora_B.weight", torch.ones(32, 3)),
            "do not belong together",
        ),
        (
            put(f"{QUERY}.lora_A.weight", torch.full((4, 32), float("nan"))),
            "holds values that are not finite",
        ),
        (put("query.lora_A.weight", torch.ones(4, 32)), "is not a name that PEFT gives"),
        (
            put(f"{PREFIX}classifier.modules_to_save.default.dense.bias", torch.ones(32)),
            "holds classifier.dense.bias under two names",
        ),
        (
            put(f"{QUERY}.lora_magnitude_vector", torch.ones(32)),
            "query.lora_magnitude_vector, which LoRA of the variant lora and the initialization",
        ),
        (
            put(f"{PREFIX}roberta.embeddings.word_embeddings.weight", torch.ones(48, 32)),
            "holds roberta.embeddings.word_embeddings.weight, a weight of the base",
        ),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if "lora_" in name],
            "none of its 4 tensors is LoRA's",
        ),
    ],
    ids=["half", "shapes", "nan", "name", "twice", "dora", "embedding", "head alone"],
)
def test_bad_tensors_are_refused(folder, refusal, change, message):
    path = folder()
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)
    assert message in refusal(path)
