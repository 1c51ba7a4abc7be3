"""The small E2E corpus: its format, its splits, its vocabulary."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def module(load_example):
    return load_example("make_small_e2e.py")


@pytest.fixture(scope="module")
def made(module, tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    module.main(["--output_dir", str(folder)])
    return folder


def rows(folder: Path, split: str) -> list[list[str]]:
    return [line.split("||") for line in (folder / f"{split}.txt").read_text().splitlines()]


def test_splits_share_no_meaning(module, made):
    sources = {split: {row[0] for row in rows(made, split)} for split in ("train", "valid", "test")}
    assert {split: len(some) for split, some in sources.items()} == module.SPLITS
    assert not sources["train"] & sources["test"]
    assert not sources["valid"] & (sources["train"] | sources["test"])


def test_texts_say_what_the_meaning_lists(made):
    for source, text in rows(made, "train"):
        meaning = dict(part.split(" : ") for part in source.split(" | "))
        for key in ("name", "Type", "food", "near", "area"):
            assert meaning.get(key, "") in text, (source, text)
        assert ("child" in text.lower() or "family" in text) == ("family friendly" in meaning)
        words = ("cheap", "moderately priced", "expensive")
        assert any(word in text for word in words) == ("price" in meaning)


def test_lines_of_one_meaning_differ(made):
    lines = [tuple(row) for row in rows(made, "train")]
    assert len(set(lines)) == len(lines)


def test_the_same_seed_makes_the_same_bytes(module, made, tmp_path):
    module.main(["--output_dir", str(tmp_path / "again")])
    module.main(["--output_dir", str(tmp_path / "other"), "--seed", "1"])
    for name in ("train.txt", "test.txt", "vocab/encoder.json", "vocab/vocab.bpe"):
        assert (tmp_path / "again" / name).read_bytes() == (made / name).read_bytes()
    assert (tmp_path / "other/train.txt").read_bytes() != (made / "train.txt").read_bytes()


def test_vocabulary_is_one_of_gpt2s_kind(made, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "NLG/src")
    monkeypatch.delitem(sys.modules, "encoder", raising=False)
    from encoder import get_encoder

    encoder = get_encoder(str(made / "vocab"))
    assert encoder.encode("\n\n") == [628]
    for source, text in rows(made, "test"):
        for part in (source, " " + text):
            ids = encoder.encode(part)
            assert len(ids) < len(part) / 2
            assert encoder.decode(ids) == part
    ids = json.loads((made / "vocab/encoder.json").read_text())
    assert ids["<|endoftext|>"] == 50256
    assert len(set(ids.values())) == len(ids)
