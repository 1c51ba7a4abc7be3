"""Tests convert.py on heads that PEFT trained or untied, and on heads whose names are ambiguous."""

import json

import pytest
import torch
from conversions import (
    BATCH,
    ENCODERS,
    MODELS,
    assert_same_tensors,
    close,
    make_base,
    seed,
    write_as_peft,
)
from safetensors.torch import load_file

import transformers

# For each family's language model: the module that PEFT saves, its projection, and LoRA's module.
LM = {
    "roberta": ("lm_head", "lm_head.decoder", "roberta.encoder.layer.{}.attention.self.query"),
    "deberta": (
        *("cls", "cls.predictions.decoder"),
        "deberta.encoder.layer.{}.attention.self.query_proj",
    ),
}


def low_rank(module: str, width: int, out: int) -> dict[str, torch.Tensor]:
    """Returns an update under PEFT's names."""
    A, B = (torch.randn(*shape, generator=seed(3)) for shape in ((4, width), (out, 4)))
    return {f"{module}.lora_A.weight": A, f"{module}.lora_B.weight": B}


def trained_lm(tmp_path, family):
    """Writes PEFT's folder of a model with a trained head; returns base, tensors and logits."""
    head, decoder, query = LM[family]
    base = make_base(tmp_path / "base", family, head="lm")
    model = MODELS[family]["lm"].from_pretrained(base, tie_word_embeddings=False)
    state = model.state_dict()
    tensors = {
        name: torch.randn(tensor.shape, generator=seed(number)) / 4
        for number, (name, tensor) in enumerate(state.items())
        if name.startswith(f"{head}.")
    }
    # PEFT saves a bias with two names under both.
    tensors[f"{decoder}.bias"] = tensors[f"{decoder.removesuffix('.decoder')}.bias"]
    updated = dict(tensors)
    for layer in range(2):
        update = low_rank(query.format(layer), 16, 16)
        A, B = update.values()
        name = f"{query.format(layer)}.weight"
        updated[name] = state[name] + 10 / 4 * B @ A
        tensors |= update
    model.load_state_dict(updated, strict=False)
    with torch.no_grad():
        logits = model.eval()(**BATCH).logits
    targets = {"target_modules": [query.rpartition(".")[2]], "modules_to_save": [head]}
    write_as_peft(tmp_path / "in", tensors, **targets)
    return base, tensors, logits


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("through", [[], ["a.safetensors"], ["a.safetensors", "peft"], ["a.bin"]])
def test_a_trained_head_is_untied(convert, tmp_path, family, through):
    """In whatever formats the adapter is stored in between, the embedding stays the base's."""
    if family == "deberta" and through == ["a.bin"]:
        pytest.skip("PEFT's LoRA reaches positions, the release's does not")
    base, _, logits = trained_lm(tmp_path, family)
    source = tmp_path / "in"
    for target in through:
        given = ("--to", "peft") if target == "peft" else ()
        convert(source, tmp_path / target, *given)
        source = tmp_path / target
    alpha = ("--lora_alpha", 10) if source.suffix == ".bin" else ()
    convert(source, tmp_path / "out", "--to", "merged", "--base", base, *alpha)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in load_file(base / "model.safetensors").items():
        if "embeddings" in name:
            assert torch.equal(merged[name], tensor)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    model = MODELS[family]["lm"].from_pretrained(tmp_path / "out")
    with torch.no_grad():
        close(model.eval()(**BATCH).logits, logits)


@pytest.mark.parametrize("family", ENCODERS)
def test_a_trained_head_is_written_as_peft_has_it(convert, tmp_path, family):
    _, tensors, _ = trained_lm(tmp_path, family)
    convert(tmp_path / "in", tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "out", "--to", "peft")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert_same_tensors(written, {f"base_model.model.{name}": t for name, t in tensors.items()})


def test_an_update_of_the_embedding_unties_the_head(convert, tmp_path):
    base = make_base(tmp_path / "base", "roberta", head="lm")
    name = "roberta.embeddings.word_embeddings"
    A, B = torch.randn(4, 40, generator=seed(1)), torch.randn(16, 4, generator=seed(2))
    tensors = {f"{name}.lora_embedding_A": A, f"{name}.lora_embedding_B": B}
    tensors |= low_rank(LM["roberta"][2].format(0), 16, 16)
    settings = {"target_modules": ["word_embeddings", "0.attention.self.query"]}
    mapping = {"base_model_class": "RobertaForMaskedLM"}
    write_as_peft(tmp_path / "in", tensors, **settings, auto_mapping=mapping)
    convert(tmp_path / "in", tmp_path / "out", "--to", "merged", "--base", base)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(base / "model.safetensors")[f"{name}.weight"]
    assert torch.equal(merged["lm_head.decoder.weight"], before)
    close(merged[f"{name}.weight"], before + 10 / 4 * (B @ A).t(), terms=5)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )


