"""Every family in every format: bit-exact round trips, conversion, merging, and what is refused.

A row is an adapter of a family. DeBERTa-v2 has three, which differ in whether LoRA reaches relative
positions, and in whether these share their projections with contents. A column is a format that
`write_adapter` writes, or "merged", which utils/convert.py makes of an adapter and its base. A pair
of both is either bit-exact, or refused for the reason in `FORBIDDEN`.
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
        name: the row's name in test ids.
        family: as in adapter_files.py; "plain" is a model of no registered family.
        positions: `positions` of the metadata.
        metadata: further fields of the metadata, such as the variant.
        tensors: the shapes of tensors that replace those of the family or are added to them.
        base: settings of the base's model.
        lora: settings of the model with LoRA.
    """

    name: str
    family: str
    positions: bool | None = None
    metadata: tuple[tuple[str, object], ...] = ()
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    base: tuple[tuple[str, object], ...] = ()
    lora: tuple[tuple[str, object], ...] = ()

    def adapter(self, dtype=torch.float32):
        """The adapter, with all metadata; its values include a negative zero and a subnormal."""
        adapter = adapter_of(self.family, dtype)
        metadata = replace(adapter.metadata, positions=self.positions, **dict(self.metadata))
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
    Row("rslora", "roberta", metadata=(("variant", "rslora"),), lora=(("lora_variant", "rslora"),)),
    Row(
        "dora",
        "roberta",
        metadata=(("variant", "dora"),),
        tensors=MAGNITUDES,
        lora=(("lora_variant", "dora"),),
    ),
    Row(
        "rslora+dora",
        "roberta",
        metadata=(("variant", "rslora+dora"), ("freeze_A", True)),
        tensors=MAGNITUDES,
        lora=(("lora_variant", "rslora+dora"), ("lora_freeze_A", True)),
    ),
    Row(
        "patterns",
        "roberta",
        metadata=PATTERNS,
        tensors=OF_RANK_3,
        lora=(("lora_rank_pattern", {QUERY: 3}), ("lora_alpha_pattern", {QUERY: 0.75})),
    ),
    Row("embedding", "plain", metadata=(("embeddings", ("last",)),)),
    Row("slices", "plain", metadata=(("slices", {"last": (True, False)}),)),
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
ALLOWED = [
    (row, format)
    for row, format in itertools.product(ROWS, FORMATS)
    if (row.name, format) not in FORBIDDEN
]
MERGEABLE = [row for row in ROWS if (row.name, "merged") not in FORBIDDEN]


def pairs(cases):
    """Tuples of a row and formats, as parameters with ids."""
    return [pytest.param(*case, id="-".join((case[0].name, *case[1:]))) for case in cases]


def expected_metadata(row, format):
    """The metadata that is read from a format if alpha is given."""
    metadata = row.adapter().metadata
    if format == "release" and row.family != "gpt2":
        # Its tensors give rank and targets. The release's DeBERTa has no LoRA on positions.
        positions = False if row.family == "deberta" else None
        return LoraMetadata(
            rank=metadata.rank, alpha=metadata.alpha, targets=metadata.targets, positions=positions
        )
    return metadata


def sources(path, format):
    """All paths by which an adapter that was written to `path` can be read."""
    if format != "peft":
        return path, str(path)
    return path, str(path), path / CONFIG_NAME, path / WEIGHTS_NAMES[0]


# ---- written and read again ----


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize(("row", "format"), pairs(ALLOWED))
def test_a_round_trip_keeps_every_bit_and_the_metadata(row, format, dtype, tmp_path):
    given, path = row.adapter(dtype), tmp_path / TARGETS[format]
    write_adapter(path, given, format)
    expected = expected_metadata(row, format)
    for source in sources(path, format):
        read = read_adapter(source, lora_alpha=given.metadata.alpha)
        assert_same_bits(read.tensors, given.tensors)
        assert read.metadata == expected
        assert read.format == ("plain" if (row.family, format) == ("plain", "release") else format)
        # Without alpha, a format gives all of the metadata or none.
        alone = read_adapter(source)
        assert alone.metadata == (expected if expected == given.metadata else None)


