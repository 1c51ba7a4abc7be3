"""The processors read GLUE's files, know its tasks, and name the line of an error."""

from pathlib import Path

import pytest

from transformers.data.processors.glue import (
    GLUE_TASKS,
    glue_file,
    glue_output_modes,
    glue_processors,
    glue_task,
    glue_tasks_num_labels,
    load_glue_split,
)
from transformers.data.processors.utils import DataProcessor, InputExample, InputFeatures

REAL = Path(__file__).parents[3] / "shared" / "data" / "glue"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the GLUE files of ../shared are absent")

MNLI = (
    "index|promptID|pairID|genre|sentence1_binary_parse|sentence2_binary_parse|sentence1_parse|"
    "sentence2_parse|sentence1|sentence2"
)
STSB = "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2"
# task, split, the file's header and a row as the benchmark publishes them ("|" for a tab),
# and what is read
LAYOUTS = [
    ("cola", "train", None, "gj04|0|*|A .", ("A .", None, "0")),
    ("cola", "validation", None, "gj04|1||A .", ("A .", None, "1")),
    ("cola", "test", "index|sentence", "0|A .", ("A .", None, None)),
    ("sst2", "train", "sentence|label", "a film |1", ("a film ", None, "1")),
    ("sst2", "test", "index|sentence", "0|a film", ("a film", None, None)),
    (
        "mrpc",
        "validation",
        "Quality|#1 ID|#2 ID|#1 String|#2 String",
        "1|7|8|A|B",
        ("A", "B", "1"),
    ),
    ("mrpc", "test", "index|#1 ID|#2 ID|#1 String|#2 String", "0|7|8|A|B", ("A", "B", None)),
    (
        "stsb",
        "train",
        f"{STSB}|score",
        "0|main-captions|MSRvid|2012test|0001|none|none|A|B|3.800",
        ("A", "B", "3.800"),
    ),
    ("stsb", "test", STSB, "0|main-captions|MSRvid|2012test|0024|none|none|A|B", ("A", "B", None)),
    (
        "qqp",
        "train",
        "id|qid1|qid2|question1|question2|is_duplicate",
        "0|1|2|A?|B?|0",
        ("A?", "B?", "0"),
    ),
    ("qqp", "test", "id|question1|question2", "0|A?|B?", ("A?", "B?", None)),
    (
        "mnli",
        "train",
        f"{MNLI}|label1|gold_label",
        "0|1|1n|fiction|p|p|p|p|A|B|entailment|neutral",
        ("A", "B", "neutral"),
    ),
    (
        "mnli",
        "validation_mismatched",
        f"{MNLI}|label1|label2|label3|label4|label5|gold_label",
        "0|1|1n|fiction|p|p|p|p|A|B|neutral|neutral|neutral|neutral|neutral|contradiction",
        ("A", "B", "contradiction"),
    ),
    ("mnli", "test_matched", MNLI, "0|1|1n|fiction|p|p|p|p|A|B", ("A", "B", None)),
    (
        "qnli",
        "train",
        "index|question|sentence|label",
        "0|A?|B|not_entailment",
        ("A?", "B", "not_entailment"),
    ),
    ("wnli", "validation", "index|sentence1|sentence2|label", "0|A|B|1", ("A", "B", "1")),
    ("ax", "test", "index|sentence1|sentence2", "0|A|B", ("A", "B", None)),
]


