"""Tests split_lora.py on full checkpoints of every format."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from bit_flips import flip_bit_in
from safetensors.torch import save_file

from loralib.adapters.fingerprint import fingerprint
from loralib.adapters.formats import read_adapter
from loralib.adapters.metadata import LoraMetadata
from loralib.errors import CheckpointError
from loralib.io.tensors import read_tensors, write_wrapped_tensors

SCRIPT = Path(__file__).resolve().parents[2] / "utils" / "split_lora.py"
CONFIG = {
    "apply_lora": True,
    "lora_r": 2,
    "lora_alpha": 4,
    "base_name_or_path": "roberta-base",
    "base_revision": "v1",
    "finetuning_task": "rte",
    "text_columns": ["premise", "claim"],
    "id2label": {"1": "no", "0": "yes", "10": "never", "2": "maybe"},
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("split_lora", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def full_checkpoint(names: str = "new") -> dict[str, torch.Tensor]:
    """Returns a checkpoint with LoRA on one projection, under new names or the release's first."""
    generator = torch.Generator().manual_seed(0)
    layer = "deberta.encoder.layer.0.attention.self."
    lora = {"new": "query_proj.lora_{}", "old": "query_lora_{}.weight"}[names]
    shapes = {
        f"{layer}query_proj.weight": (6, 6),
        layer + lora.format("A" if names == "new" else "a"): (2, 6),
        layer + lora.format("B" if names == "new" else "b"): (6, 2),
        "deberta.embeddings.word_embeddings.weight": (9, 6),
        "pooler.dense.weight": (6, 6),
        "classifier.bias": (4,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def checkpoint_folder(path: Path, names: str = "new", format: str = ".bin", config=CONFIG) -> Path:
    path.mkdir()
    if format == ".bin":
        torch.save(full_checkpoint(names), path / "pytorch_model.bin")
    else:
        save_file(full_checkpoint(names), path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("names", ["new", "old"])
@pytest.mark.parametrize("format", [".bin", ".safetensors"])
@pytest.mark.parametrize("source", ["folder", "file"])
@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_split(script, tmp_path, capsys, names, format, source, suffix):
    folder = checkpoint_folder(tmp_path / "full", names, format)
    given = folder if source == "folder" else next(folder.glob("*model*"))
    target = tmp_path / f"lora{suffix}"
    script.main([str(given), str(target)])
    assert capsys.readouterr().out.startswith(f"{target}: 4 tensors, 64 values")

    full = full_checkpoint(names)
    adapter = read_adapter(target)
    inside = "deberta.encoder.layer.0.attention.self.query_proj.lora_"
    expected = {f"{inside}A", f"{inside}B", "pooler.dense.weight", "classifier.bias"}
    assert adapter.tensors.keys() == expected
    in_order = [tensor for name, tensor in full.items() if "lora" in name]
    assert torch.equal(adapter.tensors[f"{inside}A"], in_order[0])
    assert torch.equal(adapter.tensors[f"{inside}B"], in_order[1])
    assert torch.equal(adapter.tensors["classifier.bias"], full["classifier.bias"])
    if suffix == ".bin":
        assert adapter.metadata is None
        return
    info = adapter.metadata
    assert (info.rank, info.alpha, info.targets) == (2, 4, ("query_proj",))
    assert (info.base, info.base_revision, info.task) == ("roberta-base", "v1", "rte")
    assert info.labels == ("yes", "no", "maybe", "never")
    assert info.text_columns == ("premise", "claim")
    assert info.base_fingerprint == fingerprint(full_checkpoint("new"))


@pytest.mark.parametrize("columns", ["review", 5, [1, 2], [], ["a", "b", "c"], ["a", "a"]])
def test_invalid_columns_of_texts_are_refused(script, tmp_path, columns):
    settings = {**CONFIG, "text_columns": columns}
    folder = checkpoint_folder(tmp_path / "full", config=settings)
    line = failure(script, folder, tmp_path / "lora.safetensors")
    assert line == f"{folder}: its config.json has an invalid value for text_columns: {columns!r}"


def test_a_new_folder_is_made(script, tmp_path):
    script.main([str(checkpoint_folder(tmp_path / "full")), str(tmp_path / "new/one/lora.bin")])
    assert len(read_adapter(tmp_path / "new/one/lora.bin", lora_alpha=4).tensors) == 4


def test_a_file_of_lora_alone_gives_no_fingerprint_of_its_base(script, tmp_path):
    folder = checkpoint_folder(tmp_path / "full")
    script.main([str(folder), str(folder / "lora.bin")])
    script.main([str(folder / "lora.bin"), str(tmp_path / "lora.safetensors")])
    assert read_adapter(tmp_path / "lora.safetensors").metadata.base_fingerprint is None


def test_what_a_file_records_itself_counts_and_not_the_settings_next_to_it(script, tmp_path):
    script.main([str(checkpoint_folder(tmp_path / "full")), str(tmp_path / "lora.safetensors")])
    config = {**CONFIG, "lora_alpha": CONFIG["lora_alpha"] + 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    script.main([str(tmp_path / "lora.safetensors"), str(tmp_path / "again.safetensors")])
    first, again = (read_adapter(tmp_path / f"{name}.safetensors") for name in ("lora", "again"))
    assert again.metadata == first.metadata


LAYER = "roberta.encoder.layer.0.output."


def baselines_folder(path: Path, **settings) -> Path:
    """Writes a checkpoint in which an adapter and the biases were trained."""
    path.mkdir()
    tensors = {
        f"{LAYER}dense.weight": torch.randn(4, 4),
        f"{LAYER}dense.bias": torch.randn(4),
        f"{LAYER}adapter.adapter_A.weight": torch.randn(2, 4),
        f"{LAYER}adapter.adapter_A.bias": torch.randn(2),
        "classifier.out_proj.bias": torch.randn(4),
    }
    torch.save(tensors, path / "pytorch_model.bin")
    both = {"apply_adapter": True, "adapter_type": "pfeiffer", "adapter_size": 2}
    config = {**CONFIG, "apply_lora": False, **both, "apply_bitfit": True, **settings}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
@pytest.mark.parametrize(
    ("part", "inside", "recorded"),
    [
        ("adapter", ["adapter.adapter_A.bias", "adapter.adapter_A.weight"], ("pfeiffer", 2)),
        ("bitfit", ["dense.bias"], None),
    ],
)
def test_adapters_and_biases(script, tmp_path, part, inside, recorded, suffix):
    folder, target = baselines_folder(tmp_path / "full"), tmp_path / f"x{suffix}"
    script.main([str(folder), str(target), "--part", part])
    kind = script.KINDS_BY_NAME[part]
    adapter, full = read_adapter(target, kind), read_tensors(folder / "pytorch_model.bin")[0]
    names = {f"{LAYER}{name}" for name in inside} | {"classifier.out_proj.bias"}
    assert adapter.tensors.keys() == names
    assert all(torch.equal(adapter.tensors[name], full[name]) for name in names)
    if suffix == ".bin":
        assert adapter.metadata is None
        return
    info = adapter.metadata
    other = {"adapter": "apply_bitfit", "bitfit": "apply_adapter"}[part]
    assert (info.base, info.task, info.trained_with) == ("roberta-base", "rte", (other,))
    assert info.base_fingerprint == fingerprint(
        {f"{LAYER}dense.weight": full[f"{LAYER}dense.weight"]}
    )
    assert recorded is None or (info.adapter_type, info.adapter_size) == recorded


@pytest.mark.parametrize(
    ("part", "settings", "target", "reason"),
    [
        ("bitfit", {"apply_bitfit": False}, "x.bin", "does not say that biases were trained"),
        ("adapter", {"adapter_size": None}, "x.safetensors", "that states type and size"),
        ("adapter", {"apply_adapter": False}, "x.safetensors", "write a .bin instead"),
        ("lora", {}, "x.bin", "holds no LoRA weights"),
        ("bitfit", {}, "full/config.json", "would replace a file of the checkpoint"),
    ],
)
def test_baselines_that_cannot_be_split(script, tmp_path, part, settings, target, reason):
    folder = baselines_folder(tmp_path / "full", **settings)
    assert reason in failure(script, folder, tmp_path / target, "--part", part)
    assert not (tmp_path / "x.bin").exists()


def failure(script, source: Path, target: Path, *flags: str) -> str:
    with pytest.raises((CheckpointError, OSError, ValueError)) as raised:
        script.main([str(source), str(target), *flags])
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_without_settings_there_is_no_metadata_to_write(script, tmp_path):
    folder = checkpoint_folder(tmp_path / "full", config=None)
    target = tmp_path / "lora.safetensors"
    assert "write a .bin instead" in failure(script, folder, target)
    assert not target.exists()
    script.main([str(folder), str(tmp_path / "lora.bin")])
    assert len(read_tensors(tmp_path / "lora.bin")[0]) == 4
    baselines = baselines_folder(tmp_path / "baselines")
    (baselines / "config.json").unlink()
    target = tmp_path / "biases.safetensors"
    assert "that states apply_bitfit" in failure(script, baselines, target, "--part", "bitfit")
    script.main([str(baselines), str(tmp_path / "biases.bin"), "--part", "bitfit"])
    assert len(read_tensors(tmp_path / "biases.bin")[0]) == 2


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("missing", "no such checkpoint file"),
        ("missing with its folder", "no such checkpoint file"),
        ("a circle of links", "symbolic links"),
        ("truncated", "damaged"),
        ("changed", "the checksum of "),
        ("changed, in a folder", "the checksum of "),
        ("without LoRA", "holds no LoRA weights"),
        ("damaged settings", "not a JSON file"),
        ("empty folder", "has no weights"),
    ],
)
def test_sources_that_cannot_be_split(script, tmp_path, damage, reason):
    folder = checkpoint_folder(tmp_path / "full")
    source = folder / "pytorch_model.bin"
    if damage == "missing":
        source.unlink()
    elif damage == "missing with its folder":
        source = tmp_path / "no folder" / source.name
    elif damage == "a circle of links":
        source = tmp_path / "circle"
        source.symlink_to(source)
    elif damage == "truncated":
        source.write_bytes(source.read_bytes()[:500])
    elif damage.startswith("changed"):
        (lora_a,) = (tensor for name, tensor in full_checkpoint().items() if "lora_A" in name)
        flip_bit_in(source, lora_a)
        source = folder if damage.endswith("folder") else source
    elif damage == "without LoRA":
        torch.save({"deberta.embeddings.weight": torch.ones(2, 2)}, source)
    elif damage == "damaged settings":
        (folder / "config.json").write_text("{")
    else:
        source.unlink()
        source = folder
    target = tmp_path / "lora.bin"
    target.write_text("mine")
    assert reason in failure(script, source, target)
    assert target.read_text() == "mine"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "with_lora.bin"])
