"""convert.py on tiny RoBERTa, DeBERTa-v2 and GPT-2 adapters: formats, merging, what is refused."""

import importlib.util
import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from compare import assert_close_to_rounding
from encoder_options import RELATIVE
from safetensors.torch import save_file

from loralib.adapters.adapter import Adapter, lora_metadata
from loralib.adapters.families import registered
from loralib.adapters.fingerprint import fingerprint
from loralib.adapters.formats import FORMATS, read_adapter, write_adapter
from loralib.adapters.metadata import LoraMetadata
from loralib.io.tensors import read_tensors, write_wrapped_tensors
from loralib.training import process
from transformers import (
    AutoModelForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
)
from transformers.configuration_utils import OWN_SETTINGS
from transformers.modeling_utils import read_weights

SCRIPT = Path(__file__).resolve().parents[2] / "utils" / "convert.py"
FAMILIES = ("roberta", "deberta", "gpt2")
ENCODERS = ("roberta", "deberta")
OUT = {"lora": "out.safetensors", "release": "out.bin", "peft": "out", "merged": "out"}
LABELS = ("yes", "no", "maybe")
# Settings with which a model's LoRA computes what PEFT's does.
AS_PEFTS = {"roberta": {}, "deberta": {"lora_positions": True}}

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 30,
    "initializer_range": 0.3,
}
# The terms of the sums that follow one another: of each layer four products of 16 columns, one of
# at most 64, and attention; of a convolution; of embeddings and a head.
TERMS = 2 * (4 * 16 + 64 + 8 + 12) + 3 * 16 + 3 * 16
GPT2_SHAPE = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 30}
MODELS = {
    "roberta": {
        "plain": RobertaModel,
        "lm": RobertaForMaskedLM,
        "classifier": RobertaForSequenceClassification,
    },
    "deberta": {
        "plain": DebertaV2Model,
        "lm": DebertaV2ForMaskedLM,
        "classifier": DebertaV2ForSequenceClassification,
    },
}


@pytest.fixture(scope="module")
def script():
    """The module; `script.main(arguments)` runs it in this process."""
    sys.path.insert(0, str(SCRIPT.parent))  # as running it does
    spec = importlib.util.spec_from_file_location("convert", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["convert"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture
def convert(script, capsys):
    """``convert(*arguments)``: what is printed, by name; notes as a list."""

    def run(*arguments: object) -> dict:
        capsys.readouterr()
        script.main([str(argument) for argument in arguments])
        first, *lines = capsys.readouterr().out.splitlines()
        said = {"first": first, "notes": []}
        for line in lines:
            assert line.startswith("  ")
            if line.startswith("  note: "):
                said["notes"].append(line.removeprefix("  note: "))
            else:
                name, value = line.split(maxsplit=1)
                said[name] = value
        return said

    return run


@pytest.fixture
def failure(script, tmp_path, capsys):
    """``failure(*arguments)``: the one line of the error, which left all files as they were."""

    def run(*arguments: object) -> str:
        before, lines = tree(tmp_path), []
        with pytest.raises(SystemExit) as ended:
            process.run(
                lambda: script.main([str(argument) for argument in arguments]), lines.append
            )
        assert ended.value.code == 1
        assert tree(tmp_path) == before
        assert capsys.readouterr().out == ""
        (line,) = lines
        assert "\n" not in line
        return line

    return run


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file's content, and every folder, hidden ones too."""
    paths = folder.rglob("*")
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in paths
    }


# ------------------------------------------------------------------------------------------------
# Bases and adapters
# ------------------------------------------------------------------------------------------------


def seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], format: str) -> None:
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    if format == "safetensors":
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        torch.save(tensors, folder / "pytorch_model.bin")


def make_base(
    folder: Path,
    family: str,
    head: str = "plain",
    format: str = "safetensors",
    gamma: bool = False,
    dtype: torch.dtype = torch.float32,
    number: int = 0,
    **settings,
) -> Path:
    """A base's folder as upstream writes it: none of this fork's own settings, a tokenizer."""
    folder.mkdir(parents=True)
    if family == "gpt2":
        return make_gpt2(folder, format, dtype, number, **settings)
    torch.manual_seed(number)
    own = {"type_vocab_size": 1} if family == "roberta" else RELATIVE
    config = {"roberta": RobertaConfig, "deberta": DebertaV2Config}[family]
    model = MODELS[family][head](config(**{**SHAPE, **own, **settings}))
    for name, parameter in model.named_parameters():
        if "bias" in name or "Norm" in name:
            parameter.data.add_(torch.randn(parameter.shape), alpha=0.2)
    tensors = {name: tensor.to(dtype) for name, tensor in model.full_state_dict().items()}
    if gamma:
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, name in itertools.product(old, list(tensors)):
            if name.endswith(new):
                tensors[name.removesuffix(new) + old[new]] = tensors.pop(name)
    write_weights(folder, tensors, format)
    values = {k: v for k, v in model.config.to_dict().items() if k not in OWN_SETTINGS}
    values |= {"architectures": ["Other"], "torch_dtype": "float16", "dtype": "float16"}
    values |= {"transformers_version": "4.30.0", "model_type": config.model_type}
    (folder / "config.json").write_text(json.dumps(values))
    for name in ("vocab.json", "merges.txt", "spm.model", "tokenizer_config.json"):
        (folder / name).write_text(f"{name} of {folder.name}")
    (folder / "training_args.bin").write_text("not to be copied")
    return folder


def gpt2_model(**settings):
    from model import GPT2Config, GPT2LMModel

    return GPT2LMModel(GPT2Config(**{**GPT2_SHAPE, **settings}))


def make_gpt2(folder: Path, format: str, dtype: torch.dtype, number: int, **settings) -> Path:
    torch.manual_seed(number)
    model = gpt2_model(**settings)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape), alpha=model.config.n_embd**-0.5)
    # Under the names of the published files.
    tensors = {
        name.removeprefix("transformer."): tensor.detach().to(dtype)
        for name, tensor in model.named_parameters()
    }
    write_weights(folder, tensors, format)
    values = {**GPT2_SHAPE, **settings, "model_type": "gpt2", "activation_function": "gelu_new"}
    values |= {"architectures": ["GPT2Model"], "dtype": "float16", "n_ctx": 30}
    (folder / "config.json").write_text(json.dumps(values))
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_text(f"{name} of {folder.name}")
    return folder


BATCH = {
    "input_ids": torch.randint(5, 40, (3, 9), generator=seed(1)),
    "attention_mask": (torch.arange(9) < torch.tensor([9, 4, 7])[:, None]).long(),
}


@dataclass(frozen=True)
class Trained:
    """An adapter, its base's folder, and the logits of both with LoRA layers."""

    base: Path
    adapter: Adapter
    logits: torch.Tensor


