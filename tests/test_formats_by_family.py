"""A table of families × formats: what is written and read again, and what is refused.

A row is an adapter of a family; DeBERTa-v2 has three, by what its LoRA does to the positions that
share projections with contents. A column is a format that `write_adapter` writes, or "merged", what
utils/convert.py makes of an adapter and its base. A pair is either kept to the bit or forbidden,
for the reason that `FORBIDDEN` names.
"""

import itertools
from dataclasses import dataclass, replace

import all_families  # noqa: F401
import pytest
import torch
from adapter_files import (
    DTYPES,
    MODULES,
    TARGETS,
    adapter_of,
    drawn,
    listing,
    peft_folder,
    refused,
    tensors_of,
)
from compare import assert_same_bits
from conversions import close, make_base, plain_logits, train, tree
from safetensors.torch import save_file

import convert
from loralib.adapters.checksums import with_checksum
from loralib.adapters.formats import FORMATS, read_adapter, write_adapter
from loralib.adapters.metadata import LoraMetadata
from loralib.adapters.peft import CONFIG_NAME, WEIGHTS_NAMES
from loralib.errors import CheckpointError, NeedsMergingError
from loralib.io.tensors import read_tensors


@dataclass(frozen=True)
class Row:
    """An adapter of a family.

    Args:
        name: of the row.
        family: as in adapter_files; "plain" is a model of no registered family.
        positions: the metadata's.
        said: what the metadata say besides, such as the variant.
        tensors: the shapes of the adapter's tensors that are not the family's.
        base: settings of the base's model.
        lora: settings of the model with LoRA.
    """

    name: str
    family: str
    positions: bool | None = None
    said: tuple[tuple[str, object], ...] = ()
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    base: tuple[tuple[str, object], ...] = ()
    lora: tuple[tuple[str, object], ...] = ()

    def adapter(self, dtype=torch.float32):
        """With all metadata; among its values are a negative zero and subnormal numbers."""
        adapter = adapter_of(self.family, dtype)
        metadata = replace(adapter.metadata, positions=self.positions, **dict(self.said))
        own = {name: drawn(*shape, dtype=dtype) for name, shape in self.tensors}
        return replace(adapter, tensors={**adapter.tensors, **own}, metadata=metadata)


MAGNITUDES = tuple((f"{module}.lora_magnitude_vector", (6,)) for module in MODULES["roberta"])
QUERY = MODULES["roberta"][0]
PATTERNS = (("rank_pattern", {QUERY: 3}), ("alpha_pattern", {QUERY: 0.75}))
OF_RANK_3 = ((f"{QUERY}.lora_A", (3, 6)), (f"{QUERY}.lora_B", (6, 3)))


ROWS = (
    Row("roberta", "roberta"),
    Row("deberta-contents", "deberta", positions=False),
    Row("deberta-positions", "deberta", positions=True, lora=(("lora_positions", True),)),
    Row("deberta-unshared", "deberta", base=(("share_att_key", False),)),
    Row("gpt2", "gpt2"),
    Row("any-model", "plain"),
    Row("rslora", "roberta", said=(("variant", "rslora"),), lora=(("lora_variant", "rslora"),)),
    Row(
        "dora",
        "roberta",
        said=(("variant", "dora"),),
        tensors=MAGNITUDES,
        lora=(("lora_variant", "dora"),),
    ),
    Row(
        "rslora+dora",
        "roberta",
        said=(("variant", "rslora+dora"), ("freeze_A", True)),
        tensors=MAGNITUDES,
        lora=(("lora_variant", "rslora+dora"), ("lora_freeze_A", True)),
    ),
    Row(
        "patterns",
        "roberta",
        said=PATTERNS,
        tensors=OF_RANK_3,
        lora=(("lora_rank_pattern", {QUERY: 3}), ("lora_alpha_pattern", {QUERY: 0.75})),
    ),
    Row("embedding", "plain", said=(("embeddings", ("last",)),)),
    Row("slices", "plain", said=(("slices", {"last": (True, False)}),)),
)
CONTENTS = "its LoRA does not reach positions, as in the release"
POSITIONS = "its LoRA reaches positions (lora_positions), but the release's does not"
NO_FAMILY = "adapts neither DeBERTa-v2, GPT-2 nor RoBERTa"
FORBIDDEN = {
    ("deberta-contents", "peft"): CONTENTS,
    ("deberta-positions", "release"): POSITIONS,
    ("any-model", "merged"): NO_FAMILY,
    ("rslora", "release"): "its LoRA is of the variant rslora, which this format cannot record",
    ("dora", "release"): "its LoRA is of the variant dora, which this format cannot record",
    ("rslora+dora", "release"): "its LoRA is of the variant rslora+dora, which this format cannot",
    ("patterns", "release"): "its metadata has rank_pattern, which this format cannot record",
    ("embedding", "release"): "its LoRA is of the embeddings last, which this format cannot record",
    ("embedding", "merged"): NO_FAMILY,
    ("slices", "release"): "its metadata has slices, which this format cannot record",
    ("slices", "merged"): NO_FAMILY,
}
KEPT = [
    (row, format)
    for row, format in itertools.product(ROWS, FORMATS)
    if (row.name, format) not in FORBIDDEN
]
MERGED = [row for row in ROWS if (row.name, "merged") not in FORBIDDEN]