def test_a_checkpoint_is_not_replaced_by_its_part(script, tmp_path, name):
    folder = checkpoint_folder(tmp_path / "full")
    source = (folder / "pytorch_model.bin").rename(folder / name)
    before = source.read_bytes()
    line = failure(script, source, folder / ".." / "full" / name, "--overwrite")
    assert "would replace a file of the checkpoint" in line
    assert source.read_bytes() == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "config.json"])
def test_a_checkpoints_own_file_is_not_overwritten(script, tmp_path, name):
    folder = checkpoint_folder(tmp_path / "checkpoint")
    before = (folder / name).read_bytes()
    assert "would replace a file of the checkpoint" in failure(script, folder, folder / name)
    assert (folder / name).read_bytes() == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "config.json"])
@pytest.mark.parametrize("linked", ["file", "folder", "files of a folder"])
def test_a_checkpoint_behind_links_is_not_overwritten(script, tmp_path, name, linked):
    folder = checkpoint_folder(tmp_path / "checkpoint")
    before, source = (folder / name).read_bytes(), tmp_path / "link"
    if linked == "folder":
        source.symlink_to(folder)
    elif linked == "file":
        source.symlink_to(folder / "pytorch_model.bin")
    else:
        source.mkdir()
        for file in folder.iterdir():
            (source / file.name).symlink_to(file)
    line = failure(script, source, folder / name, "--overwrite")
    assert "would replace a file of the checkpoint" in line
    assert (folder / name).read_bytes() == before


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"id2label": ["a"]}, "its config.json has an invalid value for id2label: ['a']"),
        ({"id2label": {"x": "y"}}, "its config.json has an invalid value for id2label: {'x': 'y'}"),
        ({"id2label": {"0": 1}}, "its config.json has an invalid value for id2label: {'0': 1}"),
        ({"architectures": 3}, "its config.json has an invalid value for architectures: 3"),
        (  # which the checkpoint's family does not have
            {"architectures": ["RobertaForMultipleChoice"]},
            "its config.json has an invalid value for architectures: ['RobertaForMultipleChoice']",
        ),
        ({"lora_rank_pattern": 3}, "its config.json has an invalid value for lora_rank_pattern: 3"),
        (
            {"lora_alpha_pattern": [3]},
            "its config.json has an invalid value for lora_alpha_pattern: [3]",
        ),
        (
            {"id2label": {"0": "a", "1": "b"}, "architectures": [3]},
            "its head has 3 outputs, but its config.json names 2 labels (id2label)",
        ),
    ],
)
def test_damaged_settings(script, tmp_path, settings, reason):
    folder = checkpoint_folder(tmp_path / "full", config={**CONFIG, **settings})
    tensors = {**full_checkpoint(), "pooler.dense.bias": torch.ones(6)}
    tensors |= {"classifier.weight": torch.ones(3, 6), "classifier.bias": torch.ones(3)}
    torch.save(tensors, folder / "pytorch_model.bin")
    assert failure(script, folder, tmp_path / "lora.safetensors") == f"{folder}: {reason}"
    assert not (tmp_path / "lora.safetensors").exists()


