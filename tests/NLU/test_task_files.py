"""Files of tagged words, questions and choices: how they are read, and errors in them."""

import datetime
import json
import os
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from glue_runs import write
from hub_process import run_on_hub

from transformers.data.question_answering import Answer, Candidate, Span
from transformers.data.text_files import read_table
from transformers.fine_tuning import data_sets
from transformers.fine_tuning.arguments import HubDataArguments
from transformers.fine_tuning.choices import check_choices, read_choices
from transformers.fine_tuning.data_sets import Table, load_tables
from transformers.fine_tuning.questions import (
    Question,
    check_questions,
    check_room,
    read_questions,
    write_answers,
)
from transformers.fine_tuning.tagged_words import TAGS, WORDS, check_sentences

SUFFIXES = [".csv", ".json"]


def table_of(path: Path, rows: list[dict], read=read_table) -> Table:
    """Writes rows to a file and reads it as a script does; in CSV, lists and dicts are JSON."""
    if path.suffix == ".csv":
        rows = [
            {n: v if isinstance(v, str | int) else json.dumps(v) for n, v in row.items()}
            for row in rows
        ]
    return Table(read(str(write(path, rows))), str(path))


def error_of(call, *arguments) -> str:
    with pytest.raises(ValueError, match=r".") as raised:
        call(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# ---- tagged words ----


def sentence(words: str, tags: str, **more) -> dict:
    return {**more, "tokens": words.split(), "ner_tags": tags.split()}


SENTENCES = [sentence("Ann lives here", "B-PER O O"), sentence("in Paris", "O B-LOC")]


def sentences(*tables: Table, known=(), words=None, tags=None):
    splits = dict(zip(("train", "validation", "test"), tables, strict=False))
    return check_sentences(splits, words, tags, "ner", known)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_sentences_are_read(tmp_path, suffix):
    data = sentences(table_of(tmp_path / f"train{suffix}", SENTENCES))
    assert data.labels == ("B-LOC", "B-PER", "O")
    rows = data.tables["train"].rows
    assert rows.column_names == [WORDS, TAGS]
    assert rows[0] == {WORDS: ["Ann", "lives", "here"], TAGS: [1, 2, 2]}
    assert rows[1] == {WORDS: ["in", "Paris"], TAGS: [2, 0]}


def test_columns_of_words_and_tags_are_chosen_by_name_or_position(tmp_path):
    rows = [{"w": r["tokens"], "t": r["ner_tags"], "tokens2": r["tokens"]} for r in SENTENCES]
    table = table_of(tmp_path / "train.json", rows)
    assert sentences(table).tables["train"].rows[WORDS][1] == ["in", "Paris"]
    data = sentences(table, words="tokens2", tags="t")
    assert data.tables["train"].rows[TAGS][1] == [2, 0]
    message = error_of(lambda: sentences(table, words="token"))
    assert message.startswith(
        f"{tmp_path}/train.json: has no column 'token'; its columns are 'w', 't', 'tok"
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("labels", "tokens"),
            "has no column 'ner_tags'; its columns are 'labels', 'tokens'; name the",
        ),
        (("tags", "words"), "would take its words from 'tags' and its tags from 'words'; name"),
        (("ner_tags", "words"), "would take its words from 'ner_tags' and its tags from 'ner_tag"),
    ],
)
def test_columns_whose_names_contradict_their_positions_are_errors(tmp_path, names, message):
    tags, words = names
    rows = [{tags: row["ner_tags"], words: row["tokens"]} for row in SENTENCES]
    table = table_of(tmp_path / "train.json", rows)
    assert f"{tmp_path}/train.json: {message}" in error_of(sentences, table)
    data = sentences(table, words=words, tags=tags)
    assert data.tables["train"].rows[WORDS][1] == ["in", "Paris"]
    assert "its words from" in error_of(lambda: sentences(table, words=words, tags=words))


