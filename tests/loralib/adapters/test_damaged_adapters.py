"""Tests that damaged adapters of every format are refused in one line or load correctly.

What correctly means depends on whether a format has checksums:

- This project's safetensors and PEFT folders have a checksum of their tensors and metadata, and
  torch's archives one of each record. A damaged one raises `CheckpointError`, or gives exactly the
  tensors and metadata that were written. One exception: the base's name and revision in a PEFT
  folder, which users may change, are those of its config.
- Torch's older files, folders that PEFT itself wrote, and archives whose checksums were recomputed
  after the damage (as no accident does) cannot show that a number has changed. A damaged one raises
  `CheckpointError`, from the reader or from `load_into` a model of the right shape; or it gives the
  right names and shapes, and finite values, which may be wrong.

There is never another exception, a hang, or a tensor for which the file is too small.
"""

import faulthandler
import io
import json
import math
import random
import signal
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import all_families  # noqa: F401
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loralib as lora
from loralib.adapters.adapter import Adapter, adapter_tensors
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.adapters.loading import load_into
from loralib.adapters.metadata import LoraMetadata
from loralib.errors import CheckpointError

VARIANTS = 450  # damaged ones of each format
SECONDS = 10  # limit for reading one variant, which takes about 0.01 s

# With a damaged pickle, torch shows various warnings before it fails.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

Random = random.Random
Damage = Callable[[bytes, Random], bytes]


# ------------------------------------------------------------------------------------------------
# Files to damage
# ------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """Two layers under `roberta.`, and a head outside of it."""

    def __init__(self, seed: int = 0):
        super().__init__()
        layers = [
            nn.ModuleDict({name: lora.Linear(8, 8, r=2, lora_alpha=4) for name in ("query", "key")})
            for _ in range(2)
        ]
        self.roberta = nn.ModuleDict({"layer": nn.ModuleList(layers)})
        self.classifier = nn.Linear(8, 3)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)


INFO = LoraMetadata(
    rank=2,
    alpha=4,
    targets=("key", "query"),
    dropout=0.1,
    base="some/base",
    base_revision="main",
    base_fingerprint="0123456789abcdef",
    task="mnli",
    labels=("entailment", "neutral", "contradiction"),
)
ROBERTA = adapter_tensors(Tiny().state_dict())
GPT2 = {
    f"transformer.h.{number}.attn.c_attn.lora_{ab}": torch.arange(1.0, 33).reshape(shape) / 7
    for number in range(2)
    for ab, shape in (("A", (4, 8)), ("B", (16, 2)))
}
GPT2_INFO = replace(INFO, targets=("c_attn",), task=None, labels=None)


def write_lora(folder: Path) -> None:
    write_adapter(folder / "lora.safetensors", Adapter(ROBERTA, INFO))


def write_release(folder: Path) -> None:
    write_adapter(folder / "lora.bin", Adapter(ROBERTA, INFO))


def write_wrapped(folder: Path) -> None:
    write_adapter(folder / "lora.pt", Adapter(GPT2, GPT2_INFO))


def write_peft(folder: Path) -> None:
    write_adapter(folder / "peft", Adapter(ROBERTA, INFO), "peft")


def write_legacy(folder: Path) -> None:
    torch.save(ROBERTA, folder / "legacy.bin", _use_new_zipfile_serialization=False)


def write_foreign(folder: Path) -> None:
    """Writes a folder as PEFT does: with more settings, and without this project's metadata."""
    write_peft(folder)
    config = folder / "peft" / "adapter_config.json"
    settings = json.loads(config.read_text())
    more = {"alpha_pattern": {}, "rank_pattern": {}, "use_dora": False, "corda_config": None}
    config.write_text(json.dumps(settings | more))
    ends = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight"}
    tensors = {}
    for name, tensor in ROBERTA.items():
        module, _, last = name.rpartition(".")
        tensors[f"base_model.model.{module}.{ends.get(last, last)}"] = tensor
    save_file(tensors, folder / "peft" / "adapter_model.safetensors", {"format": "pt"})


# ------------------------------------------------------------------------------------------------
# Damage of any file
# ------------------------------------------------------------------------------------------------


def cut(content: bytes, rng: Random) -> bytes:
    return content[: rng.randrange(len(content))]


def flip(content: bytes, rng: Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, rng.randrange(2, 9)))):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def overwrite(content: bytes, rng: Random) -> bytes:
    damaged, size = bytearray(content), rng.choice((1, 2, 8, 64))
    start = rng.randrange(len(damaged))
    fill = rng.choice((rng.randbytes(size), b"\0" * size, b"\xff" * size, b"\n" * size))
    damaged[start : start + size] = fill[: len(damaged) - start]
    return bytes(damaged)