GPT2_INFO = LoraMetadata(rank=2, alpha=8, targets=("c_attn",), base="gpt2.bin", dropout=0.1)


@pytest.mark.parametrize("has_metadata", [True, False])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_whole_gpt2(script, tmp_path, has_metadata, suffix):
    """gpt2_ft.py writes files with metadata; the release's have none, but have the tied head."""
    module = "transformer.h.0.attn.c_attn"
    pair = {f"{module}.lora_A": torch.randn(4, 6), f"{module}.lora_B": torch.randn(12, 2)}
    base = {f"{module}.weight": torch.randn(6, 18), "transformer.wte.weight": torch.randn(9, 6)}
    head = {"lm_head.decoder.weight": base["transformer.wte.weight"]}
    whole = {
        f"module.{name}": t for name, t in (pair | base | ({} if has_metadata else head)).items()
    }
    write_wrapped_tensors(
        tmp_path / "whole.pt", whole, GPT2_INFO.to_metadata() if has_metadata else {}
    )
    target = tmp_path / f"lora{suffix}"
    if not has_metadata and suffix == ".safetensors":
        assert "write a .bin instead" in failure(script, tmp_path / "whole.pt", target)
        return
    script.main([str(tmp_path / "whole.pt"), str(target)])
    adapter = read_adapter(target)
    assert adapter.tensors.keys() == pair.keys()
    assert all(torch.equal(adapter.tensors[name], tensor) for name, tensor in pair.items())
    assert adapter.metadata == (GPT2_INFO if has_metadata else None)