@pytest.mark.parametrize(
    ("family", "module"), [("roberta", "classifier.dense"), ("deberta", "pooler.dense")]
)
def test_the_head_of_the_base_may_have_an_update(convert, tmp_path, family, module):
    """As with PEFT's "all-linear": its other weights are the base's."""
    base = make_base(tmp_path / "base", family, head="classifier")
    names = [LM[family][2].format(layer) for layer in range(2)]
    tensors = {}
    for name in (*names, module):
        tensors |= low_rank(name, 16, 16)
    write_as_peft(tmp_path / "in", tensors, target_modules=[*names, module])
    convert(tmp_path / "in", tmp_path / "out", "--to", "merged", "--base", base)
    merged, before = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "base"))
    assert merged.keys() == before.keys()
    A, B = low_rank(module, 16, 16).values()
    close(merged[f"{module}.weight"], before[f"{module}.weight"] + 10 / 4 * B @ A, terms=5)
    for name in merged.keys() - {f"{each}.weight" for each in (*names, module)}:
        assert torch.equal(merged[name], before[name]), name


# ---- Heads whose purpose is not in their names ----

CLASSES = {
    "deberta": ("DebertaV2ForSequenceClassification", "pooler.dense.weight"),
    "roberta": ("RobertaForMultipleChoice", "roberta.pooler.dense.weight"),
}


def classifier(tmp_path, family, **settings):
    """Writes PEFT's folder of a model with its base's pooler; returns base, class and pooler."""
    name, pooler = CLASSES[family]
    base = make_base(tmp_path / "base", family, head="lm")
    torch.manual_seed(2)
    model = getattr(transformers, name).from_pretrained(base)
    model.save_pretrained(tmp_path / "classifier", safe_serialization=True)
    weight, bias = model.classifier.weight.detach(), model.classifier.bias.detach()
    tensors = {"classifier.weight": weight + 1, "classifier.bias": bias + 1}
    query = LM[family][2]
    tensors |= {n: t for i in range(2) for n, t in low_rank(query.format(i), 16, 16).items()}
    targets = {"target_modules": [query.rpartition(".")[2]], "modules_to_save": ["classifier"]}
    write_as_peft(tmp_path / "in", tensors, **targets, **settings)
    return tmp_path / "classifier", name, pooler


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("through", [None, "a.safetensors"])
def test_the_models_class_says_what_its_head_is_for(convert, tmp_path, family, through):
    mapping = {"base_model_class": CLASSES[family][0], "parent_library": "transformers"}
    base, name, pooler = classifier(tmp_path, family, auto_mapping=mapping)
    source = tmp_path / "in"
    if through:
        convert(source, tmp_path / through)
        source = tmp_path / through
    convert(source, tmp_path / "out", "--to", "merged", "--base", base)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(merged[pooler], load_file(base / "model.safetensors")[pooler])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [name]


def test_without_a_head_pefts_folder_has_no_task_type(convert, tmp_path):
    """With a task type, PEFT would look for the head in the folder."""
    tensors = low_rank(LM["roberta"][2].format(0), 16, 16)
    mapping = {"base_model_class": "RobertaForSequenceClassification"}
    write_as_peft(tmp_path / "in", tensors, target_modules=["query"], auto_mapping=mapping)
    printed = convert(tmp_path / "in", tmp_path / "a.safetensors")
    assert printed["head"] == "sequence_classification"
    convert(tmp_path / "a.safetensors", tmp_path / "out", "--to", "peft")
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["task_type"] is None


@pytest.mark.parametrize("family", CLASSES)
def test_an_unidentified_head_that_contradicts_the_base_is_refused(failure, tmp_path, family):
    base, *_ = classifier(tmp_path, family)
    line = failure(tmp_path / "in", tmp_path / "out", "--to", "merged", "--base", base)
    assert (
        "does not record what its head is for: its tensors are named as for token_classification"
        in line
    )


@pytest.mark.parametrize(
    ("said", "architecture"),
    [({}, "RobertaForMaskedLM"), ({"task_type": "TOKEN_CLS"}, "RobertaForMultipleChoice")],
    ids=["a language model", "a recorded head"],
)
def test_a_head_that_does_not_contradict_the_base(convert, tmp_path, said, architecture):
    base, *_ = classifier(tmp_path, "roberta", **said)
    config = base / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"architectures": [architecture]})
    )
    printed = convert(tmp_path / "in", tmp_path / "a.safetensors", "--base", base)
    assert printed["head"] == "token_classification"


def test_an_update_of_gpt2s_embedding_unties_its_head(convert, tmp_path):
    """PEFT adapts only the embedding; the head keeps the embedding's old values."""
    base = make_base(tmp_path / "base", "gpt2")
    A, B = torch.randn(4, 40, generator=seed(1)), torch.randn(16, 4, generator=seed(2))
    name = "transformer.wte"
    tensors = {f"{name}.lora_embedding_A": A, f"{name}.lora_embedding_B": B}
    tensors |= low_rank("transformer.h.0.attn.c_proj", 16, 16)
    write_as_peft(tmp_path / "in", tensors, target_modules=["wte", "h.0.attn.c_proj"])
    convert(tmp_path / "in", tmp_path / "out", "--to", "merged", "--base", base)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(base / "model.safetensors")["wte.weight"]
    assert torch.equal(merged["lm_head.weight"], before)
    close(merged[f"{name}.weight"], before + 10 / 4 * (B @ A).t(), terms=5)
    assert "lm_head.decoder.weight" not in merged
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