@pytest.mark.parametrize(
    ("row", "start", "format"),
    pairs((row, start, end) for (row, start), end in itertools.product(ALLOWED, FORMATS)),
)
def test_converting_one_format_into_another(row, start, format, tmp_path):
    """Tensors are bit-exact. Metadata that the first format does not record is lost."""
    given, (first, second) = row.adapter(), (tmp_path / "first", tmp_path / "second")
    for folder in (first, second):
        folder.mkdir()
    write_adapter(first / TARGETS[start], given, start)
    current = read_adapter(first / TARGETS[start], lora_alpha=given.metadata.alpha)
    reason = FORBIDDEN.get((row.name, format))
    if row.name == "deberta-unshared" and (start, format) == ("release", "peft"):
        reason = CONTENTS  # the release's files do not record that the base shares no projections
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
    expected = expected_metadata(row, format) if nothing_lost else current.metadata
    if format == "peft":  # whose task type names the head, as the tensors do
        expected = replace(expected, head=given.head)
    assert again.metadata == expected


# ---- merged ----


def merge(source, base, out, *flags):
    """Runs ``utils/convert.py --to merged``."""
    arguments = (source, out, "--to", "merged", "--base", base, *flags)
    convert.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Row -> an adapter of its family, the base, and the logits of the base with the adapter."""
    folder = tmp_path_factory.mktemp("trained")
    return {
        row.name: train(
            make_base(folder / row.name, row.family, **dict(row.base)), row.family, **dict(row.lora)
        )
        for row in MERGEABLE
    }


@pytest.mark.parametrize("row", MERGEABLE, ids=lambda row: row.name)
def test_merging_gives_the_same_file_from_every_format(row, trained, tmp_path):
    given, merged = trained[row.name], []
    assert given.adapter.metadata.positions == row.positions
    for format in [format for other, format in ALLOWED if other == row]:
        source, out = tmp_path / format / TARGETS[format], tmp_path / f"merged from {format}"
        source.parent.mkdir()
        write_adapter(source, given.adapter, format)
        flags = [] if read_adapter(source).metadata else ["--lora_alpha", 6]
        merge(source, given.base, out, *flags)
        close(plain_logits(out, row.family), given.logits)
        merged.append((out / "model.safetensors").read_bytes())
    assert len(merged) >= 2
    assert len(set(merged)) == 1


@pytest.mark.parametrize("row", MERGEABLE, ids=lambda row: row.name)
def test_merging_changes_adapted_weights_only(row, trained, tmp_path):
    given = trained[row.name]
    write_adapter(tmp_path / "in.safetensors", given.adapter)
    merge(tmp_path / "in.safetensors", given.base, tmp_path / "out")
    merged, _ = read_tensors(tmp_path / "out" / "model.safetensors")
    adapted = {name.rpartition(".")[0] for name in given.adapter.tensors if "lora_" in name}
    unchanged = 0
    for name, tensor in read_tensors(given.base / "model.safetensors")[0].items():
        full = next((known for known in merged if f".{known}".endswith(f".{name}")), None)
        if full is None:
            assert name.startswith("pooler.")  # which RoBERTa's classifiers do not use
        elif full.endswith("weight") and full.rpartition(".")[0] in adapted:
            assert not torch.equal(merged[full], tensor)
        else:
            assert_same_bits({full: merged[full]}, {full: tensor})
            unchanged += 1
    assert unchanged > len(adapted)


# ---- refused ----


@pytest.mark.parametrize(("row", "format"), pairs(ALLOWED))
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_files_are_refused(row, format, damage, tmp_path):
    path = tmp_path / TARGETS[format]
    write_adapter(path, row.adapter(), format)
    file = path / WEIGHTS_NAMES[0] if format == "peft" else path
    content = bytearray(file.read_bytes())
    if damage == "cut":
        del content[-9:]
    else:  # flips a bit of a value: torch's archives end with other data, a list of their records
        tensor = max(row.adapter().tensors.values(), key=torch.numel)
        values = tensor.numpy().tobytes() if format == "release" else bytes(content[-4:])
        content[content.rindex(values)] ^= 1
    file.write_bytes(content)
    refused(lambda: read_adapter(path, lora_alpha=3), file)


@pytest.mark.parametrize("row", MERGEABLE, ids=lambda row: row.name)
def test_a_merged_folder_is_no_adapter_and_is_refused_if_damaged(row, trained, tmp_path):
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
def test_files_without_lora_are_refused(row, format, tmp_path):
    """The format's file with only a head; for PEFT, a folder with another method's settings."""
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