def test_settings_with_another_rank_are_refused(script, tmp_path):
    folder = checkpoint_folder(tmp_path / "full", config={**CONFIG, "lora_r": 3})
    message = failure(script, folder, tmp_path / "lora.bin")
    assert "its LoRA weights have rank 2, but its config.json says 3" in message
    assert not (tmp_path / "lora.bin").exists()


def test_the_releases_own_call_may_be_repeated(script, tmp_path):
    folder = checkpoint_folder(tmp_path / "full")
    target = folder / "lora.bin"
    script.main([str(folder), str(target)])
    first = target.read_bytes()
    torch.save({n: t + 1 for n, t in full_checkpoint().items()}, folder / "pytorch_model.bin")
    script.main([str(folder), str(target)])
    second = target.read_bytes()
    assert second != first
    script.main([str(folder), str(target)])
    assert target.read_bytes() == second


def whole(path: Path) -> None:
    torch.save(full_checkpoint(), path)


def head_alone(path: Path) -> None:
    torch.save({"classifier.bias": torch.ones(4)}, path)


def text(path: Path) -> None:
    path.write_text("mine")


@pytest.mark.parametrize("write_target", [whole, head_alone, text])
@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_existing_files_are_overwritten_only_on_request(script, tmp_path, write_target, suffix):
    folder, target = checkpoint_folder(tmp_path / "full"), tmp_path / f"out{suffix}"
    (folder / "broken link").symlink_to("gone")
    write_target(target)
    before = target.read_bytes()
    message = failure(script, folder, target)
    assert message.endswith(f"{target}: exists already; give another name, or --overwrite")
    assert target.read_bytes() == before
    script.main([str(folder), str(target), "--overwrite"])
    assert len(read_adapter(target).tensors) == 4
    if suffix == ".safetensors":  # the release never wrote this format
        assert "--overwrite" in failure(script, folder, target)


def test_other_parts_do_not_replace_a_lora_file(script, tmp_path):
    folder, target = baselines_folder(tmp_path / "full"), tmp_path / "out.bin"
    script.main([str(checkpoint_folder(tmp_path / "lora")), str(target)])
    before = target.read_bytes()
    assert "--overwrite" in failure(script, folder, target, "--part", "bitfit")
    assert target.read_bytes() == before
    script.main([str(folder), str(target), "--part", "bitfit", "--overwrite"])
    assert target.read_bytes() != before


def test_overwriting_spares_the_checkpoints_own_files(script, tmp_path):
    folder = checkpoint_folder(tmp_path / "full")
    before = (folder / "config.json").read_bytes()
    line = failure(script, folder, folder / "config.json", "--overwrite")
    assert "would replace a file of the checkpoint" in line
    assert (folder / "config.json").read_bytes() == before