def pairs(cases):
    """Pairs of a row and formats as pytest's parameters."""
    return [pytest.param(*case, id="-".join((case[0].name, *case[1:]))) for case in cases]


def held(row, format):
    """The metadata that a format gives back when alpha is given with it."""
    metadata = row.adapter().metadata
    if format == "release" and row.family != "gpt2":
        # Its tensors say rank and targets; the release's DeBERTa had no LoRA on positions.
        positions = False if row.family == "deberta" else None
        return LoraMetadata(
            rank=metadata.rank, alpha=metadata.alpha, targets=metadata.targets, positions=positions
        )
    return metadata


def sources(path, format):
    """All that may be given for what was written to a path."""
    if format != "peft":
        return path, str(path)
    return path, str(path), path / CONFIG_NAME, path / WEIGHTS_NAMES[0]


# ---- written and read again ----


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize(("row", "format"), pairs(KEPT))
def test_it_keeps_every_bit_and_the_metadata(row, format, dtype, tmp_path):
    given, path = row.adapter(dtype), tmp_path / TARGETS[format]
    write_adapter(path, given, format)
    expected = held(row, format)
    for source in sources(path, format):
        read = read_adapter(source, lora_alpha=given.metadata.alpha)
        assert_same_bits(read.tensors, given.tensors)
        assert read.metadata == expected
        assert read.format == ("plain" if (row.family, format) == ("plain", "release") else format)
        # Without alpha, a format either holds all of it or says nothing.
        alone = read_adapter(source)
        assert alone.metadata == (expected if expected == given.metadata else None)


@pytest.mark.parametrize(
    ("row", "start", "format"),
    pairs((row, start, end) for (row, start), end in itertools.product(KEPT, FORMATS)),
)
def test_from_one_format_into_another(row, start, format, tmp_path):
    """What the first format lost stays lost, and what both hold is the same, to the bit."""
    given, (first, second) = row.adapter(), (tmp_path / "first", tmp_path / "second")
    for folder in (first, second):
        folder.mkdir()
    write_adapter(first / TARGETS[start], given, start)
    current = read_adapter(first / TARGETS[start], lora_alpha=given.metadata.alpha)
    reason = FORBIDDEN.get((row.name, format))
    if row.name == "deberta-unshared" and (start, format) == ("release", "peft"):
        reason = CONTENTS  # that its base shares none is in no file of the release's
    if reason:
        with pytest.raises(NeedsMergingError) as caught:
            write_adapter(second / TARGETS[format], current, format)
        assert reason in str(caught.value)
        assert listing(second) == set()
        return
    write_adapter(second / TARGETS[format], current, format)
    again = read_adapter(second / TARGETS[format], lora_alpha=given.metadata.alpha)
    assert_same_bits(again.tensors, given.tensors)
    nothing_lost = current.metadata == given.metadata
    expected = held(row, format) if nothing_lost else current.metadata
    if format == "peft":  # whose task says the head, as the tensors do
        expected = replace(expected, head=given.head)
    assert again.metadata == expected


# ---- merged ----


def merge(source, base, out, *flags):
    """What ``utils/convert.py --to merged`` does."""
    arguments = (source, out, "--to", "merged", "--base", base, *flags)
    convert.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An adapter of each row's family on a base, and the logits of both."""
    folder = tmp_path_factory.mktemp("trained")
    return {
        row.name: train(
            make_base(folder / row.name, row.family, **dict(row.base)), row.family, **dict(row.lora)
        )
        for row in MERGED
    }