def train(base: Path, family: str, bias: str = "none", **settings) -> Trained:
    """An adapter as if trained on a base; `settings` are the model's."""
    torch.manual_seed(8)
    if family == "gpt2":
        return train_gpt2(base)
    settings = {
        "id2label": dict(enumerate(LABELS)),
        "finetuning_task": "mnli",
        "lora_dropout": 0.1,
        "lora_r": 2,
        "lora_alpha": 6,
        **settings,
    }
    model = AutoModelForSequenceClassification.from_pretrained(base, apply_lora=True, **settings)
    model.eval()
    targets = {name.rpartition(".")[0] for name in model.state_dict() if "lora_" in name}
    biases = {}
    for name, parameter in model.named_parameters():
        in_base = name.startswith(f"{model.base_model_prefix}.")
        is_own = name.rpartition(".")[0] in targets or bias == "all"
        if bias != "none" and in_base and is_own and name.endswith("bias"):
            biases[name] = parameter
        if name in biases or "lora_" in name or not in_base:
            parameter.data.add_(torch.randn(parameter.shape), alpha=0.5)
    with torch.no_grad():
        logits = model(**BATCH).logits
    adapter = model.adapter()
    tensors = adapter.tensors | {name: p.detach() for name, p in biases.items()}
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return Trained(base, Adapter(tensors, replace(adapter.metadata, bias=bias)), logits)


def train_gpt2(base: Path) -> Trained:
    import gpt2_folder
    from model import GPT2, canonical_names, load_base

    settings = json.loads((base / "config.json").read_text())
    plain = canonical_names(gpt2_folder.read_weights(base), str(base))
    shape = {key: settings[key] for key in GPT2_SHAPE}
    model = load_base(gpt2_model(**shape, lora_attn_dim=2, lora_attn_alpha=6).config, plain, "base")
    lora = {name: p for name, p in model.named_parameters() if "lora_" in name}
    for parameter in lora.values():
        parameter.data.add_(torch.randn(parameter.shape), alpha=2 * shape["n_embd"] ** -0.5)
    model.eval()
    with torch.no_grad():
        logits = model(BATCH["input_ids"])
    info = LoraMetadata(
        rank=2,
        alpha=6,
        targets=("c_attn",),
        base=str(base),
        base_fingerprint=fingerprint(plain, GPT2.of_base),
    )
    tensors = {name: parameter.detach().clone() for name, parameter in lora.items()}
    return Trained(base, Adapter(tensors, info), logits)


@pytest.fixture(scope="module")
def trained(script, tmp_path_factory) -> dict[str, Trained]:
    """An adapter of each family."""
    folder = tmp_path_factory.mktemp("bases")
    of = {family: train(make_base(folder / family, family), family) for family in FAMILIES}
    of["deberta as PEFT's"] = train(of["deberta"].base, "deberta", **AS_PEFTS["deberta"])
    return of


def for_forms(trained: dict[str, Trained], family: str, *formats: str) -> Trained:
    """The adapter of a family that these formats hold: DeBERTa's in PEFT's reaches positions."""
    return trained["deberta as PEFT's" if family == "deberta" and "peft" in formats else family]


def plain_logits(folder: Path, family: str) -> torch.Tensor:
    """The logits of a merged folder, read as a plain model."""
    if family == "gpt2":
        import gpt2_folder

        model = gpt2_folder.read_gpt2(str(folder))[0]
        with torch.no_grad():
            return model.eval()(BATCH["input_ids"])
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert not model.adapted_by
    assert not model.newly_initialized
    with torch.no_grad():
        return model(**BATCH).logits


def close(ours: torch.Tensor, theirs: torch.Tensor, terms: int = TERMS) -> None:
    assert_close_to_rounding(ours, theirs, terms)


def assert_same_tensors(theirs: dict, ours: dict) -> None:
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert theirs[name].dtype == tensor.dtype
        assert torch.equal(theirs[name], tensor), name


def fields_of(info: LoraMetadata) -> set[str]:
    return {name for name, value in vars(info).items() if value is not None}


def as_old(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """DeBERTa's tensors under the names of the release's first files."""
    renamed = {}
    for name, tensor in tensors.items():
        for half in "AB":
            name = name.replace(f"_proj.lora_{half}", f"_lora_{half.lower()}.weight")
        renamed[name] = tensor
    assert renamed.keys() != tensors.keys()
    return renamed


# ------------------------------------------------------------------------------------------------
# Forms
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "start", "format"),
    [
        case
        for case in itertools.product(FAMILIES, FORMATS, FORMATS)
        # What these two would make of each other is in test_convert_positions.py.
        if not (case[0] == "deberta" and {"release", "peft"} == {*case[1:]})
    ],
)
def test_every_form_into_every_form(convert, trained, tmp_path, family, start, format):
    adapter = for_forms(trained, family, start, format).adapter
    source = tmp_path / f"in{OUT[start]}"
    write_adapter(source, adapter, start)
    known = read_adapter(source).metadata
    flags = [] if known else ["--lora_alpha", 6]
    known = known or lora_metadata(adapter.tensors, 2, 6)
    said = convert(source, tmp_path / OUT[format], "--to", format, *flags)

    result = read_adapter(tmp_path / OUT[format])
    assert_same_tensors(result.tensors, adapter.tensors)
    unsaid = format == "release" and family != "gpt2"
    alpha = "not said; --lora_alpha says it" if unsaid else "6"
    assert (said["format"], said["alpha"], said["dtype"]) == (format, alpha, "float32")
    assert said["rank"] == "2" + (" (2 updates in each module)" if family == "gpt2" else "")
    if unsaid:
        assert result.metadata is None
        lost = fields_of(known) - {"rank", "targets", "bias", "positions"}
        start = "not in this format: "
        assert {note.removeprefix(start).split()[0] for note in said["notes"]} == lost
        assert all(note.startswith(start) for note in said["notes"])
        return
    assert result.metadata == known
    unseen = {"base_fingerprint", "task", "labels"} & fields_of(known)
    for name in unseen if format == "peft" else ():
        assert any("in the metadata" in note and name in note for note in said["notes"])
    if format != "peft":
        assert said["notes"] == []
    elif family == "gpt2":
        assert any("one of rank 4 and alpha 12" in note for note in said["notes"])


