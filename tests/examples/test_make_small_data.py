import pytest

from transformers.data.processors import load_glue_split

FILES = ("corpus.txt", "SST-2/train.tsv", "SST-2/dev.tsv", "SST-2/test.tsv")


@pytest.fixture(scope="module")
def small_data(tmp_path_factory, load_example):
    module = load_example("make_small_data.py")
    folder = tmp_path_factory.mktemp("small_data")
    module.main(["--output_dir", str(folder)])
    return module, folder


def splits(folder):
    return {s: load_glue_split("sst2", folder, s) for s in ("train", "validation", "test")}


@pytest.mark.slow
def test_a_seed_makes_the_same_bytes_and_another_seed_others(small_data, tmp_path):
    module, folder = small_data
    for name, seed in (("same", 0), ("other", 1)):
        module.main(["--output_dir", str(tmp_path / name), "--seed", str(seed)])
    for file in FILES:
        assert (tmp_path / "same" / file).read_bytes() == (folder / file).read_bytes()
        assert (tmp_path / "other" / file).read_bytes() != (folder / file).read_bytes()


def test_sizes_and_balance(small_data):
    module, folder = small_data
    data = splits(folder)
    sizes = {split: len(rows) for split, rows in data.items()}
    assert sizes == {"train": 1000, "validation": 500, "test": 500}
    for split in ("train", "validation"):
        share = sum(row.label == "1" for row in data[split]) / len(data[split])
        assert share == pytest.approx(module.POSITIVE_SHARE)
    assert len((folder / "corpus.txt").read_text().splitlines()) == module.CORPUS_LINES


def test_nothing_to_be_judged_by_is_seen_in_training(small_data):
    _, folder = small_data
    texts = {split: {row.text_a for row in rows} for split, rows in splits(folder).items()}
    assert not texts["train"] & texts["validation"]
    assert not texts["train"] & texts["test"]
    assert not texts["validation"] & texts["test"]
    corpus = (folder / "corpus.txt").read_text()
    for sentence in texts["validation"] | texts["test"]:
        assert sentence.removesuffix(" .") not in corpus


def test_half_of_the_adjectives_are_not_in_the_training_set(small_data):
    module, folder = small_data
    adjectives = {*module.POSITIVE, *module.NEGATIVE}
    seen = {split: set() for split in ("train", "validation")}
    for split, words in seen.items():
        for row in splits(folder)[split]:
            words |= adjectives & set(row.text_a.split())
    assert len(seen["train"]) == len(adjectives) * (1 - module.UNSEEN_SHARE)
    assert seen["validation"] == adjectives
    assert adjectives <= set((folder / "corpus.txt").read_text().split())