def test_a_test_set_may_have_words_alone(tmp_path):
    rows = [{"id": "1", "tokens": ["Ann", "ran"]}]
    tables = {"test": table_of(tmp_path / "test.json", rows)}
    data = check_sentences(tables, None, None, "ner", ("O", "B-PER"))
    assert data.tables["test"].rows[:] == {WORDS: [["Ann", "ran"]]}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tags_are_hidden_in_all_rows_or_in_none(tmp_path, suffix):
    train = table_of(tmp_path / f"train{suffix}", SENTENCES)
    hidden = [{"tokens": ["Ann", "ran"], "ner_tags": [-1, -1]}] * 2
    test = table_of(tmp_path / f"hidden{suffix}", hidden)
    assert sentences(train, train, test).tables["test"].rows.column_names == [WORDS]
    tags = [{"tokens": ["Ann", "ran"], "ner_tags": [n, n]} for n in (0, 0, -1)]
    path = tmp_path / f"some{suffix}"
    message = error_of(sentences, train, train, table_of(path, tags))
    assert message == (
        f"{path}: row 3: hides its ner_tags (-1), but row 1 does not: for scores, give the "
        "ner_tags of all rows; otherwise, of none"
    )


@pytest.mark.parametrize("none", [None, [None, None]])
def test_null_counts_as_hidden_if_other_tags_are_hidden(tmp_path, none):
    train = table_of(tmp_path / "train.json", SENTENCES)
    rows = [{"tokens": ["Ann", "ran"], "ner_tags": tags} for tags in ([-1, -1], none)]
    test = table_of(tmp_path / "test.json", rows)
    assert sentences(train, train, test).tables["test"].rows.column_names == [WORDS]
    path = tmp_path / "some.json"
    some = table_of(path, [rows[1], {**rows[1], "ner_tags": [0, 0]}])
    assert f"{path}: row 1: " in error_of(sentences, train, train, some)


@pytest.mark.parametrize("name", ["hashtag", "text_with_hashtags"])
def test_a_column_of_words_may_have_a_name_that_ends_in_tag(tmp_path, name):
    rows = [{name: row["tokens"], "ner_tags": row["ner_tags"]} for row in SENTENCES]
    data = sentences(table_of(tmp_path / "train.json", rows))
    assert data.tables["train"].rows[WORDS][1] == ["in", "Paris"]


def test_a_trained_model_s_order_of_tags_is_kept(tmp_path):
    table = table_of(tmp_path / "train.json", SENTENCES)
    known = ("O", "B-PER", "B-LOC", "B-ORG")
    assert sentences(table, known=known).labels == known
    assert sentences(table, known=("O", "B-PER")).labels == ("B-LOC", "B-PER", "O")


def test_numbers_as_tags_are_in_numerical_order(tmp_path):
    rows = [{"tokens": list("abc"), "ner_tags": [10, 2, 0]}]
    data = sentences(table_of(tmp_path / "train.json", rows))
    assert data.labels == ("0", "2", "10")
    assert data.tables["train"].rows[TAGS][0] == [2, 1, 0]