@pytest.mark.parametrize("format", ["lora", "peft"])
def test_task_and_labels_that_the_releases_form_does_not_say(convert, trained, tmp_path, format):
    given = trained["roberta"].adapter
    write_adapter(tmp_path / "in.bin", given)
    flags = ["--to", format, "--lora_alpha", 6, "--task", "mnli", "--labels", *LABELS]
    said = convert(tmp_path / "in.bin", tmp_path / OUT[format], *flags)
    assert (said["task"], said["labels"]) == ("mnli", ", ".join(LABELS))
    info = read_adapter(tmp_path / OUT[format]).metadata
    assert (info.task, info.labels) == ("mnli", LABELS)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--labels", "a", "b"], "has a head of 3 outputs, but --labels names 2"),
        (
            ["--labels", "a", "b", "c"],
            f"says labels {', '.join(LABELS)}, but --labels is a, b, c",
        ),
        (["--task", "other"], "but --task is other"),
    ],
)
def test_a_task_or_labels_that_do_not_fit(trained, tmp_path, failure, flags, message):
    write_adapter(tmp_path / "in.safetensors", trained["roberta"].adapter)
    if "2" in message:
        write_adapter(tmp_path / "in.bin", trained["roberta"].adapter)
        flags = [*flags, "--lora_alpha", 6]
    source = tmp_path / ("in.bin" if "2" in message else "in.safetensors")
    line = failure(source, tmp_path / "out", "--to", "peft", *flags)
    assert message in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_again(convert, trained, tmp_path, family):
    """lora -> release -> peft -> lora, with flags for what the formats lost on the way."""
    base = trained[family].base
    if family == "deberta":  # whose projections are not shared
        base = make_base(tmp_path / "base", family, share_att_key=False)
    given = (train(base, family) if family == "deberta" else trained[family]).adapter
    files = [tmp_path / name for name in ("a.safetensors", "b.pt", "c", "d.safetensors")]
    write_adapter(files[0], given)
    notes = convert(files[0], files[1], "--to", "release")["notes"]
    convert(files[1], files[2], "--to", "peft", "--lora_alpha", 6, "--base", base)
    convert(files[2], files[3], "--to", "lora")
    result = read_adapter(files[3])
    assert_same_tensors(result.tensors, given.tensors)
    lost = {note.split()[4] for note in notes} - {"alpha", "base", "base_fingerprint"}
    assert lost == (set() if family == "gpt2" else {"task", "labels", "dropout"})
    assert result.metadata == replace(given.metadata, **dict.fromkeys(lost))


@pytest.mark.parametrize("format", [None, *FORMATS])
def test_the_first_names_of_deberta_get_their_later_ones(convert, trained, tmp_path, format):
    """Without --to it is the call of the release's script."""
    adapter = trained["deberta"].adapter
    torch.save(as_old(adapter.tensors), tmp_path / "old.bin")
    target = tmp_path / OUT[format or "release"]
    flags = [] if format is None else ["--to", format, "--lora_alpha", 6]
    if format == "peft":
        flags += ["--base", make_base(tmp_path / "base", "deberta", share_att_key=False)]
    convert(tmp_path / "old.bin", target, *flags)
    assert_same_tensors(read_adapter(target).tensors, adapter.tensors)
    if target.is_file():
        assert_same_tensors(read_tensors(target)[0], adapter.tensors)


@pytest.mark.parametrize("name", ["new.bin", "new.pt", "new.safetensors"])
def test_the_name_of_out_tells_the_form(convert, trained, tmp_path, name):
    write_adapter(tmp_path / "in.safetensors", trained["roberta"].adapter)
    said = convert(tmp_path / "in.safetensors", tmp_path / name)
    assert said["format"] == ("lora" if name == "new.safetensors" else "release")
    assert said["first"] == f"{tmp_path / name}: written, from {tmp_path / 'in.safetensors'}:"


@pytest.mark.parametrize("format", ["lora", "release"])
def test_out_may_be_a_folder(convert, trained, tmp_path, format):
    adapter = trained["roberta"].adapter
    write_adapter(tmp_path / "in.safetensors", adapter)
    convert(tmp_path / "in.safetensors", tmp_path / "run", "--to", format)
    (file,) = (tmp_path / "run").iterdir()
    assert file.name == {"lora": "pytorch_model_lora.safetensors"}.get(
        format, "pytorch_model_lora.bin"
    )
    assert_same_tensors(read_adapter(tmp_path / "run").tensors, adapter.tensors)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype(convert, trained, tmp_path, format, dtype):
    adapter, target = trained["gpt2"].adapter, tmp_path / OUT[format]
    write_adapter(tmp_path / "in.safetensors", adapter)
    said = convert(tmp_path / "in.safetensors", target, "--to", format, "--dtype", dtype)
    assert said["dtype"] == dtype
    rounded = {name: t.to(getattr(torch, dtype)) for name, t in adapter.tensors.items()}
    assert_same_tensors(read_adapter(target).tensors, rounded)


def with_tensors(adapter: Adapter, change) -> Adapter:
    """The adapter with its first tensor changed."""
    first = min(adapter.tensors)
    return replace(adapter, tensors={**adapter.tensors, first: change(adapter.tensors[first])})


@pytest.mark.parametrize("format", FORMATS)
def test_mixed_dtypes(convert, failure, trained, tmp_path, format):
    adapter = with_tensors(trained["roberta"].adapter, lambda tensor: tensor.bfloat16())
    write_adapter(tmp_path / "in.safetensors", adapter)
    command = (tmp_path / "in.safetensors", tmp_path / OUT[format], "--to", format)
    line = failure(*command)
    assert "holds tensors of bfloat16 and float32; say which it is to be with --dtype" in line
    convert(*command, "--dtype", "float32")
    wide = {name: tensor.float() for name, tensor in adapter.tensors.items()}
    assert_same_tensors(read_adapter(tmp_path / OUT[format]).tensors, wide)


@pytest.mark.parametrize("format", [*FORMATS, "merged"])
def test_values_beyond_the_range(convert, failure, trained, tmp_path, format):
    name = "classifier.out_proj.weight"
    given = trained["roberta"]
    large = {**given.adapter.tensors, name: given.adapter.tensors[name] * 1e6}
    write_adapter(tmp_path / "in.safetensors", replace(given.adapter, tensors=large))
    command = (tmp_path / "in.safetensors", tmp_path / OUT[format], "--to", format)
    command += ("--base", given.base) if format == "merged" else ()
    line = failure(*command, "--dtype", "float16")
    assert f"{name} has values beyond the range of float16" in line
    convert(*command, "--dtype", "bfloat16")


# ------------------------------------------------------------------------------------------------
# --info, --lora_alpha, --base
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", FORMATS)
def test_info(convert, trained, tmp_path, family, format):
    adapter, source = for_forms(trained, family, format).adapter, tmp_path / OUT[format]
    write_adapter(source, adapter, format)
    before, read = tree(tmp_path), read_adapter(source)
    said = convert(source, "--info")
    assert tree(tmp_path) == before
    lora = sum(t.numel() for name, t in adapter.tensors.items() if "lora_" in name)
    others = sum(t.numel() for t in adapter.tensors.values()) - lora
    assert said["first"] == f"{read.source}:"
    assert said["format"] == format
    assert said["parameters"] == f"{lora:,} of LoRA, {others:,} others"
    assert (
        said["targets"]
        == {
            "roberta": "query, value, in 4 modules",
            "deberta": "query_proj, value_proj, in 4 modules",
            "gpt2": "c_attn, in 2 modules",
        }[family]
    )
    assert (said["biases"], said["dtype"], said["notes"]) == ("none", "float32", [])
    if read.metadata is None:
        assert said["alpha"] == "not said; --lora_alpha says it"
        assert not {"base", "fingerprint", "task", "labels"} & said.keys()
        assert convert(source, "--info", "--lora_alpha", 6)["alpha"] == "6"
        return
    assert said["alpha"] == "6"
    assert said["base"] == str(trained[family].base)
    assert said["fingerprint"] == adapter.metadata.base_fingerprint
    if family != "gpt2":
        assert (said["task"], said["labels"], said["dropout"]) == ("mnli", "yes, no, maybe", "0.1")