def write(path: Path, *rows: str | None, end: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(row.replace("|", "\t") + end for row in rows if row is not None)
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(("name", "split", "header", "row", "read"), LAYOUTS)
def test_published_layouts_are_read(tmp_path, name, split, header, row, read):
    task = GLUE_TASKS[name]
    write(tmp_path / task.folder / task.files[split], header, row)
    expected = [InputExample(f"{split}-0", *read)]
    assert load_glue_split(name, tmp_path, split) == expected
    assert load_glue_split(name, tmp_path / task.folder, split) == expected


@pytest.mark.slow
@needs_real
@pytest.mark.parametrize(
    ("name", "counts", "first"),
    [
        ("rte", (2490, 277, 3000), "No Weapons of Mass Destruction Found in Iraq Yet."),
        ("cola", (8551, 1043, 1063), "Our friends won't buy this analysis, let alone the next"),
        ("sst-2", (67349, 872, None), "when are bears bears and "),
    ],
)
def test_real_files_are_read(name, counts, first):
    processor = glue_processors[name]()
    train = processor.get_train_examples(REAL)
    assert train[0].text_a.startswith(first)
    readers = (processor.get_dev_examples, processor.get_test_examples)
    splits = [train] + [
        read(REAL) for read, count in zip(readers, counts[1:], strict=True) if count is not None
    ]
    assert [len(rows) for rows in splits] == [count for count in counts if count is not None]
    for rows in splits[:2]:
        assert {row.label for row in rows} == set(processor.get_labels())
    assert all(row.text_a and (row.text_b is None) == (name != "rte") for row in train)


def test_a_folder_s_name_is_quoted_and_a_file_is_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--data_dir '.*/my data' --tasks RTE` fetches it"):
        glue_file(glue_task("rte"), tmp_path / "my data", "train")
    (tmp_path / "train.tsv").write_text("")
    with pytest.raises(NotADirectoryError, match=r"train\.tsv: is a file; give its folder$"):
        glue_file(glue_task("rte"), tmp_path / "train.tsv", "train")


@needs_real
def test_a_missing_split_of_real_files_is_refused():
    with pytest.raises(FileNotFoundError, match=r"test\.tsv: no such file; .*download_glue_data"):
        load_glue_split("sst2", REAL, "test")


def test_mnli_processors_read_their_own_files(tmp_path):
    header = "sentence1|sentence2|gold_label"
    for file in ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched"):
        write(tmp_path / "MNLI" / f"{file}.tsv", header, f"{file}|B|neutral")
    read = {}
    for name in ("mnli", "mnli-mm"):
        processor = glue_processors[name]()
        rows = (
            processor.get_train_examples(tmp_path)
            + processor.get_dev_examples(tmp_path)
            + processor.get_test_examples(tmp_path)
        )
        read[name] = [row.text_a for row in rows]
    assert read == {
        "mnli": ["train", "dev_matched", "test_matched"],
        "mnli-mm": ["train", "dev_mismatched", "test_mismatched"],
    }


@pytest.mark.parametrize(
    ("name", "mode", "labels"),
    [
        ("cola", "classification", ["0", "1"]),
        ("sst-2", "classification", ["0", "1"]),
        ("mrpc", "classification", ["0", "1"]),
        ("qqp", "classification", ["0", "1"]),
        ("wnli", "classification", ["0", "1"]),
        ("sts-b", "regression", [None]),
        ("mnli", "classification", ["entailment", "neutral", "contradiction"]),
        ("mnli-mm", "classification", ["entailment", "neutral", "contradiction"]),
        ("qnli", "classification", ["entailment", "not_entailment"]),
        ("rte", "classification", ["entailment", "not_entailment"]),
    ],
)
def test_labels_and_modes_of_tasks(name, mode, labels):
    assert issubclass(glue_processors[name], DataProcessor)
    assert glue_processors[name]().get_labels() == labels
    assert glue_output_modes[name] == mode
    assert glue_tasks_num_labels[name] == len(labels)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("sst2", "sst2"),
        ("SST-2", "sst2"),
        ("SST", "sst2"),
        ("sts-b", "stsb"),
        ("STS", "stsb"),
        ("CoLA", "cola"),
        ("MNLI-mm", "mnli-mm"),
        ("diagnostic", "ax"),
    ],
)
def test_tasks_have_several_spellings(spelling, name):
    assert glue_task(spelling) is GLUE_TASKS[name]
    if name != "ax":
        assert glue_processors[spelling.lower()].task is GLUE_TASKS[name]
        assert glue_tasks_num_labels[spelling.lower()] == GLUE_TASKS[name].num_labels


RTE = "index|sentence1|sentence2|label"


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        (
            "rte",
            [RTE, "0|A|B|entailment", "1|A|B"],
            ":3: expected 4 tab-separated columns, found 3",
        ),
        ("rte", [RTE, "0|A|B|entailment|x"], ":2: expected 4 tab-separated columns, found 5"),
        ("rte", [RTE, "0|A|B|entailment", ""], ":3: expected 4 tab-separated columns, found 1"),
        ("cola", ["gj04|1|A ."], ":1: expected 4 tab-separated columns, found 3"),
        (
            "rte",
            [RTE, "0|A|B|maybe"],
            ":2: unknown label 'maybe' (expected entailment, not_entailment)",
        ),
        ("cola", ["gj04|yes||A ."], ":1: unknown label 'yes' (expected 0, 1)"),
        (
            "stsb",
            ["sentence1|sentence2|score", "A|B|much"],
            ":2: unknown label 'much' (expected a number)",
        ),
        (
            "stsb",
            ["sentence1|sentence2|score", "A|B|nan"],
            ":2: unknown label 'nan' (expected a number)",
        ),
        (
            "rte",
            ["index|sentence1|label", "0|A|entailment"],
            ":1: no column sentence2 in the header (index, sentence1, label)",
        ),
        (
            "rte",
            ["index|sentence1|sentence2", "0|A|B"],
            ":1: no column label in the header (index, sentence1, sentence2)",
        ),
        (
            "rte",
            ["", "0|A|B|entailment"],
            ":1: no column sentence1, sentence2, label in the header ()",
        ),
        ("rte", [RTE], ": the file holds no rows"),
        ("rte", [], ": the file holds no rows"),
        ("cola", [], ": the file holds no rows"),
    ],
)
def test_bad_file_is_named_with_its_line(tmp_path, name, rows, message):
    path = tmp_path / GLUE_TASKS[name].folder / "train.tsv"
    write(path, *rows)
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole message is compared)
        load_glue_split(name, tmp_path, "train")
    assert str(error.value) == f"{path}{message}"


def test_a_test_file_may_be_labeled(tmp_path):
    write(tmp_path / "test.tsv", RTE, "0|A|B|entailment")
    assert load_glue_split("rte", tmp_path, "test")[0].label == "entailment"
    write(tmp_path / "test.tsv", RTE, "0|A|B|maybe")
    with pytest.raises(ValueError, match=r":2: unknown label"):
        load_glue_split("rte", tmp_path, "test")


def test_only_line_feeds_end_rows_and_quotes_are_plain_characters(tmp_path):
    text = '"A\u2028b\x85c\rd'
    write(tmp_path / "train.tsv", RTE, f'0|{text}|B"|entailment', end="\r\n")
    row = load_glue_split("rte", tmp_path, "train")[0]
    assert (row.text_a, row.text_b) == (text, 'B"')


def test_a_byte_order_mark_is_not_part_of_the_header(tmp_path):
    path = write(tmp_path / "train.tsv", "sentence|label", "a film|1")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_glue_split("sst2", tmp_path, "train")[0].text_a == "a film"


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    path = write(tmp_path / "train.tsv", RTE, "0|A|B|entailment")
    path.write_bytes(path.read_bytes() + b"1\tA\xff\tB\tentailment\n")
    with pytest.raises(ValueError, match=r"train\.tsv:3: not UTF-8"):
        load_glue_split("rte", tmp_path, "train")


def test_unknown_tasks_and_splits_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"unknown GLUE task 'snli' \(known: cola, sst2"):
        load_glue_split("snli", tmp_path, "train")
    with pytest.raises(ValueError, match=r"mnli has no split 'validation' \(it has train, valid"):
        load_glue_split("mnli", tmp_path, "validation")


def test_examples_and_features_as_json():
    assert '"text_b": null' in InputExample("train-0", "A").to_json_string()
    features = InputFeatures([0, 5, 2], label=1)
    assert features.to_json_string() == (
        '{"input_ids": [0, 5, 2], "attention_mask": null, "token_type_ids": null, "label": 1}\n'
    )