def test_a_data_set_s_names_of_tags_are_used():
    """As on the hub: numbers, whose names are in the data set's own order."""
    from datasets import ClassLabel, Dataset, Features, Sequence, Value

    names = ["O", "B-PER", "B-LOC"]
    features = Features(
        {"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=names))}
    )
    rows = Dataset.from_list([{"tokens": ["Ann", "ran"], "ner_tags": [1, 0]}], features=features)
    data = sentences(Table(rows, "hub (train)"))
    assert data.labels == tuple(names)
    assert data.tables["train"].rows[TAGS][0] == [1, 0]
    hidden = Dataset.from_list([{"tokens": ["Ann", "ran"], "ner_tags": [-1, -1]}])
    data = sentences(Table(rows, "train"), Table(rows, "validation"), Table(hidden, "test"))
    assert data.tables["test"].rows.column_names == [WORDS]
    # A list of names has a last one, but -1 is not its number.
    partly = Dataset.from_list([{"tokens": ["Ann", "ran"], "ner_tags": [1, -1]}], features=features)
    message = error_of(sentences, Table(rows, "hub (train)"), Table(partly, "hub (validation)"))
    assert message == "hub (validation): row 1: tag 2 of its ner_tags is missing or not a tag (-1)"


BAD_SENTENCES = {
    "more tags": (
        sentence("Ann ran", "O O O"),
        "row 3: has 2 words in tokens, but 3 tags in ner_tags",
    ),
    "fewer tags": (sentence("Ann ran", "O"), "row 3: has 2 words in tokens, but 1 tags"),
    "no words": (sentence("", ""), "row 3: its tokens holds no words"),
    "no list of words": (
        {"tokens": None, "ner_tags": ["O"]},
        "row 3: its tokens is not a list of words",
    ),
    "an empty word": (
        {"tokens": ["a", " "], "ner_tags": ["O", "O"]},
        'row 3: word 2 of its tokens is empty (" ")',
    ),
    "a missing word": (
        {"tokens": ["a", None], "ner_tags": ["O", "O"]},
        "row 3: word 2 of its tokens is",
    ),
    "no list of tags": (
        {"tokens": ["a"], "ner_tags": None},
        "row 3: its ner_tags is not a list of tags",
    ),
    "a missing tag": (
        {"tokens": ["a"], "ner_tags": [None]},
        "row 3: tag 1 of its ner_tags is missing",
    ),
}


@pytest.mark.parametrize("name", BAD_SENTENCES)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_errors_in_sentences_are_named(tmp_path, suffix, name):
    row, message = BAD_SENTENCES[name]
    path = tmp_path / f"train{suffix}"
    assert f"{path}: {message}" in error_of(sentences, table_of(path, [*SENTENCES, row]))


@pytest.mark.parametrize("number", [-1, -100])
def test_a_number_that_stands_for_no_tag_is_an_error(tmp_path, number):
    """As in data that is already prepared for the loss, which leaves out -100."""
    rows = [{"tokens": ["Ann", "ran"], "ner_tags": [1, number]}]
    message = f"row 1: tag 2 of its ner_tags is missing or not a tag ({number})"
    assert message in error_of(sentences, table_of(tmp_path / "train.json", rows))


def test_an_unknown_tag_is_an_error(tmp_path):
    train = table_of(tmp_path / "train.json", SENTENCES)
    dev = table_of(tmp_path / "dev.json", [SENTENCES[0], sentence("at Shell", "O B-ORG")])
    message = f"{tmp_path}/dev.json: row 2: tag 2: unknown tag 'B-ORG' (expected B-LOC, B-PER, O)"
    assert error_of(sentences, train, dev) == message


def test_cells_that_are_not_json_are_errors(tmp_path):
    path = write(tmp_path / "train.csv", [{"tokens": "Ann lives", "ner_tags": '["O", "O"]'}])
    table = Table(read_table(str(path)), str(path))
    message = f"{path}: row 1: its tokens is not JSON: Ann lives (if this is the wrong column, name"
    assert message in error_of(sentences, table)


# ---- questions ----

CONTEXT = "Ann saw a red house in Paris."


def question(number: int, *answers: str, context: str = CONTEXT, **changed) -> dict:
    starts = [context.index(text) for text in answers]
    row = {
        "id": f"q{number}",
        "question": "What?",
        "context": context,
        "answers": {"text": list(answers), "answer_start": starts},
    }
    return {**row, **changed}


def questions(table: Table, split: str = "train", may_have_none: bool = False) -> list[Question]:
    return check_questions({split: table}, may_have_none)[split]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_questions_are_read(tmp_path, suffix):
    rows = [question(1, "Paris", "in Paris"), question(2, "Ann")]
    read = questions(table_of(tmp_path / f"train{suffix}", rows, read_questions))
    place = CONTEXT.index("Paris")
    expected = Question("q1", "What?", CONTEXT, ("Paris", "in Paris"), Span(place, place + 5))
    assert read == [expected, Question("q2", "What?", CONTEXT, ("Ann",), Span(0, 3))]


def nested(rows: list[dict]) -> dict:
    """Returns rows in the structure of SQuAD's own files, one paragraph each."""
    paragraphs = [
        {
            "context": row["context"],
            "qas": [
                {
                    "id": row["id"],
                    "question": row["question"],
                    "answers": [
                        {"text": text, "answer_start": start}
                        for text, start in zip(*row["answers"].values(), strict=True)
                    ],
                }
            ],
        }
        for row in rows
    ]
    return {"version": "v2.0", "data": [{"title": "a", "paragraphs": paragraphs}]}


def test_squad_s_own_files_are_read(tmp_path):
    rows = [question(1, "Paris"), question(2), question(3, "Ann")]
    lines = table_of(tmp_path / "lines.json", rows, read_questions)
    expected = questions(lines, may_have_none=True)
    for name, whole in (("flat", {"data": rows}), ("nested", nested(rows))):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(whole, indent=2))
        table = Table(read_questions(str(path)), str(path))
        assert questions(table, may_have_none=True) == expected