def test_info_of_what_was_trained_beside_others_and_of_any_model(convert, trained, tmp_path):
    adapter = trained["roberta"].adapter
    beside = replace(adapter, metadata=replace(adapter.metadata, trained_with=("apply_adapter",)))
    write_adapter(tmp_path / "a.safetensors", beside)
    assert convert(tmp_path / "a.safetensors", "--info")["with"] == "apply_adapter"
    torch.save(
        {"mine.lora_A": torch.ones(1, 3), "mine.lora_B": torch.ones(2, 1)}, tmp_path / "b.pt"
    )
    said = convert(tmp_path / "b.pt", "--info")
    assert (said["format"], said["targets"]) == ("plain", "mine, in 1 modules")


@pytest.mark.parametrize("format", ["lora", "peft", "merged"])
@pytest.mark.parametrize("folder", [True, False])
def test_alpha_is_asked_for(failure, trained, tmp_path, format, folder):
    given = trained["roberta"]
    torch.save(given.adapter.tensors, tmp_path / "in.bin")
    target = tmp_path / ("out" if folder else OUT[format])
    line = failure(tmp_path / "in.bin", target, "--to", format, "--base", given.base)
    assert "does not say with what alpha it was trained" in line
    assert "--lora_alpha" in line


def test_release_needs_no_alpha(convert, failure, trained, tmp_path):
    given = trained["roberta"]
    torch.save(given.adapter.tensors, tmp_path / "in.bin")
    other = make_base(tmp_path / "narrow", "roberta", hidden_size=8)
    assert "(16, 16)" in failure(tmp_path / "in.bin", tmp_path / "b.bin", "--base", other)
    convert(tmp_path / "in.bin", tmp_path / "out.bin", "--base", given.base)
    assert_same_tensors(read_adapter(tmp_path / "out.bin").tensors, given.adapter.tensors)


@pytest.mark.parametrize("start", FORMATS)
@pytest.mark.parametrize("format", [*FORMATS, "merged"])
def test_another_alpha_is_refused(failure, trained, tmp_path, start, format):
    given, source = trained["gpt2"], tmp_path / f"in{OUT[start]}"
    write_adapter(source, given.adapter, start)
    flags = ("--to", format, "--base", given.base, "--lora_alpha", 8)
    line = failure(source, tmp_path / OUT[format], *flags)
    assert line.endswith("was trained with alpha 6, but lora_alpha is 8 (--lora_alpha)")


@pytest.mark.parametrize("alpha", ["0", "-1", "nan", "inf"])
def test_what_is_no_alpha(failure, trained, tmp_path, alpha):
    torch.save(trained["roberta"].adapter.tensors, tmp_path / "in.bin")
    line = failure(tmp_path / "in.bin", tmp_path / "out.safetensors", f"--lora_alpha={alpha}")
    assert "lora_alpha has to be above 0" in line
    assert line.endswith("(--lora_alpha)")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", FORMATS)
def test_base_goes_into_the_info(convert, trained, tmp_path, family, format):
    given = for_forms(trained, family, format)
    said_before = replace(
        given.adapter.metadata, base="elsewhere", base_revision="v2", base_fingerprint=None
    )
    write_adapter(tmp_path / "in.safetensors", replace(given.adapter, metadata=said_before))
    said = convert(
        *(tmp_path / "in.safetensors", tmp_path / OUT[format]), "--to", format, "--base", given.base
    )
    if format == "release" and family != "gpt2":
        assert f"not in this format: base {given.base}" in said["notes"]
        return
    assert said["base"] == str(given.base)
    assert said["fingerprint"] == given.adapter.metadata.base_fingerprint
    assert "revision" not in said
    assert read_adapter(tmp_path / OUT[format]).metadata == given.adapter.metadata


# What is wrong with a base; its family, and make_base's arguments.
WRONG_BASES = {
    "roberta of another size": ("roberta", "roberta", {"hidden_size": 8}, ["(16, 16)", "(8, 8)"]),
    "deberta of another size": ("deberta", "deberta", {"hidden_size": 8}, ["(16, 16)", "(8, 8)"]),
    "gpt2 of another size": ("gpt2", "gpt2", {"n_embd": 8}, ["(48, 16)", "(24, 8)"]),
    "fewer layers": ("roberta", "roberta", {"num_hidden_layers": 1}, ["layer.1.", "has no"]),
    "fewer blocks": ("gpt2", "gpt2", {"n_layer": 1}, ["transformer.h.1.", "has no"]),
    "deberta for roberta": ("roberta", "deberta", {}, ["has no roberta."]),
    "roberta for deberta": ("deberta", "roberta", {}, ["has no deberta."]),
    "gpt2 for roberta": ("roberta", "gpt2", {}, ["gpt2"]),
    "roberta for gpt2": ("gpt2", "roberta", {}, ["its model_type is roberta, not gpt2"]),
    "another roberta": ("roberta", "roberta", {"number": 3}, ["another base", "fingerprint"]),
    "another deberta": ("deberta", "deberta", {"number": 3}, ["another base", "fingerprint"]),
    "another gpt2": ("gpt2", "gpt2", {"number": 3}, ["another base", "fingerprint"]),
    "another head": (
        *("roberta", "roberta", {"head": "classifier", "num_labels": 2}),
        ["(2,)", "(3,)", "number of labels"],
    ),
    "another activation": ("gpt2", "gpt2", {"activation_function": "relu"}, ["relu, not gelu_new"]),
}


@pytest.mark.parametrize("format", ["lora", "merged"])
@pytest.mark.parametrize("wrong", WRONG_BASES)
def test_wrong_bases(failure, trained, tmp_path, format, wrong):
    family, other, arguments, reasons = WRONG_BASES[wrong]
    arguments = dict(arguments)
    activation = arguments.pop("activation_function", None)
    base = make_base(tmp_path / "base", other, **arguments)
    if activation:
        settings = json.loads((base / "config.json").read_text())
        settings["activation_function"] = activation
        (base / "config.json").write_text(json.dumps(settings))
    write_adapter(tmp_path / "in.safetensors", trained[family].adapter)
    line = failure(
        tmp_path / "in.safetensors", tmp_path / OUT[format], "--to", format, "--base", base
    )
    for reason in reasons:
        assert reason in line


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_that_was_adapted(failure, trained, tmp_path, family):
    write_adapter(tmp_path / "in.safetensors", trained[family].adapter)
    base = make_base(tmp_path / "base", family, head="lm")
    tensors = read_tensors(base / "model.safetensors")[0]
    tensors |= trained[family].adapter.tensors
    command = (tmp_path / "in.safetensors", tmp_path / "out.bin", "--base", base)
    write_weights(base, tensors, "safetensors")
    assert "LoRA weights" in failure(*command)