def delete(content: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(content))
    return content[:start] + content[start + rng.choice((1, 2, 8, 64, 512)) :]


def insert(content: bytes, rng: Random) -> bytes:
    start, size = rng.randrange(len(content) + 1), rng.choice((1, 2, 8, 64, 4096))
    piece = rng.choice((rng.randbytes(size), b"\0" * size, content[:size], content[-size:]))
    return content[:start] + piece + content[start:]


def move(content: bytes, rng: Random) -> bytes:
    """Copies one part over another, as if blocks of a disk were mixed up."""
    damaged, size = bytearray(content), rng.choice((4, 16, 64, 512))
    source, target = (rng.randrange(max(1, len(damaged) - size)) for _ in range(2))
    damaged[target : target + size] = content[source : source + size]
    return bytes(damaged[: len(content)])


BYTES = (cut, flip, flip, flip, overwrite, delete, insert, move)


# ------------------------------------------------------------------------------------------------
# Damage of a safetensors header, which stays JSON of the stated length
# ------------------------------------------------------------------------------------------------

DEEP = "[" * 5000 + "]" * 5000
HUGE = 10**400
JUNK = (
    *(None, True, False, 0, 1, 3, -1, 2.5, -0.0, 1e308, 5e-324, 2**63, HUGE, -HUGE),
    *(math.nan, math.inf, "", "LORA", "x\ny", "\u2028\r", "\ud800", "0", "\x00", "z" * 9999),
    *([], {}, [[]], [3], ["query"], {"a": 1}, {"query": 2}, {"query": None}, {"x\ny": [1]}),
)
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I32": 4, "I64": 8, "U8": 1, "BOOL": 1} | {
    **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8, "U16": 2, "F4": 1, "F99": 4},
}


def edit_name(header: dict, rng: Random) -> None:
    old, other = rng.choice(sorted(header)), rng.choice(sorted(header))
    where = rng.randrange(len(old))
    new = rng.choice(
        (
            old[:where] + rng.choice("aAB01._\n\u2028") + old[where + 1 :],
            old[:where] + old[where + 1 :],
            "",
            f"module.{old}",
            f"base_model.model.{old}",
            other.replace("0", "1"),
            old.replace("lora_A", "lora_B"),
            old.replace("layer", "block"),
            f"{old}\n",
        )
    )
    header[new] = header.pop(old)


def edit_dtype(header: dict, rng: Random) -> None:
    """Changes a dtype; in most cases with a shape that takes the same number of bytes."""
    entry = header[rng.choice(sorted(header))]
    dtype = rng.choice((*SIZES, *JUNK))
    if isinstance(dtype, str) and dtype in SIZES and rng.random() < 0.8:
        size = SIZES[dtype]
        last = entry["shape"][-1] * 4 // size
        entry["shape"] = [*entry["shape"][:-1], last]
    entry["dtype"] = dtype