def test_missing_answers_in_squad_s_own_files(tmp_path):
    """Missing answers are an error, except with is_impossible and in a test set."""
    path = tmp_path / "squad.json"

    def table(*fields: dict) -> Table:
        asked = [{"id": str(n), "question": "What?", **each} for n, each in enumerate(fields)]
        paragraph = {"context": CONTEXT, "qas": asked}
        path.write_text(json.dumps({"data": [{"title": "a", "paragraphs": [paragraph]}]}))
        return Table(read_questions(str(path)), str(path))

    given = {"answers": [{"text": "Ann", "answer_start": 0}]}
    message = f'{path}: row 2: its answers are not {{"text": […], "answer_start": […]}} (null)'
    for split, may_have_none in (("train", True), ("validation", True), ("train", False)):
        assert error_of(questions, table(given, {}), split, may_have_none) == message
    read = questions(table(given, {"is_impossible": True}), may_have_none=True)
    assert [asked.answers for asked in read] == [("Ann",), ()]
    assert [asked.answers for asked in questions(table({}, {}), "test")] == [(), ()]


def test_columns_that_the_first_row_lacks_are_read_from_other_rows(tmp_path):
    rows = [{**question(n, "Paris"), "title": "a"} for n in range(3)]
    first = {name: rows[0][name] for name in ("question", "context")}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"data": [first, *rows[1:]]}))
    table = Table(read_questions(str(path)), str(path))
    message = f"{path}: row 1: its id is neither a text nor a number (None)"
    assert error_of(questions, table) == message
    path.write_text(json.dumps({"data": [{"id": "q0", **first}, *rows[1:]]}))
    table = Table(read_questions(str(path)), str(path))
    assert f"{path}: row 1: its answers are not" in error_of(questions, table)
    assert len(questions(Table(table.rows.select([1, 2]), "rows"))) == 2


def test_texts_that_look_like_dates_stay_texts(tmp_path):
    """They are read as texts in every place, even if all values of a column look like dates."""
    dates = ["2020-01-01", "2021-05-06"]
    context = f"on {dates[0]} here"
    rows = [
        question(0, dates[0], context=context, id=date, question="2020-01-01 10:00:00")
        for date in dates
    ]
    rows = [{"n": number, **row} for number, row in enumerate(rows)]
    lines = table_of(tmp_path / "lines.json", rows, read_questions)
    assert lines.rows.column_names == [*rows[0]]
    place = Span(3, 13)
    assert questions(lines) == [
        Question(date, "2020-01-01 10:00:00", context, (dates[0],), place) for date in dates
    ]
    words = [{"tokens": dates, "ner_tags": ["B-DAY", "O"]}] * 2
    path = tmp_path / "words.json"
    table_of(path, words)
    for text in (path.read_text(), json.dumps(words), json.dumps(words, indent=1)):
        path.write_text(text)
        data = sentences(Table(read_table(str(path)), str(path)))
        assert data.tables["train"].rows[WORDS][1] == dates
    chosen = {"train": table_of(tmp_path / "ends.json", [choice(ending0=date) for date in dates])}
    assert check_choices(chosen).tables["train"].rows["ending0"][:] == dates


@pytest.mark.parametrize("places", [range(2), range(10, 12)], ids=["first", "last"])
def test_dates_in_one_part_of_a_large_file_stay_texts(tmp_path, places):
    """By default, each 10 MB of the file are read separately, with their own column types."""
    texts = [f"2020-01-{n + 10}" if n in places else f"text {n}" for n in range(12)]
    if 0 in places:
        texts[2:10] = [f"2020-02-{n + 10}" for n in range(8)]  # all of the first piece
    rows = [{"a": text, "long": "x" * (1100 * 1024)} for text in texts]
    assert table_of(tmp_path / "rows.json", rows).column("a") == texts


def test_dates_in_a_file_without_objects_are_an_error(tmp_path):
    path = tmp_path / "dates.json"
    path.write_text(json.dumps(["2020-01-01", "2021-05-06"]))
    message = (
        f"{path}: text holds dates, which would not be read as texts: write one object per line"
    )
    assert error_of(read_table, str(path)) == message


def test_a_data_set_s_timestamps_are_not_texts():
    from datasets import Dataset

    when = datetime.datetime(2020, 1, 1)
    rows = [question(0, "Paris") | {"question": when}]
    message = 'set: row 1: its question is not a text ("2020-01-01 00:00:00")'
    assert error_of(questions, Table(Dataset.from_list(rows), "set")) == message
    rows = [question(0, "Paris") | {"id": when}]
    message = "set: row 1: its id is neither a text nor a number (2020-01-01 00:00:00)"
    assert error_of(questions, Table(Dataset.from_list(rows), "set")) == message