@pytest.mark.parametrize("switch", ["apply_lora", "apply_adapter", "apply_bitfit"])
def test_a_base_whose_settings_say_that_it_was_adapted(failure, trained, tmp_path, switch):
    write_adapter(tmp_path / "in.safetensors", trained["roberta"].adapter)
    base = make_base(tmp_path / "base", "roberta")
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, switch: True}))
    line = failure(tmp_path / "in.safetensors", tmp_path / "out.bin", "--base", base)
    assert f"was trained with --{switch} itself: it is not a plain base" in line


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        ("absent/x/y", "neither a local folder nor a model on the hub"),
        ("empty", "has no config.json"),
        ("bare", "has no weights"),
        ("base/model.safetensors", "is a file; give the base's folder"),
        ("damaged", "damaged"),
    ],
)
def test_what_is_no_base(failure, trained, tmp_path, base, reason):
    write_adapter(tmp_path / "in.safetensors", trained["roberta"].adapter)
    folder = make_base(tmp_path / "base", "roberta")
    for name in ("empty", "bare", "damaged"):
        (tmp_path / name).mkdir()
    for name in ("bare", "damaged"):
        (tmp_path / name / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = (folder / "model.safetensors").read_bytes()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(weights[:900])
    name = tmp_path / base if not base.startswith("absent") else base
    assert reason in failure(
        tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged", "--base", name
    )


def test_a_model_of_no_known_family(failure, tmp_path):
    tensors = {"bert.0.query.lora_A": torch.ones(1, 3), "bert.0.query.lora_B": torch.ones(2, 1)}
    torch.save(tensors, tmp_path / "in.pt")
    flags = ("--to", "merged", "--lora_alpha", 1, "--base", tmp_path)
    line = failure(tmp_path / "in.pt", tmp_path / "out", *flags)
    assert "adapts neither DeBERTa-v2, GPT-2 nor RoBERTa (bert.0.query)" in line


# ------------------------------------------------------------------------------------------------
# Merging
# ------------------------------------------------------------------------------------------------

BASES = {
    "plain": {},
    "bin": {"format": "bin"},
    "lm": {"head": "lm"},
    "gamma": {"head": "lm", "format": "bin", "gamma": True},
    "float16": {"dtype": torch.float16},
    "trained head": {"head": "classifier", "num_labels": 3},
}
MERGED = [(family, base) for family in ENCODERS for base in BASES]
MERGED += [("gpt2", base) for base in ("plain", "bin", "float16")]


@pytest.mark.parametrize(("family", "kind"), MERGED)
def test_merged(convert, script, tmp_path, family, kind):
    base = make_base(tmp_path / "base", family, **BASES[kind])
    given = train(base, family)
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    before = tree(base)
    said = convert(tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged", "--base", base)
    assert tree(base) == before
    close(plain_logits(tmp_path / "out", family), given.logits)
    # A test that cannot see the adapter would show nothing.
    halved = replace(given.adapter, metadata=replace(given.adapter.metadata, alpha=3))
    write_adapter(tmp_path / "half.safetensors", halved)
    half = tmp_path / "half"
    convert(tmp_path / "half.safetensors", half, "--to", "merged", "--base", base)
    assert (plain_logits(half, family) - given.logits).abs().max() > 1e-2

    own = [known.tokenizer_files for known in registered() if known.name.startswith(family)]
    tokenizer = {name for name in before if name in (*script.TOKENIZER_FILES, *own[0])}
    after = tree(tmp_path / "out")
    assert after.keys() == {"config.json", "model.safetensors", *tokenizer}
    assert all(after[name] == before[name] for name in tokenizer)
    settings, stated = json.loads(after["config.json"]), json.loads(before["config.json"])
    assert not OWN_SETTINGS & settings.keys()
    changed = {"architectures", "torch_dtype", "dtype"}
    if family != "gpt2":
        assert settings["id2label"] == {str(i): name for i, name in enumerate(LABELS)}
        assert settings["label2id"] == {name: i for i, name in enumerate(LABELS)}
        assert settings["finetuning_task"] == "mnli"
        changed |= {"id2label", "label2id", "finetuning_task"}
    if family == "deberta":  # LoRA was kept from positions, which have their own projections now
        assert settings["share_att_key"] is False
        changed |= {"share_att_key"}
    architecture = {
        "roberta": "RobertaForSequenceClassification",
        "deberta": "DebertaV2ForSequenceClassification",
        "gpt2": "GPT2LMHeadModel",
    }[family]
    assert settings["architectures"] == [architecture]
    assert settings["torch_dtype"] == "float32"
    assert "dtype" not in settings
    for name in stated.keys() - changed:
        assert settings[name] == stated[name]
    assert (said["format"], said["dtype"], said["base"]) == ("merged", "float32", str(base))
    assert said["notes"] == []


@pytest.mark.parametrize("family", ENCODERS)
def test_a_base_that_this_project_wrote(convert, tmp_path, family):
    """Its settings have this fork's own, which upstream is not to see."""
    base = make_base(tmp_path / "upstream", family, head="lm")
    model = MODELS[family]["lm"].from_pretrained(base)
    model.save_pretrained(tmp_path / "base")
    assert OWN_SETTINGS & json.loads((tmp_path / "base" / "config.json").read_text()).keys()
    given = train(tmp_path / "base", family, **AS_PEFTS[family])
    write_adapter(tmp_path / "in", given.adapter, "peft")
    convert(tmp_path / "in", tmp_path / "out", "--to", "merged", "--base", tmp_path / "base")
    close(plain_logits(tmp_path / "out", family), given.logits)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not OWN_SETTINGS & settings.keys()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", FORMATS)
def test_every_form_merges_to_the_same(convert, trained, tmp_path, family, start):
    given, source = for_forms(trained, family, start), tmp_path / OUT[start]
    write_adapter(source, given.adapter, start)
    flags = [] if read_adapter(source).metadata else ["--lora_alpha", 6]
    convert(source, tmp_path / "merged", "--to", "merged", "--base", given.base, *flags)
    close(plain_logits(tmp_path / "merged", family), given.logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_merged_model_is_rounded_once(convert, trained, tmp_path, family, dtype):
    given = trained[family]
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    flags = ("--to", "merged", "--base", given.base)
    convert(tmp_path / "in.safetensors", tmp_path / "wide", *flags)
    said = convert(tmp_path / "in.safetensors", tmp_path / "out", *flags, "--dtype", dtype)
    wide, out = (read_tensors(tmp_path / name / "model.safetensors")[0] for name in ("wide", "out"))
    assert_same_tensors(out, {name: t.to(getattr(torch, dtype)) for name, t in wide.items()})
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["torch_dtype"], said["dtype"]) == (dtype, dtype)


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_merge(convert, tmp_path, family, bias):
    base = make_base(tmp_path / "base", family)
    given = train(base, family, bias, **AS_PEFTS[family])
    assert (given.logits - train(base, family).logits).abs().max() > 1e-2
    write_adapter(tmp_path / "in", given.adapter, "peft")
    assert convert(tmp_path / "in", "--info")["biases"] == bias
    convert(tmp_path / "in", tmp_path / "out", "--to", "merged", "--base", base)
    close(plain_logits(tmp_path / "out", family), given.logits)


@pytest.mark.parametrize("family", ENCODERS)
def test_one_label_and_other_targets(convert, tmp_path, family):
    base = make_base(tmp_path / "base", family)
    targets = ["key", "attention_output", "intermediate"]
    given = train(base, family, id2label=None, num_labels=1, lora_targets=targets)
    torch.save(given.adapter.tensors, tmp_path / "in.bin")
    flags = ("--to", "merged", "--base", base, "--lora_alpha", 6)
    convert(tmp_path / "in.bin", tmp_path / "out", *flags)
    logits = plain_logits(tmp_path / "out", family)
    assert logits.shape == (3, 1)
    close(logits, given.logits)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["id2label"] == {"0": "LABEL_0"}


@pytest.mark.parametrize("family", ENCODERS)
def test_an_adapter_without_a_head(convert, failure, tmp_path, family):
    base = make_base(tmp_path / "base", family, head="classifier", num_labels=3)
    given = train(base, family)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, apply_lora=True, lora_r=2, lora_alpha=6
    )
    lora = {name: t for name, t in given.adapter.tensors.items() if "lora_" in name}
    model.load_state_dict(lora, strict=False)
    write_adapter(tmp_path / "in.safetensors", replace(given.adapter, tensors=lora))
    command = (tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged", "--base")
    bare = make_base(tmp_path / "bare", family)  # the same backbone, without the head
    whole = read_tensors(base / "model.safetensors")[0]
    backbone = {name: t for name, t in whole.items() if name.startswith(f"{family}.")}
    write_weights(bare, backbone, "safetensors")
    line = failure(*command, bare)
    assert "the merged model would have an untrained head" in line
    convert(*command, base)
    with torch.no_grad():
        expected = model.eval()(**BATCH).logits
    close(plain_logits(tmp_path / "out", family), expected)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["published", "release"])
def test_a_file_of_gpt2_weights(convert, script, tmp_path, names):
    """A file says no shape: it has to be that of a known card."""
    folder = make_base(tmp_path / "base", "gpt2", **CARD)
    tensors = read_tensors(folder / "model.safetensors")[0]
    if names == "release":
        tensors = {f"module.transformer.{name}": t for name, t in tensors.items()}
        tensors = {"model_state_dict": tensors}
    torch.save(tensors, tmp_path / "base.bin")
    given = train(folder, "gpt2")
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    flags = ("--to", "merged", "--base", tmp_path / "base.bin")
    convert(tmp_path / "in.safetensors", tmp_path / "out", *flags)
    close(plain_logits(tmp_path / "out", "gpt2"), given.logits, CARD_TERMS)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings.pop("tie_word_embeddings") is True
    assert settings == {
        **CARD,
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "layer_norm_epsilon": 1e-5,
        "model_type": "gpt2",
        "torch_dtype": "float32",
    }
    assert tree(tmp_path / "out").keys() == {"config.json", "model.safetensors"}


CARD_TERMS = 4 * (3 * 128 + 4 * 128 + 32 + 12) + 128
CARD = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 50257, "n_positions": 1024}