def edit_shape(header: dict, rng: Random) -> None:
    entry = header[rng.choice(sorted(header))]
    shape = entry["shape"]
    entry["shape"] = rng.choice(
        (
            shape[::-1],
            [math.prod(shape)],
            [1, *shape],
            [*shape, 1],
            [],
            [0, *shape],
            [-1],
            [2**62, 4],
            [2**63, 2**63],
            [shape[0] * 2, *(size // 2 for size in shape[1:])],
            [*shape[:-1], shape[-1] + 1],
            [shape[0], 1.5],
            [rng.choice(JUNK)],
            rng.choice(JUNK),
        )
    )


def edit_offsets(header: dict, rng: Random) -> None:
    first, second = (header[rng.choice(sorted(header))] for _ in range(2))
    start, end = first["data_offsets"]
    if rng.random() < 0.3:
        first["data_offsets"], second["data_offsets"] = second["data_offsets"], [start, end]
        return
    first["data_offsets"] = rng.choice(
        (
            [end, start],
            [start + 4, end + 4],
            [start, end + 4],
            [0, 0],
            [start, 2**63],
            [2**64 - 4, 2**64],
            [-4, end],
            second["data_offsets"],
            [rng.choice(JUNK), end],
            rng.choice(JUNK),
        )
    )


def edit_metadata(metadata: dict, rng: Random) -> None:
    """Changes one field. (Without any field, a file would be a valid one of another program.)"""
    key = rng.choice(sorted(metadata))
    text = metadata[key]
    where = rng.randrange(len(text))
    kind = rng.choice(("character", "junk", "raw", "name", "gone", "deep", "another"))
    if kind == "character":
        metadata[key] = text[:where] + rng.choice('0123459"[],.x\n') + text[where + 1 :]
    elif kind == "junk":
        metadata[key] = json.dumps(rng.choice(JUNK))
    elif kind == "raw":
        metadata[key] = rng.choice(JUNK)
    elif kind == "name":
        metadata[rng.choice((f"{key}_", key[1:], "rank", "task"))] = metadata.pop(key)
    elif kind == "gone":
        del metadata[key]
    elif kind == "deep":
        metadata[key] = DEEP
    else:
        metadata[rng.choice(("dropout", "bias", "trained_with", "who"))] = json.dumps(
            rng.choice(JUNK)
        )


def edit_header(content: bytes, rng: Random) -> bytes:
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    metadata = header.pop("__metadata__")
    edits = (edit_name, edit_dtype, edit_dtype, edit_shape, edit_offsets)
    # Metadata of other programs is ignored, so that damage of it would have no effect.
    edit = rng.choice((*edits, *(edit_metadata,) * (4 if "digest" in metadata else 0)))
    edit(metadata if edit is edit_metadata else header, rng)
    text = json.dumps({"__metadata__": metadata, **header}, ensure_ascii=rng.random() < 0.8)
    encoded = text.encode("utf-8", "surrogatepass")
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + content[end:]


# ------------------------------------------------------------------------------------------------
# Damage of PEFT's settings, and of the pickle within an archive
# ------------------------------------------------------------------------------------------------


def edit_settings(settings: dict, rng: Random, more: tuple[str, ...]) -> str:
    key = rng.choice(sorted(settings))
    kind = rng.choice(("value", "value", "value", "gone", "name", "more", "deep", "twice", "text"))
    if kind == "value":
        settings[key] = rng.choice(JUNK)
    elif kind == "gone":
        del settings[key]
    elif kind == "name":
        settings[rng.choice((f"{key}\n", key[1:], key.upper()))] = settings.pop(key)
    elif kind == "more":
        settings[rng.choice(more)] = rng.choice(JUNK)
    elif kind == "deep":
        text = '{"a":' * 5000 + "1" + "}" * 5000
        return json.dumps({**settings, key: 0}).replace(": 0", f": {rng.choice((DEEP, text))}", 1)
    elif kind == "twice":
        return json.dumps(settings)[:-1] + f", {json.dumps(key)}: {json.dumps(rng.choice(JUNK))}}}"
    else:
        digits = "9" * 5000  # more than Python converts to an integer
        return rng.choice((json.dumps(list(settings)), "", "null", f'{{"r": {digits}}}', DEEP))
    return json.dumps(settings)


def edit_config(*more: str) -> Damage:
    def edit(content: bytes, rng: Random) -> bytes:
        text = edit_settings(json.loads(content), rng, more)
        return text.encode("utf-8", "surrogatepass")

    return edit


def edit_pickle(content: bytes, rng: Random) -> bytes:
    """Damages the pickle in an archive, and recomputes all checksums."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in records if name.endswith("data.pkl"))
    records[pickled] = rng.choice(BYTES)(records[pickled], rng)
    sealed = io.BytesIO()
    with zipfile.ZipFile(sealed, "w") as archive:
        for name, record in records.items():
            archive.writestr(name, record)
    return sealed.getvalue()


# ------------------------------------------------------------------------------------------------
# The properties
# ------------------------------------------------------------------------------------------------


class Hang(BaseException):
    """Raised after the time limit. No `except Exception` catches it."""


@contextmanager
def time_limit():
    """Ends a variant that hangs: by a signal or, if that has no effect, by ending the process."""
    faulthandler.dump_traceback_later(6 * SECONDS, exit=True, file=sys.__stderr__)
    try:
        if not hasattr(signal, "SIGALRM"):
            yield
            return

        def stop(*_):
            raise Hang

        before = signal.signal(signal.SIGALRM, stop)
        signal.alarm(SECONDS)
        try:
            yield
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    finally:
        faulthandler.cancel_dump_traceback_later()


def is_same(adapter: Adapter, whole: Adapter, base_may_differ: bool) -> bool:
    info = adapter.metadata
    if base_may_differ and info is not None:
        base = {"base": whole.metadata.base, "base_revision": whole.metadata.base_revision}
        info = replace(info, **base)
    return (
        info == whole.metadata
        and adapter.tensors.keys() == whole.tensors.keys()
        and all(
            adapter.tensors[name].dtype == tensor.dtype
            and torch.equal(adapter.tensors[name], tensor)
            for name, tensor in whole.tensors.items()
        )
    )


def check_sound(adapter: Adapter, size: int) -> None:
    """Checks what must hold for anything that is read, whatever happened to the file."""
    total = 0
    for tensor in adapter.tensors.values():
        assert tensor.is_floating_point()
        total += tensor.numel() * tensor.element_size()
        assert total <= 2 * size
        assert torch.isfinite(tensor).all()
    if adapter.metadata is not None:
        assert type(adapter.metadata.rank) is int
        assert adapter.metadata.rank >= 1
        assert type(adapter.metadata.alpha) in (int, float)
        assert 0 < float(adapter.metadata.alpha) < math.inf


def outcome(source: Path, whole: Adapter, checked: bool, base_may_differ: bool, size: int) -> str:
    """Returns "refused", "right" or, for a format without checksums, "other values"."""
    try:
        adapter = read_adapter(source)
        check_sound(adapter, size)
        if checked:
            assert is_same(adapter, whole, base_may_differ)
            return "right"
        load_into(Tiny(), adapter)
    except CheckpointError as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message
        assert str(source) in message
        return "refused"
    shapes = {name: tensor.shape for name, tensor in adapter.tensors.items()}
    assert shapes == {name: tensor.shape for name, tensor in whole.tensors.items()}
    return "right" if is_same(adapter, whole, base_may_differ) else "other values"


# By format: its writer, the kinds of damage by file, and whether it has checksums.
CONFIG, WEIGHTS = "peft/adapter_config.json", "peft/adapter_model.safetensors"
MORE = ("alpha_pattern", "rank_pattern", "use_dora", "use_rslora", "lora_bias", "of\ntomorrow")
FORMATS = {
    "lora": (write_lora, {"lora.safetensors": (*BYTES, *(edit_header,) * 6)}, True),
    "release": (write_release, {"lora.bin": BYTES}, True),
    "wrapped": (write_wrapped, {"lora.pt": BYTES}, True),
    "peft": (
        write_peft,
        # Not alpha_pattern, which would make it a valid folder of another adapter.
        {
            WEIGHTS: (*BYTES, *(edit_header,) * 4),
            CONFIG: (*BYTES, *(edit_config(*MORE[1:]),) * 6),
        },
        True,
    ),
    "foreign": (
        write_foreign,
        {WEIGHTS: (*BYTES, *(edit_header,) * 4), CONFIG: (*BYTES, *(edit_config(*MORE),) * 6)},
        False,
    ),
    "legacy": (write_legacy, {"legacy.bin": BYTES}, False),
    "resealed": (write_release, {"lora.bin": (edit_pickle,)}, False),
}


@pytest.mark.fuzz
@pytest.mark.parametrize("format", FORMATS)
def test_damaged_adapters_are_refused_or_load_correctly(tmp_path, format):
    """What correctly means is at the top of this file."""
    write, targets, checked = FORMATS[format]
    write(tmp_path)
    paths = [tmp_path / name for name in targets]
    source = tmp_path / "peft" if "peft" in str(paths[0]) else paths[0]
    contents = {path: path.read_bytes() for path in paths}
    whole = read_adapter(source)
    whole = replace(whole, tensors={name: t.clone() for name, t in whole.tensors.items()})
    assert is_same(whole, Adapter(GPT2 if format == "wrapped" else ROBERTA, whole.metadata), False)
    rng, counts, failures = Random(format), Counter(), []
    for number in range(VARIANTS):
        path = rng.choice(paths)
        damage = rng.choice(targets[str(path.relative_to(tmp_path))])
        damaged = damage(contents[path], rng)
        path.write_bytes(damaged)
        size = sum(len(content) for content in contents.values()) + len(damaged)
        try:
            with time_limit():
                result = outcome(source, whole, checked, path.name.endswith("json"), size)
        except (Exception, Hang) as error:
            result = "failed"
            failures.append(f"{number} {path.name} {damage.__name__}: {error!r}"[:300])
        counts[result] += 1
        path.write_bytes(contents[path])
    assert not failures, "\n".join([f"{len(failures)} of {VARIANTS}", *failures[:20]])
    # The damage was neither too small nor too great for a meaningful test.
    assert counts["refused"] > VARIANTS / 4
    assert counts["refused"] < VARIANTS
    assert not checked or counts["other values"] == 0