@pytest.mark.parametrize("row", MERGED, ids=lambda row: row.name)
def test_merged_is_the_same_from_every_format(row, trained, tmp_path):
    given, found = trained[row.name], []
    assert given.adapter.metadata.positions == row.positions
    for format in [format for kept, format in KEPT if kept == row]:
        source, out = tmp_path / format / TARGETS[format], tmp_path / f"merged from {format}"
        source.parent.mkdir()
        write_adapter(source, given.adapter, format)
        flags = [] if read_adapter(source).metadata else ["--lora_alpha", 6]
        merge(source, given.base, out, *flags)
        close(plain_logits(out, row.family), given.logits)
        found.append((out / "model.safetensors").read_bytes())
    assert len(found) >= 2
    assert len(set(found)) == 1


@pytest.mark.parametrize("row", MERGED, ids=lambda row: row.name)
def test_merged_leaves_what_was_not_adapted_as_it_was(row, trained, tmp_path):
    given = trained[row.name]
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    merge(tmp_path / "in.safetensors", given.base, tmp_path / "out")
    merged, _ = read_tensors(tmp_path / "out" / "model.safetensors")
    adapted = {name.rpartition(".")[0] for name in given.adapter.tensors if "lora_" in name}
    kept = 0
    for name, tensor in read_tensors(given.base / "model.safetensors")[0].items():
        full = next((known for known in merged if f".{known}".endswith(f".{name}")), None)
        if full is None:
            assert name.startswith("pooler.")  # which a classifier of RoBERTa's does not use
        elif full.endswith("weight") and full.rpartition(".")[0] in adapted:
            assert not torch.equal(merged[full], tensor)
        else:
            assert_same_bits({full: merged[full]}, {full: tensor})
            kept += 1
    assert kept > len(adapted)


# ---- refused ----


@pytest.mark.parametrize(("row", "format"), pairs(KEPT))
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_files_are_refused(row, format, damage, tmp_path):
    path = tmp_path / TARGETS[format]
    write_adapter(path, row.adapter(), format)
    file = path / WEIGHTS_NAMES[0] if format == "peft" else path
    content = bytearray(file.read_bytes())
    if damage == "cut":
        del content[-9:]
    else:  # a bit of a value: torch's archives end with a list of their records
        tensor = max(row.adapter().tensors.values(), key=torch.numel)
        values = tensor.numpy().tobytes() if format == "release" else bytes(content[-4:])
        content[content.rindex(values)] ^= 1
    file.write_bytes(content)
    refused(lambda: read_adapter(path, lora_alpha=3), file)


@pytest.mark.parametrize("row", MERGED, ids=lambda row: row.name)
def test_a_merged_folder_that_is_damaged_is_refused(row, trained, tmp_path):
    given = trained[row.name]
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    merge(tmp_path / "in.safetensors", given.base, tmp_path / "out")
    refused(lambda: read_adapter(tmp_path / "out"), tmp_path / "out", "is a model without LoRA")
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="damaged"):
        plain_logits(tmp_path / "out", row.family)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("format", FORMATS)
def test_files_of_something_else_are_refused(row, format, tmp_path):
    """The format's file with a head alone; for PEFT, with another method's settings."""
    tensors = {name: t for name, t in tensors_of(row.family).items() if "lora_" not in name}
    tensors = tensors or {"some.weight": torch.ones(2, 2)}
    path = tmp_path / TARGETS[format]
    if format == "lora":
        save_file(tensors, path, with_checksum(tensors, row.adapter().metadata))
    elif format == "release":
        torch.save({"model_state_dict": tensors} if row.family == "gpt2" else tensors, path)
    else:
        peft_folder(path, peft_type="IA3")
    reason = "IA3" if format == "peft" else "tensors is LoRA's"
    refused(lambda: read_adapter(path, lora_alpha=3), path, reason)


@pytest.mark.parametrize(
    ("row", "format"),
    pairs((row, format) for row in ROWS for format in FORMATS if (row.name, format) in FORBIDDEN),
)
def test_forbidden_pairs_are_refused_with_their_reason(row, format, tmp_path):
    adapter = row.adapter()
    reason = FORBIDDEN[row.name, format]
    refused(
        lambda: write_adapter(tmp_path / TARGETS[format], adapter, format), adapter.source, reason
    )
    assert listing(tmp_path) == set()


def test_merging_needs_a_registered_family(tmp_path):
    write_adapter(tmp_path / "in.safetensors", adapter_of("plain"))
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=FORBIDDEN["any-model", "merged"]):
        merge(tmp_path / "in.safetensors", tmp_path, tmp_path / "out")
    assert tree(tmp_path) == before