@pytest.mark.parametrize("lacking", ["all cards", "positions"])
def test_a_file_that_is_no_card(failure, trained, tmp_path, lacking):
    shape = {"vocab_size": 9, "n_positions": 5}
    base = make_base(tmp_path / "base", "gpt2", **({} if lacking == "all cards" else CARD | shape))
    tensors = read_tensors(base / "model.safetensors")[0]
    tensors = {
        name: t for name, t in tensors.items() if lacking == "all cards" or name != "wpe.weight"
    }
    torch.save(tensors, tmp_path / "base.bin")
    write_adapter(tmp_path / "in.safetensors", trained["gpt2"].adapter)
    line = failure(
        *(tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged"),
        *("--base", tmp_path / "base.bin"),
    )
    assert ("give the folder of the model" if lacking == "all cards" else "wte.weight is") in line


# PEFT's adapters of GPT-2 that its layers here, and the release's, have no place for.
FOREIGN = {
    "all of c_attn": {"attn.c_attn": (16, 48)},
    "the attention's c_proj": {"attn.c_proj": (16, 16)},
    "both": {"attn.c_attn": (16, 48), "attn.c_proj": (16, 16)},
    "the MLP": {"mlp.c_fc": (16, 64), "mlp.c_proj": (64, 16)},
}


def foreign_adapter(folder: Path, modules: dict[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Writes an adapter as PEFT does; what it adds to the base's weights, (in, out) each."""
    folder.mkdir()
    generator, tensors, sums = seed(3), {}, {}
    for block, (module, (width, out)) in itertools.product(range(2), modules.items()):
        A, B = torch.randn(4, width, generator=generator), torch.randn(out, 4, generator=generator)
        name = f"transformer.h.{block}.{module}"
        tensors[f"base_model.model.{name}.lora_A.weight"] = A
        tensors[f"base_model.model.{name}.lora_B.weight"] = B
        sums[f"{name}.weight"] = (10 / 4 * B.double() @ A.double()).t()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [module.rpartition(".")[2] for module in modules]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 10, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "fan_in_fan_out": True}))
    return sums


@pytest.mark.parametrize("modules", FOREIGN)
def test_foreign_adapters_merge(convert, trained, tmp_path, modules):
    sums, base = foreign_adapter(tmp_path / "in", FOREIGN[modules]), trained["gpt2"].base
    convert(tmp_path / "in", tmp_path / "out", "--to", "merged", "--base", base)
    merged = read_tensors(tmp_path / "out" / "model.safetensors")[0]
    for name, tensor in read_tensors(base / "model.safetensors")[0].items():
        name = f"transformer.{name}"
        expected = (tensor.double() + sums.get(name, 0)).float()
        close(merged[name], expected, terms=5)
    assert plain_logits(tmp_path / "out", "gpt2").isfinite().all()


