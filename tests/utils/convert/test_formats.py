"""Tests convert.py from each format to each other: what is kept, and what is reported as lost."""

import itertools
from dataclasses import replace

import pytest
import torch
from conversions import (
    FAMILIES,
    LABELS,
    OUT,
    assert_same_tensors,
    fields_of,
    for_formats,
    make_base,
    train,
)

from loralib.adapters.adapter import Adapter, lora_metadata
from loralib.adapters.formats import FORMATS, read_adapter, write_adapter
from loralib.io.tensors import read_tensors

# MNLI's labels, in another order than GLUE's.
OF_MNLI = ("neutral", "entailment", "contradiction")


def as_old(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns DeBERTa's tensors under the names of the release's first files."""
    renamed = {}
    for name, tensor in tensors.items():
        for half in "AB":
            name = name.replace(f"_proj.lora_{half}", f"_lora_{half.lower()}.weight")
        renamed[name] = tensor
    assert renamed.keys() != tensors.keys()
    return renamed


@pytest.mark.parametrize(
    ("family", "start", "format"),
    [
        case
        for case in itertools.product(FAMILIES, FORMATS, FORMATS)
        # Conversions between these two are tested in test_positions.py.
        if not (case[0] == "deberta" and {"release", "peft"} == {*case[1:]})
    ],
)
def test_every_format_into_every_format(convert, trained, tmp_path, family, start, format):
    adapter = for_formats(trained, family, start, format).adapter
    source = tmp_path / f"in{OUT[start]}"
    write_adapter(source, adapter, start)
    known = read_adapter(source).metadata
    flags = [] if known else ["--lora_alpha", 6]
    known = known or lora_metadata(adapter.tensors, 2, 6)
    printed = convert(source, tmp_path / OUT[format], "--to", format, *flags)

    result = read_adapter(tmp_path / OUT[format])
    assert_same_tensors(result.tensors, adapter.tensors)
    lacks_metadata = format == "release" and family != "gpt2"
    alpha = "not recorded; give --lora_alpha" if lacks_metadata else "6"
    assert (printed["format"], printed["alpha"], printed["dtype"]) == (format, alpha, "float32")
    assert printed["rank"] == "2" + (" (2 updates in each module)" if family == "gpt2" else "")
    if lacks_metadata:
        assert result.metadata is None
        lost = fields_of(known) - {"rank", "targets", "bias", "positions", "head"}
        start = "not in this format: "
        assert {note.removeprefix(start).split()[0] for note in printed["notes"]} == lost
        assert all(note.startswith(start) for note in printed["notes"])
        return
    if format == "peft":  # PEFT's task type says what the head is for
        known = replace(known, head=adapter.head)
    assert result.metadata == known
    hidden_from_peft = {"base_fingerprint", "task", "labels"} & fields_of(known)
    for name in hidden_from_peft if format == "peft" else ():
        assert any("in the metadata" in note and name in note for note in printed["notes"])
    if format != "peft":
        assert printed["notes"] == []
    elif family == "gpt2":
        assert any("one of rank 4 and alpha 12" in note for note in printed["notes"])


def test_task_and_labels_of_an_adapter_whose_alpha_is_unknown(convert, trained, tmp_path):
    torch.save(trained["roberta"].adapter.tensors, tmp_path / "in.bin")
    named = ("--task", "mnli", "--labels", *OF_MNLI)
    notes = convert(tmp_path / "in.bin", tmp_path / "out.bin", *named)["notes"]
    lost = ["task mnli", f"labels {', '.join(OF_MNLI)}"]
    assert notes == [f"not in this format: {what}" for what in lost]


def test_counters_of_a_trained_head_stay_integers(convert, tmp_path):
    """BatchNorm counts its batches in integers, which have to be loaded as such."""
    tensors = {"up.lora_A": torch.ones(2, 6), "up.lora_B": torch.ones(6, 2)}
    tensors |= {"head.weight": torch.ones(4), "head.num_batches_tracked": torch.tensor(300)}
    adapter = Adapter(tensors, lora_metadata(tensors, 2, 6))
    write_adapter(tmp_path / "in.safetensors", adapter)
    assert convert(tmp_path / "in.safetensors", tmp_path / "a.safetensors")["dtype"] == "float32"
    flags = ("--dtype", "bfloat16")
    printed = convert(tmp_path / "in.safetensors", tmp_path / "b.safetensors", *flags)
    assert printed["dtype"] == "bfloat16"
    counted = read_adapter(tmp_path / "b.safetensors").tensors["head.num_batches_tracked"]
    assert (counted.dtype, int(counted)) == (torch.int64, 300)


@pytest.mark.parametrize("format", ["lora", "peft"])
def test_task_and_labels_that_the_releases_format_does_not_hold(convert, trained, tmp_path, format):
    given = trained["roberta"].adapter
    write_adapter(tmp_path / "in.bin", given)
    flags = ["--to", format, "--lora_alpha", 6, "--task", "MNLI", "--labels", *OF_MNLI]
    printed = convert(tmp_path / "in.bin", tmp_path / OUT[format], *flags)
    assert (printed["task"], printed["labels"]) == ("mnli", ", ".join(OF_MNLI))
    info = read_adapter(tmp_path / OUT[format]).metadata
    assert (info.task, info.labels) == ("mnli", OF_MNLI)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--labels", "a", "b"], "has a head of 3 outputs, but --labels names 2"),
        (
            ["--labels", "a", "b", "c"],
            f"records labels {', '.join(LABELS)}, but --labels is a, b, c",
        ),
        (["--task", "RTE"], "but --task is rte"),
        (["--task", "imdb"], "but --task is imdb"),
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--task", "RTE", "--labels", "a", "b", "c"],
            "has a head of 3 outputs, but rte has the labels entailment, not_entailment: leave",
        ),
        (["--task", "sst2"], "has a head of 3 outputs, but sst2 has the labels 0, 1: leave --task"),
        (["--task", "stsb"], "has a head of 3 outputs, but stsb has a score, which is one output"),
    ],
)
def test_a_glue_task_with_another_number_of_outputs_is_an_error(
    trained, tmp_path, failure, flags, message
):
    """run_glue.py could not evaluate the adapter on that task."""
    write_adapter(tmp_path / "in.bin", trained["roberta"].adapter)
    line = failure(tmp_path / "in.bin", tmp_path / "out", "--to", "peft", "--lora_alpha", 6, *flags)
    assert message in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("labels", [("LABEL_0", "LABEL_1", "LABEL_2"), LABELS, OF_MNLI, None])
def test_a_glue_task_may_have_labels_of_any_names(convert, trained, tmp_path, labels):
    given = trained["roberta"].adapter
    named = replace(given.metadata, task=None, labels=labels)
    write_adapter(tmp_path / "in.safetensors", replace(given, metadata=named))
    printed = convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--task", "MNLI")
    assert printed["task"] == "mnli"


@pytest.mark.parametrize(
    ("task", "written", "note"),
    [
        ("MNLI_mismatched", "mnli-mm", None),
        ("MNLI", "mnli", None),
        ("sst3", "sst3", "sst3 is not a GLUE task (did you mean sst2?); it is recorded as"),
        ("imdb", "imdb", "imdb is not a GLUE task; it is recorded as given"),
    ],
)
@pytest.mark.parametrize("has_head", [True, False])
def test_a_task_of_any_name(convert, trained, tmp_path, task, written, note, has_head):
    given = trained["roberta"].adapter
    tensors = {n: t for n, t in given.tensors.items() if has_head or "lora_" in n}
    unnamed = replace(given.metadata, task=None, labels=None, head=None)
    write_adapter(tmp_path / "in.safetensors", replace(given, tensors=tensors, metadata=unnamed))
    printed = convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--task", task)
    assert printed["task"] == written
    assert len(printed["notes"]) == (note is not None)
    assert all(line.startswith(note) for line in printed["notes"])


@pytest.mark.parametrize(
    ("recorded", "given"), [("imdb", "imdb"), ("SST-2", "sst2"), ("rte", "RTE")]
)
def test_a_recorded_task_may_be_given_again(convert, trained, tmp_path, recorded, given):
    adapter = trained["roberta"].adapter
    named = replace(adapter.metadata, task=recorded)
    write_adapter(tmp_path / "in.safetensors", replace(adapter, metadata=named))
    result = convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--task", given)
    assert (result["task"], result["notes"]) == (recorded, [])


def of_tokens(trained) -> Adapter:
    """An adapter with a head of 3 outputs for each token."""
    given = trained["roberta"].adapter
    tensors = {name: tensor for name, tensor in given.tensors.items() if "lora_" in name}
    tensors |= {"classifier.weight": torch.ones(3, 16), "classifier.bias": torch.ones(3)}
    metadata = replace(given.metadata, task=None, labels=None, head="token_classification")
    return replace(given, tensors=tensors, metadata=metadata)


def of_an_unknown_model(trained) -> Adapter:
    tensors = {"up.lora_A": torch.ones(2, 6), "up.lora_B": torch.ones(6, 2)}
    return Adapter(tensors, lora_metadata(tensors, 2, 6))


@pytest.mark.parametrize("task", ["e2e", "rte"])
@pytest.mark.parametrize(
    "adapter", [lambda trained: trained["gpt2"].adapter, of_tokens, of_an_unknown_model]
)
def test_the_task_of_a_model_of_another_kind_is_not_looked_for_in_glue(
    convert, trained, tmp_path, adapter, task
):
    write_adapter(tmp_path / "in.safetensors", adapter(trained))
    result = convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--task", task)
    assert result["task"] == task
    assert not any("GLUE" in note for note in result["notes"])


def test_labels_need_a_head(failure, trained, tmp_path):
    write_adapter(tmp_path / "in.safetensors", trained["gpt2"].adapter)
    line = failure(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--labels", "a", "b")
    assert "in.safetensors: has no head, but --labels names 2" in line


@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_trip_through_all_formats(convert, trained, tmp_path, family):
    """lora -> release -> peft -> lora, with flags for what the formats lost on the way."""
    base = trained[family].base
    if family == "deberta":  # a base whose projections are not shared
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
    assert lost == (set() if family == "gpt2" else {"task", "labels", "text_columns", "dropout"})
    assert result.metadata == replace(given.metadata, **dict.fromkeys(lost))


@pytest.mark.parametrize("format", [None, *FORMATS])
def test_debertas_first_names_are_converted_to_the_later_ones(convert, trained, tmp_path, format):
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
def test_the_suffix_of_out_chooses_the_format(convert, trained, tmp_path, name):
    write_adapter(tmp_path / "in.safetensors", trained["roberta"].adapter)
    printed = convert(tmp_path / "in.safetensors", tmp_path / name)
    assert printed["format"] == ("lora" if name == "new.safetensors" else "release")
    assert printed["first"] == f"{tmp_path / name}: written, from {tmp_path / 'in.safetensors'}:"


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
    printed = convert(tmp_path / "in.safetensors", target, "--to", format, "--dtype", dtype)
    assert printed["dtype"] == dtype
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
    assert "holds tensors of bfloat16 and float32; choose one with --dtype" in line
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