def test_all_rows_of_a_test_set_have_answers_or_none_do(tmp_path):
    table = table_of(tmp_path / "test.json", [question(1, "Ann"), question(2)], read_questions)
    assert len(questions(table, "test", may_have_none=True)) == 2
    message = f"{tmp_path}/test.json: row 2: has no answer, but row 1 has one: for scores, give"
    assert message in error_of(questions, table, "test")


def test_written_answers_replace_those_of_an_earlier_run(tmp_path):
    """Without odds, an earlier run's file of odds is removed."""
    asked = [Question("q", "What?", CONTEXT)]
    best = (Candidate("", 0.0, 0.0),)
    write_answers(tmp_path, "eval", asked, [Answer("", best, 1.0)])
    assert json.loads((tmp_path / "eval_null_odds.json").read_text()) == {"q": 1.0}
    write_answers(tmp_path, "eval", asked, [Answer("", best)])
    names = {"eval_predictions.json", "eval_nbest_predictions.json"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_test_set_needs_no_answers(tmp_path):
    rows = [{"question": "Who?", "context": "Ann ran."}] * 2
    read = questions(table_of(tmp_path / "test.csv", rows), "test")
    assert read == [Question(name, "Who?", "Ann ran.") for name in "01"]
    assert "has no column 'answers'" in error_of(questions, table_of(tmp_path / "t.csv", rows))


def answers(*pairs: tuple) -> dict:
    return {"text": [text for text, _ in pairs], "answer_start": [start for _, start in pairs]}


BAD_QUESTIONS = {
    "beyond the end": (
        answers(("Paris", 25)),
        "row 2: its answer 'Paris' at character 25 is outside its context, which has 29 characters",
    ),
    "before the beginning": (answers(("Ann", -1)), "row 2: its answer 'Ann' at character -1 is"),
    "a second answer beyond the end": (
        answers(("Ann", 0), ("Paris", 99)),
        "row 2: its answer 'Paris' at character",
    ),
    "no answer": (
        answers(),
        "row 2: has no answer; --version_2_with_negative is for sets with such",
    ),
    "more starts than answers": (
        {"text": ["Ann"], "answer_start": [0, 1]},
        "row 2: has 1 answers, but 2 in answer_start",
    ),
    "an empty answer": (
        answers(("", 0)),
        "row 2: an answer must be a non-empty string with an integer start ('', 0)",
    ),
    "a blank answer": (
        answers((" ", 3)),
        "row 2: an answer must be a non-empty string with an integer start (' ', 3)",
    ),
    "null": (None, 'row 2: its answers are not {"text": […], "answer_start": […]} (null)'),
}


@pytest.mark.parametrize("name", BAD_QUESTIONS)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_errors_in_answers_are_named(tmp_path, suffix, name):
    wrong, message = BAD_QUESTIONS[name]
    path = tmp_path / f"train{suffix}"
    table = table_of(path, [question(1, "Paris"), question(2, answers=wrong)])
    assert f"{path}: {message}" in error_of(questions, table)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"id": "q1"}, "row 2: has the id 'q1', as row 1 has"),
        ({"question": None}, "row 2: its question is not a text (null)"),
        ({"context": None}, "row 2: its context is not a text (null)"),
    ],
)
def test_errors_in_questions_are_named(tmp_path, changed, message):
    path = tmp_path / "train.json"
    table = table_of(path, [question(1, "Paris"), question(2, "Ann") | changed])
    assert error_of(questions, table) == f"{path}: {message}"


class ByteTokenizer:
    """A tokenizer with a token for each byte, and one before them."""

    def num_special_tokens_to_add(self, pair: bool) -> int:
        return 4 if pair else 2

    def __call__(self, text, add_special_tokens, truncation, max_length):
        assert (add_special_tokens, truncation) == (False, True)
        return {"input_ids": [0, *text.encode()][:max_length]}


def test_questions_leave_room_for_their_texts(tmp_path):
    """A row needs at least one token of the text more than those shared with the row before."""
    path = tmp_path / "train.json"
    rows = [question(1, "Ann", question="Who?"), question(2, "Ann", question="Whó?")]
    table = table_of(path, rows)
    check_room(
        table, ByteTokenizer(), length=14, stride=3
    )  # 1 + 5 tokens, 4 special ones, 3 shared
    message = f"{path}: row 2: its question takes 6 or more tokens, so --max_seq_length 13 minus"
    assert error_of(check_room, table, ByteTokenizer(), 13, 3).startswith(message)
    assert error_of(check_room, table, ByteTokenizer(), 14, 5).startswith(f"{path}: row 1: ")