@pytest.mark.parametrize("format", ["lora", "release"])
@pytest.mark.parametrize("modules", FOREIGN)
def test_foreign_adapters_have_no_other_form(failure, tmp_path, modules, format):
    foreign_adapter(tmp_path / "in", FOREIGN[modules])
    for target in (OUT[format], "folder"):
        line = failure(tmp_path / "in", tmp_path / target, "--to", format)
        assert line.endswith("merge it into its base (merge_into) (--to merged)")


@pytest.mark.parametrize("said", [True, False])
def test_a_full_gpt2_checkpoint_has_its_lora_taken_out(convert, failure, trained, tmp_path, said):
    """As the release's scripts write it, and as this project's do, with metadata."""
    one = trained["gpt2"]
    names = {
        f"transformer.{name.removeprefix('transformer.')}": tensor
        for name, tensor in read_weights(one.base).items()
        if not name.startswith("lm_head")
    }
    everything = {f"module.{k}": v for k, v in {**names, **one.adapter.tensors}.items()}
    metadata = one.adapter.metadata.to_metadata() if said else {}
    write_wrapped_tensors(tmp_path / "model.100.pt", everything, metadata)
    alpha = [] if said else ["--lora_alpha", one.adapter.metadata.alpha]
    if not said:
        line = failure(tmp_path / "model.100.pt", tmp_path / "e2e", "--to", "peft")
        assert "does not say with what alpha it was trained" in line
    assert convert(tmp_path / "model.100.pt", "--info", *alpha)["format"] == "in a full model"
    for format in ("lora", "release", "peft"):
        out = tmp_path / OUT[format]
        notes = convert(tmp_path / "model.100.pt", out, "--to", format, *alpha)["notes"]
        assert notes[0].endswith("is a full model: its LoRA and head were taken")
        found = read_adapter(out)
        assert_same_tensors(found.tensors, one.adapter.tensors)
        if said and format == "lora":
            assert found.metadata == one.adapter.metadata
        out.unlink() if out.is_file() else shutil.rmtree(out)


def test_a_whole_gpt2_checkpoint_without_lora_is_none(failure, trained, tmp_path):
    base = dict(read_weights(trained["gpt2"].base))
    torch.save(base, tmp_path / "base.pt")
    line = failure(tmp_path / "base.pt", tmp_path / "out.safetensors")
    assert f"base.pt: none of its {len(base)} tensors is LoRA's" in line


@pytest.mark.parametrize("family", ENCODERS)
def test_a_full_encoder_checkpoint_has_its_lora_taken_out(convert, trained, tmp_path, family):
    """Rank, alpha and labels are those of the config.json beside it."""
    one = trained[family]
    settings = {"id2label": dict(enumerate(LABELS)), "lora_r": 2, "lora_alpha": 6}
    model = AutoModelForSequenceClassification.from_pretrained(
        one.base, apply_lora=True, **settings
    )
    model.load_adapters([one.adapter])
    model.save_pretrained(tmp_path / "checkpoint")
    whole = tmp_path / "checkpoint" / "pytorch_model.bin"
    if not whole.is_file():
        whole = tmp_path / "checkpoint" / "model.safetensors"
    notes = convert(whole, tmp_path / "out.safetensors")["notes"]
    assert notes[0].endswith("is a full model: its LoRA and head were taken")
    found = read_adapter(tmp_path / "out.safetensors")
    assert_same_tensors(found.tensors, one.adapter.tensors)
    assert (found.metadata.alpha, found.metadata.labels) == (one.adapter.metadata.alpha, LABELS)


def test_a_whole_checkpoint_without_settings_beside_it(convert, failure, trained, tmp_path):
    one = trained["roberta"]
    tensors = read_tensors(one.base / "model.safetensors")[0]
    tensors = {f"roberta.{name}": tensor for name, tensor in tensors.items()}
    torch.save(tensors | one.adapter.tensors, tmp_path / "whole.bin")
    line = failure(tmp_path / "whole.bin", tmp_path / "out.safetensors")
    assert "does not say with what alpha it was trained" in line
    convert(tmp_path / "whole.bin", tmp_path / "out.bin")
    assert_same_tensors(read_adapter(tmp_path / "out.bin").tensors, one.adapter.tensors)


def test_merging_needs_a_base(failure, trained, tmp_path):
    write_adapter(tmp_path / "in.safetensors", trained["roberta"].adapter)
    line = failure(tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged")
    assert f"give its base as --base (it names '{trained['roberta'].base}')" in line


@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_a_merge_that_breaks_off_leaves_nothing(
    script, failure, trained, monkeypatch, tmp_path, family
):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    given = trained[family]
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    flags = ("--to", "merged", "--base", given.base)
    monkeypatch.setattr(script, "copy_tokenizer", fail)
    assert "the disk is full" in failure(tmp_path / "in.safetensors", tmp_path / "out", *flags)


def test_an_empty_folder_is_filled(convert, trained, tmp_path):
    given = trained["roberta"]
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    for format in ("peft", "merged"):
        (tmp_path / format).mkdir()
        flags = ("--to", format, "--base", given.base)
        convert(tmp_path / "in.safetensors", tmp_path / format, *flags)
        assert any((tmp_path / format).iterdir())


# ------------------------------------------------------------------------------------------------
# Refused
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "format", "reason"),
    [
        ("in.safetensors", "lora", "exists already"),
        ("in.safetensors", None, "exists already"),
        ("folder/../in.safetensors", "lora", "exists already"),
        ("mine.bin", None, "exists already"),
        ("link.bin", None, "exists already"),
        ("folder.bin", None, "exists already"),
        ("run", "lora", "pytorch_model_lora.safetensors: exists already"),
        ("run", "release", "pytorch_model_lora.bin: exists already"),
        ("folder", "peft", "exists already"),
        ("folder", "merged", "exists already"),
        ("mine", "lora", "File exists"),
        ("mine", "peft", "exists already"),
        ("mine", "merged", "exists already"),
        ("absent/out.bin", None, "there is no folder"),
        ("absent/out", "lora", "there is no folder"),
        ("absent/out", "peft", "there is no folder"),
        ("absent/out", "merged", "there is no folder"),
        ("mine/out.bin", None, "there is no folder"),
        ("out.bin", "lora", "ends in .safetensors"),
        ("out.safetensors", "release", "ends in .bin or .pt"),
        ("out.txt", "release", "ends in .bin or .pt"),
        ("out.bin", "peft", "the format peft is a folder"),
        ("out.safetensors", "merged", "the format merged is a folder"),
        ("out", None, "does not tell the format"),
        ("out.txt", None, "does not tell the format"),
    ],
)
def test_targets_that_are_refused(failure, trained, tmp_path, target, format, reason):
    given = trained["roberta"]
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    for folder in ("run", "folder", "folder.bin"):
        (tmp_path / folder).mkdir()
    for suffix in ("safetensors", "bin"):
        (tmp_path / "run" / f"pytorch_model_lora.{suffix}").write_text("mine")
    for name in ("mine", "mine.bin", "folder/mine"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "link.bin").symlink_to(tmp_path / "in.safetensors")
    flags = ["--to", format] if format else []
    flags += ["--base", given.base] if format == "merged" else []
    assert reason in failure(tmp_path / "in.safetensors", tmp_path / target, *flags)