def test_an_answer_with_a_wrong_start_gives_a_warning(tmp_path, caplog):
    """Some starts in SQuAD's own files are wrong by a character or two."""
    rows = [question(1, "Paris"), question(2, answers=answers(("Ann", 1)))]
    read = questions(table_of(tmp_path / "train.json", rows))
    assert read[1].span == Span(1, 4)
    warning = "1 of 2 answers differ from the text at their answer_start, row 2's first"
    assert caplog.text.count(warning) == 1


def test_empty_questions_and_contexts_are_counted(tmp_path, caplog):
    empty = {"question": " ", "answers": answers(("Ann", CONTEXT.index("Ann")))}
    questions(table_of(tmp_path / "asked.json", [question(1, "Ann"), question(2, **empty)]))
    assert "1 of 2 rows have an empty question, row 2 first" in caplog.text
    check_choices({"train": table_of(tmp_path / "a.json", [choice(sent1=""), choice(sent2="")])})
    assert "1 of 2 rows have an empty sent1, row 1 first" in caplog.text
    assert "empty sent2" not in caplog.text


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        ({"data": []}, "holds no examples"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, "holds no examples"),
        (
            {"data": [{"paragraphs": [{"qas": [{"id": "1"}]}]}]},
            "article 1 does not have SQuAD's structure",
        ),
        (
            {"data": [{"paragraphs": [{"qas": ["Who ran?"]}]}]},
            "article 1 does not have SQuAD's structure",
        ),
        ({"data": [{"id": 2**64}]}, "cannot be read"),
    ],
)
def test_errors_in_squad_s_structure_are_named(tmp_path, whole, message):
    path = tmp_path / "train.json"
    path.write_text(json.dumps(whole))
    assert f"{path}: {message}" in error_of(read_questions, str(path))


# ---- choices ----


def choice(label: object = 1, count: int = 3, **changed) -> dict:
    endings = {f"ending{n}": f"ending {n}" for n in range(count)}
    return {"id": "x", "sent1": "She ran.", "sent2": "Then", **endings, "label": label, **changed}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("count", [2, 5, 11])
def test_choices_are_read(tmp_path, suffix, count):
    table = table_of(tmp_path / f"train{suffix}", [choice(count=count), choice(0, count)])
    read = check_choices({"train": table})
    assert read.endings == tuple(f"ending{n}" for n in range(count))
    rows = read.tables["train"].rows
    assert rows.column_names == ["sent1", "sent2", *read.endings, "label"]
    assert rows["label"][:] == [1, 0]


def test_texts_that_look_like_numbers_stay_texts(tmp_path):
    table = table_of(tmp_path / "train.csv", [choice(ending1="007", ending2="1.50")], read_choices)
    row = check_choices({"train": table}).tables["train"].rows[0]
    assert (row["ending1"], row["ending2"]) == ("007", "1.50")
    asked = {"id": "012", "question": "7", "context": "13 and 7", "answers": answers(("13", 0))}
    read = questions(table_of(tmp_path / "asked.csv", [asked], read_questions))
    assert read == [Question("012", "7", "13 and 7", ("13",), Span(0, 2))]


BAD_CHOICES = {
    "a missing ending": (
        choice(ending2=None),
        "row 2: its ending2 is empty, but every row has to have 3 endings",
    ),
    "another number of endings": (
        {**choice(), "ending3": "one more"},
        "row 1: its ending3 is empty, but every row has to have 4 endings",
    ),
    "a label beyond the last ending": (
        choice(3),
        "row 2: its label is 3; expected an ending's number, 0 to 2",
    ),
    "a negative label": (choice(-1), "row 2: its label is -1; expected"),
    "no label": (choice(None), "row 2: its label is None; expected"),
    "no context": (choice(sent1=None), "row 2: its sent1 is not a text (null)"),
}


@pytest.mark.parametrize("name", BAD_CHOICES)
def test_errors_in_choices_are_named(tmp_path, name):
    row, message = BAD_CHOICES[name]
    path = tmp_path / "train.json"
    assert f"{path}: {message}" in error_of(check_choices, {"x": table_of(path, [choice(), row])})