@pytest.mark.parametrize("format", [*FORMATS, "merged"])
def test_what_was_trained_with_others_beside_it(failure, trained, tmp_path, format):
    given = trained["roberta"]
    info = replace(given.adapter.metadata, trained_with=("apply_adapter", "apply_bitfit"))
    write_adapter(tmp_path / "in.safetensors", replace(given.adapter, metadata=info))
    flags = ("--to", format, "--base", given.base)
    line = failure(tmp_path / "in.safetensors", tmp_path / OUT[format], *flags)
    assert "was trained with apply_adapter, apply_bitfit as well" in line


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("absent.bin", "no such checkpoint file"),
        ("empty", "holds no adapter"),
        ("cut.safetensors", "damaged"),
        ("two", "holds two adapters"),
    ],
)
def test_what_is_no_adapter(failure, trained, tmp_path, source, reason):
    given = trained["roberta"]
    (tmp_path / "empty").mkdir()
    write_adapter(tmp_path / "cut.safetensors", given.adapter)
    content = (tmp_path / "cut.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[:-9])
    write_adapter(tmp_path / "two", given.adapter, "peft")
    write_adapter(tmp_path / "two", given.adapter, "lora")
    assert reason in failure(tmp_path / source, tmp_path / "out.bin")


# ------------------------------------------------------------------------------------------------
# As a command
# ------------------------------------------------------------------------------------------------


def command(*arguments: object, cwd: Path, **more) -> subprocess.CompletedProcess:
    line = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(list(map(str, line)), cwd=cwd, capture_output=True, text=True, **more)


@pytest.mark.slow
def test_from_any_folder_with_relative_names(trained, tmp_path):
    given = trained["roberta"]
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    done = command("in.safetensors", "out", "--to", "merged", "--base", given.base, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("out: written, from in.safetensors:\n  format       merged\n")
    close(plain_logits(tmp_path / "out", "roberta"), given.logits)

    done = command("in.safetensors", "out", "--to", "peft", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line == "convert.py: error: out: exists already; give another name"


def test_help(script, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"])
    assert ended.value.code == 0
    explained = capsys.readouterr().out
    for word in ("lora ", "release ", "peft ", "merged ", "--base", "--lora_alpha", "--dtype"):
        assert word in explained


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "IN"),
        (["in.bin"], "give OUT, or --info"),
        (["in.bin", "--to", "lora"], "give OUT, or --info"),
        (["in.bin", "out.bin", "--info"], "--info writes nothing"),
        (["in.bin", "--info", "--to", "lora"], "--info writes nothing"),
        (["in.bin", "--info", "--base", "x"], "--info writes nothing"),
        (["in.bin", "--info", "--dtype", "float32"], "--info writes nothing"),
        (["in.bin", "out.bin", "--to", "plain"], "invalid choice: 'plain'"),
        (["in.bin", "out.bin", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["in.bin", "out.bin", "--lora_alpha", "many"], "invalid float value"),
        (["in.bin", "out.bin", "more.bin"], "unrecognized arguments: more.bin"),
    ],
)
def test_usage(script, capsys, arguments, reason):
    with pytest.raises(SystemExit) as ended:
        script.main(arguments)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


# Several calls in one process, which takes seconds to start.
CALLS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import convert
from loralib.training import process
for call in json.loads(sys.argv[2]):
    try:
        process.run(lambda: convert.main(call), print)
    except SystemExit as end:
        print("status", end.code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_names_on_the_hub(hub_server, trained, tmp_path, family):
    """PEFT's adapter, which names a revision of its base: there the base is read."""
    given = trained[family]
    base = make_base(hub_server.root / "org" / "base", family)
    commit = hub_server.find(None, "org/base", None).commit()
    info = replace(given.adapter.metadata, base="org/base", base_revision=commit)
    write_adapter(hub_server.root / "me" / "adapter", replace(given.adapter, metadata=info), "peft")
    calls = [
        ["me/adapter", "out", "--to", "merged", "--base", "org/base"],
        ["me/adapter", "lora.safetensors", "--base", "org/base"],
        ["me/none", "x.bin"],
        ["me/adapter", "x.bin", "--base", "org/none"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", CALLS, str(SCRIPT.parent), json.dumps(calls)],
        cwd=tmp_path,
        env=hub_server.environment(tmp_path / "home"),
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    close(plain_logits(tmp_path / "out", family), given.logits)
    names = {"vocab.json", "merges.txt"}
    assert all((tmp_path / "out" / n).read_text() == (base / n).read_text() for n in names)
    asked = {path.split("/")[4] for _, path in hub_server.downloads() if "org/base" in path}
    assert asked == {commit}
    result = read_adapter(tmp_path / "lora.safetensors")
    assert_same_tensors(result.tensors, given.adapter.tensors)
    assert result.metadata == info

    *_, first, first_end, second, second_end = done.stdout.splitlines()
    for line, absent in ((first, "me/none"), (second, "org/none")):
        assert f"error: '{absent}' is neither a local folder nor a model on the hub" in line
    assert first_end == second_end == "status 1"
    assert not (tmp_path / "x.bin").exists()


def test_settings_of_the_base_s_own_head_are_left_behind(convert, tmp_path):
    base = make_base(tmp_path / "base", "roberta")
    config = json.loads((base / "config.json").read_text())
    own = {"num_labels": 2, "_num_labels": 2, "problem_type": "regression"}
    (base / "config.json").write_text(json.dumps(config | own))
    write_adapter(tmp_path / "in.safetensors", train(base, "roberta").adapter)
    convert(tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged", "--base", base)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not own.keys() & settings.keys()
    assert list(settings["id2label"].values()) == list(LABELS)


def test_a_merged_gpt2_says_that_its_head_is_its_embedding(convert, tmp_path):
    base = make_base(tmp_path / "base", "gpt2")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    write_adapter(tmp_path / "in.safetensors", train(base, "gpt2").adapter)
    convert(tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged", "--base", base)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["tie_word_embeddings"] is True


def test_half_a_head_is_not_completed_from_the_base(tmp_path, failure):
    base = make_base(tmp_path / "base", "roberta", head="classifier", num_labels=3)
    adapter = train(base, "roberta").adapter
    left = {n: t for n, t in adapter.tensors.items() if not n.startswith("classifier.out_proj")}
    write_adapter(tmp_path / "in.safetensors", replace(adapter, tensors=left))
    line = failure(
        *(tmp_path / "in.safetensors", tmp_path / "out", "--to", "merged", "--base", base)
    )
    assert "lacks classifier.out_proj.bias of the head that it brings" in line