def test_labels_are_hidden_in_all_rows_or_in_none(tmp_path):
    path = tmp_path / "test.json"
    test = {"test": table_of(path, [choice(-1), choice(-1)])}
    assert "label" not in check_choices(test).tables["test"].rows.column_names
    test = {"test": table_of(path, [choice(1), choice(-1)])}
    message = f"{path}: row 2: hides its label (-1), but row 1 does not: for scores, give the label"
    assert message in error_of(check_choices, test)


def test_a_test_set_of_choices_needs_no_labels(tmp_path):
    row = choice()
    del row["label"]
    table = table_of(tmp_path / "test.json", [row])
    assert "label" not in check_choices({"test": table}).tables["test"].rows.column_names
    assert "has no column 'label'" in error_of(check_choices, {"validation": table})


def test_sets_with_different_numbers_of_endings_are_errors(tmp_path):
    train = table_of(tmp_path / "train.json", [choice()])
    dev = table_of(tmp_path / "dev.json", [choice(count=4)])
    message = error_of(check_choices, {"train": train, "validation": dev})
    assert message == f"{tmp_path}/dev.json: has 4 endings, but {tmp_path}/train.json has 3"
    alone = table_of(tmp_path / "one.json", [choice(0, 1)])
    assert "needs columns ending0, ending1 and so on" in error_of(check_choices, {"train": alone})


# ---- files, folders and the hub ----


def test_splits_and_limits(tmp_path):
    rows = [{"a": str(n)} for n in range(5)]
    files = {
        f"{split}_file": str(write(tmp_path / f"{split}.json", rows))
        for split in ("train", "validation")
    }
    flags = HubDataArguments(**files, max_train_samples=2, max_val_samples=0)
    tables = load_tables(flags, ["train"], None)
    assert tables["train"].rows[:] == {"a": ["0", "1"]}
    whole = load_tables(flags, ["train"], None, whole=["train"])["train"]
    assert len(whole.rows) == 5
    assert whole.first("train", flags).rows[:] == {"a": ["0", "1"]}
    assert "--max_val_samples must be at least 1, not 0" in error_of(
        load_tables, flags, ["validation"], None
    )
    assert "this run needs --test_file" in error_of(load_tables, flags, ["test"], None)


@pytest.mark.parametrize("name", ["", "old.py"])
def test_a_data_set_that_is_a_script_is_an_error(tmp_path, name):
    """Many data sets of the hub were scripts, which `datasets` no longer runs."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "old.py").write_text("raise AssertionError\n")
    flags = HubDataArguments(dataset_name=str(tmp_path / "old" / name))
    message = error_of(load_tables, flags, ["train"], None)
    assert "scripts are no longer supported" in message
    assert message.endswith("; give files (--train_file and the like)")


LOAD = """
import json
from transformers.fine_tuning.data_sets import load_data_set
try:
    load_data_set("org/set", None, None, "a way out")
except OSError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "switch", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"]
)
def test_in_offline_mode_no_data_set_is_requested(hub_server, tmp_path, switch):
    """There is no request at all; HF_DATASETS_OFFLINE is a switch of `datasets` alone."""
    (message,) = run_on_hub(hub_server, tmp_path / "home", LOAD, **{switch: "1"})
    assert message == "the data set 'org/set' cannot be fetched: offline mode is on; a way out"
    assert hub_server.requests == []


@pytest.mark.slow
def test_an_offline_switch_of_0_is_off(hub_server, tmp_path):
    messages = run_on_hub(hub_server, tmp_path / "home", LOAD, HF_DATASETS_OFFLINE="0")
    assert "offline" not in "".join(messages)
    assert hub_server.requests


def test_no_data_set_is_requested_from_an_unreachable_hub(tmp_path, monkeypatch):
    """Without the check, `datasets` would try for half a minute."""
    why = "[Errno -2] Name or service not known"
    monkeypatch.setattr(data_sets, "why_out_of_reach", lambda offline: why)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.hf_hub_download", None)
    flags = HubDataArguments(dataset_name="org/set")
    with pytest.raises(OSError, match="the data set 'org/set' cannot be fetched: ") as raised:
        load_tables(flags, ["train"], str(tmp_path))
    assert f": {why}; give files" in str(raised.value)
    assert not huggingface_hub.constants.HF_HUB_OFFLINE  # later calls are not offline


def test_the_data_set_s_name_configuration_and_cache_are_passed_on(tmp_path, monkeypatch):
    asked = []

    def load_dataset(*name, **settings):
        asked.append((*name, settings))
        return {"train": datasets.Dataset.from_dict({"a": ["b"]})}

    monkeypatch.setattr(data_sets, "why_out_of_reach", lambda offline: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    flags = HubDataArguments(dataset_name="org/set", dataset_config_name="small")
    table = load_tables(flags, ["train"], str(tmp_path))["train"]
    assert (table.source, table.rows[:]) == ("org/set (train)", {"a": ["b"]})
    assert asked == [("org/set", "small", {"cache_dir": str(tmp_path)})]


@pytest.mark.parametrize("name", ["{}/rows.json", "rows.json", "./rows.txt"])
def test_a_file_as_the_data_set_s_name_is_an_error(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for suffix in (".json", ".txt"):
        write(tmp_path / f"rows{suffix}", [{"a": "b"}])
    name = name.format(tmp_path)
    message = error_of(load_tables, HubDataArguments(dataset_name=name), ["train"], None)
    assert message == f"{name}: is a file: give it as --train_file"


def test_a_path_is_not_looked_for_on_the_hub(tmp_path):
    flags = HubDataArguments(dataset_name=f"{tmp_path}/nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        load_tables(flags, ["train"], str(tmp_path))


def test_reading_the_user_s_files_sends_nothing(tmp_path, monkeypatch):
    """Otherwise, `datasets` reports reading the user's own files, and waits for the server."""
    sent = []
    monkeypatch.setattr("datasets.load.get_session", lambda: sent.append("of it"))
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.csv", [{"a": "b"}])
    datasets.load_dataset("csv", data_files=str(tmp_path / "set" / "train.csv"))
    assert sent.pop() == "of it"
    read_table(str(tmp_path / "set" / "train.csv"))
    load_tables(HubDataArguments(dataset_name=str(tmp_path / "set")), ["train"], str(tmp_path))
    assert sent == []
    assert datasets.config.HF_UPDATE_DOWNLOAD_COUNTS  # it is on again for later calls


@pytest.mark.parametrize("name", ["set[1]", "se*1", "set[1]/part"])
def test_a_data_set_s_folder_is_not_a_pattern(tmp_path, name):
    """`datasets` would read ``set1``."""
    for folder in (name, name.replace("[1]", "1").replace("*", "t")):
        (tmp_path / folder).mkdir(parents=True)
        write(tmp_path / folder / "train.json", [{"a": "b"}])
    (tmp_path / "link").symlink_to(name)
    for folder in (name, "link"):
        flags = HubDataArguments(dataset_name=str(tmp_path / folder))
        message = error_of(load_tables, flags, ["train"], str(tmp_path / "cache"))
        assert " for a pattern, and may read another folder: rename it, or give files" in message


def test_a_data_set_s_folder_is_cached_by_content(tmp_path):
    """Not by file names and times, which may be equal after `cp -p`."""
    (tmp_path / "set").mkdir()
    flags = HubDataArguments(dataset_name=str(tmp_path / "set"))
    for text in ("b", "c"):
        path = write(tmp_path / "set" / "train.json", [{"a": text}])
        os.utime(path, (1e9, 1e9))
        table = load_tables(flags, ["train"], str(tmp_path / "cache"))["train"]
        assert table.rows[:] == {"a": [text]}


def test_a_missing_split_of_a_data_set_is_an_error(tmp_path):
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.json", [{"a": "b"}])
    flags = HubDataArguments(dataset_name=str(tmp_path / "set"))
    message = error_of(load_tables, flags, ["validation"], str(tmp_path / "cache"))
    assert message.endswith("set has no validation set; it has train: give --validation_file")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "give --dataset_name, or --train_file"),
        ({"train_file": "a.txt"}, "a.txt: its name must end in .csv, .json or .jsonl"),
    ],
)
def test_wrong_flags_are_errors(flags, message):
    assert message in error_of(lambda: HubDataArguments(**flags))


def test_a_file_with_tabs_is_an_error_that_says_what_to_do():
    message = error_of(lambda: HubDataArguments(train_file="rows.tsv"))
    assert message == (
        "rows.tsv: its name must end in .csv, .json or .jsonl; save it with commas in place of "
        "tabs, and texts that contain one in quotes"
    )


def test_an_empty_name_of_a_data_set_is_an_error():
    from transformers.fine_tuning.data_sets import load_data_set

    with pytest.raises(ValueError, match="the data set's name is empty"):
        load_data_set("", None, None, "a way out")
