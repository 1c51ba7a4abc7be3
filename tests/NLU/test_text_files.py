"""The user's own files: unusual ones are read, and errors and likely mistakes are reported."""

import csv
import errno
import json
import os
import shutil
import tracemalloc

import datasets
import pytest
from glue_runs import write

from loralib.errors import DiskFullError
from transformers.data import text_files
from transformers.data.json_rows import find_fault
from transformers.data.text_columns import Columns, check_not_empty, choose_columns, take_columns
from transformers.data.text_files import load_rows, read_table
from transformers.data.text_labels import check_classes, label_names, number_labels
from transformers.fine_tuning.questions import read_questions


def read(path, content):
    path.write_text(content, encoding="utf-8")
    data = read_table(str(path))
    columns = choose_columns(data, str(path))
    return columns, list(take_columns(data, str(path), columns))


@pytest.mark.parametrize("row", [0, 1])
def test_very_long_texts_are_read(tmp_path, row):
    """In the first row as well, which is checked more than the others."""
    texts = ["short", "short"]
    texts[row] = "long " * 200_000
    content = f'text,label\n"{texts[0]}",a\n"{texts[1]}",b\n'
    limit = csv.field_size_limit()
    _, rows = read(tmp_path / "rows.csv", content)
    assert [row["text"] for row in rows] == texts
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    "content",
    [
        "\n\ntext,label\nyes it is,a\nno,b\n",
        "text,label\n\nyes it is,a\n\nno,b\n\n",
        "id,text,label\n1,yes it is,a\n2,no,b\n",
        "text_id,text,label\nx1,yes it is,a\nx2,no,b\n",
    ],
)
def test_empty_lines_and_identifiers_are_ignored(tmp_path, content):
    columns, rows = read(tmp_path / "rows.csv", content)
    assert columns == Columns(("text",))
    assert rows == [{"text": "yes it is", "label": "a"}, {"text": "no", "label": "b"}]


def test_a_repeated_name_below_an_empty_line_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="has the column 'label' 2 times"):
        read(tmp_path / "rows.csv", "\ntext,label,label\nyes,a,a\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        (
            "text;label\nyes, it is;a\n",
            "seems to be separated by semicolons: use commas, ",
        ),
        ("text\tlabel\nyes it is\ta\n", "seems to be separated by tabs: use commas, "),
        (
            "text,label\nyes, it is,a\n",
            "row 1: has 3 fields, the header names 2 columns: a text that holds a comma has to be",
        ),
        (
            'text,label\n"no, it\nis",a\n\nyes, it is,a\n',
            "row 2: has 3 fields, the header names 2 columns: a text that holds a comma has to be",
        ),
        ('text,label\nyes,a\n"no,a\nno,b\n', "row 2: a quote is opened and not closed"),
        ('text,label\n"no,a\nno,b\n', "row 1: a quote is opened and not closed"),
        ('{"text": "a", "label": 1}\n', "holds JSON: give it a name that ends in .json or .jsonl"),
        ('\ufeff [\n {\n "text": "a"}]', "holds JSON: give it a name that ends in .json or .jsonl"),
    ],
)
def test_files_that_are_not_csv_are_errors(tmp_path, content, message):
    with pytest.raises(ValueError, match=f"rows.csv: {message}"):
        read(tmp_path / "rows.csv", content)


@pytest.mark.parametrize("name", ['{"id"}', '{"a": 1}', "{}", "[{", '{"text'])
def test_a_csv_column_s_name_may_look_like_json(tmp_path, name):
    cell = '"' + name.replace('"', '""') + '"'
    for header in (f"{name},text,label", f"{cell},text,label"):
        assert read(tmp_path / "rows.csv", f"{header}\n1,a film,x\n2,no film,y\n")[1] == [
            {"text": "a film", "label": "x"},
            {"text": "no film", "label": "y"},
        ]


def test_a_later_row_that_is_not_utf_8_is_an_error(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"text,label\n" + b"yes,a\nno,b\n" * 9_000 + b"caf\xe9,a\n")
    with pytest.raises(ValueError, match=r"rows\.csv: line 18002: is not UTF-8 text; save it"):
        read_table(str(path))


def test_blanks_in_a_column_s_name_are_shown(tmp_path):
    with pytest.raises(ValueError, match="has no column 'label'; its columns are 'text', ' label'"):
        read(tmp_path / "rows.csv", "text, label\n1,a\nno,b\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("what a good film,1\nbad,0\n", "column 'what a good film' looks like a text: the first"),
        ("no film at all\nbad\n", "the name of its column 'no film at all' looks like a text"),
        ("a film,1\nbad,0\n", r"no column 'label'; its columns are 'a film', '1' \(the first line"),
        ("a film,x\nbad,0\n", "no column 'label'; its columns are 'a film', 'x': --label_column"),
        ("id,text\n1,bad\n", "no column 'label', only its text's, 'text'; to predict labels"),
        (
            "film,verdict\nbad,bad\n",
            "no column 'label'; its columns are 'film', 'verdict': --label",
        ),
        ("id,text,label\n1,,1\n2,,0\n", "no row has a text in text, so there is nothing"),
        ("a,b,label\n,,1\n,,0\n", "no row has a text in a and b, so there is nothing to read"),
        ("n,note,label\n1,,1\n2,,0\n", r"0 text columns \(n is of int64, note is empty\)"),
    ],
)
def test_csv_without_names_texts_or_labels_is_an_error(tmp_path, content, message):
    with pytest.raises(ValueError, match=rf"rows\.csv: .*{message}"):
        read(tmp_path / "rows.csv", content)


@pytest.mark.parametrize(
    ("header", "asked"),
    [
        ("what did you like?,label", {}),
        ("what did you like?,verdict", {"label": "verdict"}),
        ("what did you like?", {"label": "verdict"}),
        ("what did you like?", {"texts": ["what did you like?"]}),
    ],
)
def test_a_column_s_name_may_look_like_a_text_if_the_header_is_certain(tmp_path, header, asked):
    """Another column is named as a label, or a flag names the columns."""
    path = tmp_path / "rows.csv"
    path.write_text(f"{header}\nnothing{',0' * header.count(',')}\n")
    columns = choose_columns(read_table(str(path)), str(path), **asked)
    assert columns.texts == ("what did you like?",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"data": [{"text": "a", "label": 1}]}', "is one object with its rows in the list "),
        ('{"rows": [{"text": "a", "label": 1}]}', "in the list 'rows': write only that list, or"),
        ('{"version": "1", "data": [{"text": "a"}]}', "in the list 'data': write only that list"),
        (
            '{"text": ["a", "b"], "label": [0, 1]}',
            r"is one object of 2 keys \(text, label\), which",
        ),
        (
            '{"text": {"0": "a"}, "label": {"0": 1}}',
            "is read as one row: write one object per row, ",
        ),
        (
            json.dumps({f"a text {n}": n % 2 for n in range(40)}),
            r"is one object of 40 keys \(a text 0, a text 1, .* and 34 more\), which is read as",
        ),
        ('{"a": "x", "b": "y", "c": "z", "label": 1}', r"has 3 text columns \(a, b, c\)"),
        ('{\n"text": "a",\n"text": "b"\n}', "an object has the key 'text' 2 times, and only one"),
        ('{"data": [{"text": "a"}], "n": 3}', "in the list 'data': write only that list"),
        ('{"text": ["a", "b"], "label": 0}\n', 'is a list of words in each row: .* such as "a b"'),
        ('{"text": [1, 2], "label": 0}\n', r"has 0 text columns \(text is a list in each row\)"),
        ('{"text": "", "label": 0}\n', "no row has a text in text, so there is nothing to read"),
    ],
)
def test_json_without_rows_of_texts_is_an_error(tmp_path, content, message):
    with pytest.raises(ValueError, match=rf"rows\.json: .*{message}"):
        read(tmp_path / "rows.json", content)


@pytest.mark.parametrize(
    ("content", "known", "is_warned"),
    [
        ("a film\nbad\n", ("text",), True),
        ("film, really\nbad,bad\n", ("text",), True),
        ("film\nbad\n", ("text",), False),
        ("a film\nbad\n", (), False),
        ("a film\nbad\n", ("a film",), False),
        ("a film,label\nbad,0\n", ("text",), False),
    ],
)
def test_a_header_that_looks_like_a_text_gives_a_warning(
    tmp_path, caplog, content, known, is_warned
):
    """The warning is for models that were trained on texts of another name."""
    path = tmp_path / "rows.csv"
    path.write_text(content)
    choose_columns(read_table(str(path)), str(path), known_texts=known)
    warning = "if that is a row, write the names in a line before it: text"
    assert (warning in caplog.text) is is_warned


def test_a_row_may_have_objects_in_other_columns(tmp_path):
    for name in ("spans", "data"):
        content = f'{{"text": "a", "label": 0, "{name}": [{{"from": 1}}]}}'
        assert read(tmp_path / "rows.json", content)[1] == [{"text": "a", "label": 0}]
    (tmp_path / "rows.json").write_text('{"tokens": ["a", "b"], "data": [{"from": 1}]}')
    assert len(read_table(str(tmp_path / "rows.json"))) == 1


def test_a_list_of_words_as_a_text_is_an_error(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('{"text": ["a", "b"], "label": 0}\n')
    with pytest.raises(ValueError, match=r'\(\["a", "b"\]\): write its words as one text'):
        take_columns(read_table(str(path)), str(path), Columns(("text",)))


@pytest.mark.parametrize(("values", "is_warned"), [(1, True), (10, True), (11, False)])
def test_a_text_column_of_few_values_gives_a_warning(tmp_path, caplog, values, is_warned):
    """It may be the labels' names, from which a model would read the label."""
    rows = [f"{n % 2},a film of {n} minutes,kind {n % values}" for n in range(10 * values)]
    columns, _ = read(tmp_path / "rows.csv", "\n".join(["label,text,kind", *rows]))
    assert columns.texts == ("text", "kind")
    path = tmp_path / "rows.csv"
    assert [
        f"{path}: kind is taken for text, but has {values} value" in m for m in caplog.messages
    ] == [True] * is_warned
    caplog.clear()
    choose_columns(read_table(str(path)), str(path), texts=("text", "kind"))
    assert not caplog.messages


@pytest.mark.parametrize("labeled", [True, False])
def test_a_missing_label_column_is_reported_instead_of_warnings_about_texts(
    tmp_path, caplog, labeled
):
    """One of the columns may be the label; a file to predict needs no label."""
    path = tmp_path / "rows.csv"
    rows = [f"a film of {n} minutes,{('bad', 'good')[n % 2]}\n" for n in range(40)]
    path.write_text("".join(["review,verdict\n", *rows]))
    data = read_table(str(path))
    if labeled:
        with pytest.raises(
            ValueError, match=r"has no column 'label'; its columns are 'review', 'verdict': --l"
        ):
            choose_columns(data, str(path), labeled=True)
    else:
        choose_columns(data, str(path))
    assert ("verdict is taken for text" in caplog.text) is not labeled


def test_one_json_object_of_many_texts_needs_text_columns(tmp_path):
    """It may be the one row of a file to predict, or all rows of a file, by their names."""
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({f"n{n}": f"text {n}" for n in range(25)}))
    data = read_table(str(path))
    with pytest.raises(ValueError, match=r"is one row, name its texts with --text_columns$"):
        choose_columns(data, str(path))
    columns = choose_columns(data, str(path), texts=["n3"])
    assert list(take_columns(data, str(path), columns, labeled=False)) == [{"text": "text 3"}]


@pytest.mark.parametrize(
    ("values", "is_warned"),
    [
        (["2024-03-12", "12/03/24"], True),
        (["2024-03-12", "on 2024-03-13"], False),
        (["2024-03-12", "12 March 2024"], False),
        (["https://a.org", "https://b.org/c"], True),
        (["https://a.org", "see https://b.org"], False),
        (["x1", "suffix"], True),
        (["affix", "suffix"], True),
    ],
)
def test_a_text_column_of_single_words_gives_a_warning(tmp_path, caplog, values, is_warned):
    """They may be texts, such as terms, or dates, links or user names."""
    rows = [f"{value},a {n} b,{n}" for n, value in enumerate(values)]
    columns, _ = read(tmp_path / "rows.csv", "\n".join(["which,said,label", *rows]))
    assert columns.texts == ("which", "said")
    warned = f"which is taken for text, but has single words ({values[0]}"
    assert (warned in caplog.text) is is_warned


def test_more_than_two_text_columns_are_an_error(tmp_path):
    head = "date,user,url,text,label\n"
    rows = "2024-03-12,ann,https://a.org,a b,0\n2024-03-13,ann,https://b.org,b c,1\n"
    with pytest.raises(ValueError, match=r"has 4 text columns \(date, user, url, text\)"):
        read(tmp_path / "rows.csv", head + rows)


def test_one_of_two_texts_may_be_empty(tmp_path, caplog):
    path = tmp_path / "rows.csv"
    path.write_text("a,b,label\nx,,0\ny,,1\n")
    data = read_table(str(path), ("a", "b"))
    assert len(take_columns(data, str(path), Columns(("a", "b")))) == 2
    assert "2 of 2 rows have an empty b, row 1 first" in caplog.text


def test_a_training_set_without_texts_is_an_error(tmp_path, caplog):
    columns = Columns(("a", "b"))
    for texts, is_empty in ((" ,", True), (" ,x", False)):
        path = tmp_path / "rows.csv"
        path.write_text(f"a,b,label\n,,0\n{texts},1\n")
        data = take_columns(read_table(str(path), columns.texts), str(path), columns)
        assert "2 of 2 rows have an empty a, row 1 first" in caplog.text
        if is_empty:
            with pytest.raises(ValueError, match=r"rows\.csv: no row has a text in a and b"):
                check_not_empty(data, columns, str(path))
        else:
            check_not_empty(data, columns, str(path))


def check_training_classes(labels, texts=None):
    """Checks the classes of a training set, which may warn."""
    texts = texts or [f"text {n}" for n in range(len(labels))]
    train = datasets.Dataset.from_dict({"text": texts, "label": labels})
    check_classes(train, sorted(set(labels)), Columns(("review",), "verdict"), "a.csv")


@pytest.mark.parametrize(
    ("labels", "warnings"),
    [
        (["1", "2", "other"], ["numbers (1, 2) and words (other): each is a class; if some"]),
        (
            ["0", "good"],
            ["numbers (0) and words (good): each is a class; if some mean the same, write"],
        ),
        (["0", "1", "bad", "good"], ["are numbers (0, 1) and words (bad, good): each is a class"]),
        (
            ["3,8", "2,5"],
            ["2,5, 3,8 are words, so each is a class: if they are scores, write a de"],
        ),
        (["3,8", "5"], ["3,8 are words, so each is a class: if they are scores, write a decimal"]),
        (["3,8", "5", "1,2,3"], ["numbers (5) and words (1,2,3, 3,8): each is a class"]),
        (
            ["2.5", "3.0", "3.8"],
            ["a.csv: 2.5, 3.8 are texts, so each is a class: if they are scores, write them"],
        ),
        (["1.0", "2.0"], []),
        (["inf", "up"], []),
        (["good", "NA"], ["label of 4 rows is 'NA', row 2 first, which counts as a class: if"]),
        (
            ["-", "nan", "up"],
            ["label of 4 rows is 'nan', row 2 first, which counts as a class"],
        ),
        (["none", "for", "against"], []),
        (["1", "nan"], ["numbers (1) and words (nan): each is a class"]),
        (["1", "2", "3"], []),
        (["bad", "good", "1st", "2nd"], []),
        (["Bad", "bad"], ["'Bad', 'bad' are separate classes; do they mean the same?"]),
    ],
)
def test_classes_that_may_be_mistakes_give_a_warning(caplog, labels, warnings):
    check_training_classes(labels * 4)
    assert len(caplog.messages) == len(warnings)
    for message, part in zip(caplog.messages, warnings, strict=True):
        assert part in message


def test_a_blank_label_is_an_error(tmp_path):
    for suffix, content in (
        ("csv", 'text,label\na,x\nb," "\n'),
        ("json", '{"text": "b", "label": " "}'),
    ):
        with pytest.raises(ValueError, match=r"row \d: has no 'label'"):
            read(tmp_path / f"rows.{suffix}", content)


def test_the_warning_about_many_classes_is_one_short_line(caplog):
    check_training_classes(
        [str(n) for n in range(10**9, 10**9 + 99)] * 4 + ["long\n" * 99, "b" * 99, "c"] * 4
    )
    (message,) = caplog.messages
    assert len(message) < 300
    assert "\n" not in message
    assert "1000000000, 1000000001, " in message
    assert " … and 1 more): each is a class; if some mean the same, write them alike" in message


@pytest.mark.parametrize(
    ("first", "later"), [("0", "good"), ("0", "0.5"), ("0.5", "good"), ("good", "0"), ("a", "b")]
)
@pytest.mark.parametrize("text", ["a film", "a film " * 50])
def test_labels_of_a_large_csv_that_change_their_kind(tmp_path, first, later, text):
    """They are read as in a small file, though pandas reads at most 10,000 rows at once."""
    tables = []
    for rows in (1, 10_000):
        path = tmp_path / f"{rows}.csv"
        path.write_text("text,label\n" + f"{text},{first}\n" * rows + f"{text},{later}\n")
        data = read_table(str(path), ("text",), str(tmp_path / "cache"))
        assert len(data) == rows + 1
        tables.append(take_columns(data, str(path), Columns(("text",))))
    assert tables[0].features == tables[1].features
    assert label_names(tables[1], ()) == label_names(tables[0], ())


@pytest.mark.parametrize("name", ["rows[1].csv", "rows[1].json", "row*1.csv", "rows[1]/of.csv"])
def test_a_file_s_name_is_not_a_pattern(tmp_path, monkeypatch, name):
    """`datasets` would read ``rows1``, also if the name of a folder further up is a pattern."""
    for folder in ("runs[1]", "runs1"):
        for file in (name, name.replace("[1]", "1").replace("*", "s")):
            path = tmp_path / folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            text = file if folder == "runs[1]" else "of another folder"
            path.write_text(f"text\n{text}\n" if file.endswith("csv") else f'{{"text": "{text}"}}')
    monkeypatch.chdir(tmp_path / "runs[1]")
    for path in (name, os.path.abspath(name)):
        assert read_table(path, cache_dir=str(tmp_path / "cache"))["text"][:] == [name]


def test_an_error_after_labels_of_another_kind_is_reported(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "a,0\n" * 10_000 + "b,x\n" * 10_000 + "a,b,1\n")
    with pytest.raises(ValueError, match="row 20001: has 3 fields, the header names 2 columns"):
        read_table(str(path))


@pytest.mark.parametrize("label", ["a", 0])
@pytest.mark.parametrize("before", [0, 3, 20_000])
def test_a_second_line_of_column_names_is_an_error(tmp_path, before, label):
    """As in files that were joined: its label would be one more class."""
    path = tmp_path / "rows.csv"
    rows = f"7,yes it is,{label}\n"
    path.write_text("id,text,label\n" + rows * before + "id,text,label\n" + rows * 3)
    with pytest.raises(ValueError, match=rf"row {before + 1}: is the line of column names again"):
        read_table(str(path))


@pytest.mark.parametrize("header", [",text,label", "text,label,", "\ufefftext,label,id"])
def test_a_second_line_of_column_names_may_have_an_empty_name_or_a_byte_order_mark(
    tmp_path, header
):
    """As in tables with an index that pandas has written, and in those of spreadsheets."""
    path = tmp_path / "rows.csv"
    path.write_text(2 * f"{header}\n0,a,1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="row 2: is the line of column names again"):
        read_table(str(path))


def test_a_row_may_have_the_names_of_some_columns(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\ntext,a\nno,label\n")
    assert read_table(str(path))["text"][:] == ["text", "no"]
    path.write_text("text\ntext\nno\n")  # may be a text
    assert read_table(str(path))["text"][:] == ["text", "no"]


def test_a_text_as_the_label_is_reported(caplog):
    texts = [f"a text {n}" for n in range(100)]
    with pytest.raises(
        ValueError, match=r"verdict has 100 classes in 100 rows, but review has 2 "
    ) as e:
        check_training_classes(texts, ["bad", "good"] * 50)
    assert "give --text_columns verdict --label_column review" in str(e.value)
    check_training_classes(texts)
    check_training_classes(texts[:4], ["so so"] * 4)
    assert caplog.messages == [
        "a.csv: 100 classes in 100 rows; is verdict its label?",
        "a.csv: 4 classes in 4 rows; is verdict its label?",
    ]


def test_the_error_about_an_unknown_label_names_only_some_classes():
    rows = datasets.Dataset.from_dict({"text": ["a"], "label": ["a long text " * 50]})
    labels = tuple(f"class {n}" for n in range(3_200))
    with pytest.raises(ValueError, match=r"'class 9' … and 3,190 more\)$") as error:
        number_labels(rows, labels, "a.csv")
    assert len(str(error.value)) < 300


def test_a_text_that_is_a_number_stays_text(tmp_path):
    columns, rows = read(tmp_path / "rows.csv", "text,label\n1.5,0\nno number,1\n")
    assert columns == Columns(("text",))
    assert [row["text"] for row in rows] == ["1.5", "no number"]


@pytest.mark.parametrize(
    ("known", "asked", "label", "texts"),
    [
        (("bad", "good", "odd"), None, "label", None),
        (("bad", "good", "odd"), None, "verdict", ("review",)),
        (("bad", "good", "odd"), ["review", "verdict"], "label", ("review", "verdict")),
        (("bad", "odd"), None, "label", ("review", "verdict")),
        ((), None, "label", ("review", "verdict")),
    ],
)
def test_a_column_of_the_model_s_classes_is_only_a_text_if_chosen(
    tmp_path, known, asked, label, texts
):
    path = tmp_path / "rows.csv"
    path.write_text("review,verdict\nfine,good\nawful,bad\nso so,\n", encoding="utf-8")
    data = read_table(str(path))
    if texts is None:
        with pytest.raises(ValueError, match="each value of 'verdict' is one of the"):
            choose_columns(data, str(path), asked, label, known_labels=known)
    else:
        assert choose_columns(data, str(path), asked, label, known_labels=known).texts == texts


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        (
            "rev,verdict",
            "fine,good",
            "lacks 'review', which the model was trained on, and each value of 'verdict' "
            "is one of the model's classes: if it is the label, give --label_column verdict; ",
        ),
        (
            "a,b",
            "1,2",
            r"has 0 text columns \(a is of int64, b is of int64\); the model was trained on "
            "'review': rename the columns that are meant, or name them with --text_columns",
        ),
    ],
)
def test_a_missing_column_of_the_training_is_named(tmp_path, header, row, message):
    path = tmp_path / "rows.csv"
    path.write_text(f"{header}\n{row}\n")
    known = {"known_texts": ("review",), "known_labels": ("bad", "good")}
    with pytest.raises(ValueError, match=f"^{path}: {message}"):
        choose_columns(read_table(str(path)), str(path), **known)


@pytest.mark.parametrize(
    ("is_first", "way_out"), [(True, "--{}_column"), (False, "rename the one")]
)
def test_a_file_without_the_columns_of_another_one_is_to_be_changed(tmp_path, is_first, way_out):
    """The flags are for all files, so they can only name columns of the first one."""
    path = tmp_path / "rows.csv"
    path.write_text("review,verdict\nfine,good\n")
    data = read_table(str(path))
    for columns, flag in ((Columns(("text",)), "text"), (Columns(("review",)), "label")):
        message = f"has no column '{flag}'; its columns are 'review', 'verdict': "
        with pytest.raises(ValueError, match=message + way_out.format(flag)) as error:
            take_columns(data, str(path), columns, is_first=is_first)
        if not is_first:
            assert str(error.value).endswith(f"to '{flag}' in this file")


@pytest.mark.parametrize(
    ("known", "asked", "texts"),
    [
        (("answer", "question"), None, ("answer", "question")),
        (("Answer", "question "), None, ("answer", "question")),
        (("answer",), None, ("answer",)),
        (("answer", "question"), ["question"], ("question",)),
        (("answer", "other"), None, ("question", "answer")),
        ((), None, ("question", "answer")),
    ],
)
def test_the_texts_that_a_model_was_trained_on_are_found_by_name(tmp_path, known, asked, texts):
    path = tmp_path / "rows.csv"
    path.write_text("id,question,answer\n1,who?,me\n2,what?,that\n", encoding="utf-8")
    columns = choose_columns(read_table(str(path)), str(path), asked, known_texts=known)
    assert columns.texts == texts


@pytest.mark.parametrize("read_file", [read_table, read_questions])
@pytest.mark.parametrize("end", ["csv", "json"])
def test_missing_files_folders_and_pipes_are_errors(tmp_path, read_file, end):
    path = tmp_path / f"rows.{end}"
    with pytest.raises(FileNotFoundError, match=rf"rows\.{end}: no such file$"):
        read_file(str(path))
    path.mkdir()
    with pytest.raises(IsADirectoryError, match=rf"rows\.{end}: is a folder; give a file of it$"):
        read_file(str(path))
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=rf"rows\.{end}: is a pipe, not a file: save its content"):
        read_file(str(path))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["0.5", "NA", "1.5"], "row 2: its label is 'NA', where others are numbers: leave the row"),
        (["7", "007", "10"], "row 2: its label is 007, which would be read as 7: write 7, or"),
        (["1", "+2", "3"], r"row 2: its label is \+2, which would be read as 2"),
        (["1", "2", "nan"], "row 3: its label is 'nan', where others are numbers"),
        (["0.5", "inf"], "row 2: its label is inf: a score has to be finite"),
        (["0.5", "1.5", "-1e999"], "row 3: its label is -inf: a score has to be finite"),
        (['"0,5"', '"1,5"', '"-2,25"'], r"label has decimal commas \(0,5\): write points"),
        (["none", "some", "all"], None),
        (["none", "none", "none"], None),
        (["1", "2", "other"], None),
    ],
)
def test_scores_with_missing_or_malformed_numbers_are_errors(tmp_path, labels, message):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "".join(f"a,{label}\n" for label in labels))
    if message is None:
        assert read(path, path.read_text())[1][0]["label"] == labels[0]
        return
    with pytest.raises(ValueError, match=f"rows.csv: {message}"):
        read(path, path.read_text())


def test_labels_are_read_after_an_empty_line(tmp_path):
    content = "\ntext,label\na,7\n\nb,8\n"
    assert [row["label"] for row in read(tmp_path / "rows.csv", content)[1]] == [7, 8]
    with pytest.raises(ValueError, match="row 2: its label is 08, which would be read as 8"):
        read(tmp_path / "rows.csv", content.replace("8", "08"))


def test_labels_of_long_texts_are_numbers(tmp_path):
    rows = read(tmp_path / "rows.csv", f"text,label\n{'a ' * 80_000},0\nno,1\n")[1]
    assert [row["label"] for row in rows] == [0, 1]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            ['"x"', '"y"', "1"],
            r'row 3: its label is a number \(1\), but that of row 1 is a text \("',
        ),
        (["1", "1.5", '"1"'], r'row 3: its label is a text \("1"\), but that of row 1 is a number'),
        (['"1"', "1"], r'row 2: its label is a number \(1\), but that of row 1 is a text \("1"'),
        (
            ["1", "true"],
            r"row 2: its label is true or false \(true\), but that of row 1 is a number",
        ),
    ],
)
def test_labels_of_two_kinds_in_json_are_errors(tmp_path, labels, message):
    lines = "".join(f'{{"text": "a", "label": {label}}}\n' for label in labels)
    with pytest.raises(ValueError, match=f"{message}.*: write all of them alike"):
        read(tmp_path / "a.jsonl", lines)


def test_a_json_number_among_texts_is_an_error(tmp_path):
    lines = '{"text": "5", "label": 0}\n{"text": 5, "label": 1}\n'
    (tmp_path / "a.jsonl").write_text(lines)
    data = read_table(str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match=r"row 2: its text is a number, not a text \(5\)"):
        take_columns(data, str(tmp_path / "a.jsonl"), Columns(("text",)))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', '{"text": "b"', '{"text": "c"}'], "line 2: is not JSON"),
        (['{"text": "a"}', "", '{"text": '], "line 3: is not JSON"),
        (['{"text": "a"}', '["b"]'], r'line 2: is not a JSON object \(\["b"\]\)'),
        (['{"text": "a"}', '{"text": "b", "text": "c"}'], "line 2: has the key 'text' 2 times"),
        (['{"text": "a"'], "line 1: is not JSON"),
        (['{"text": ', '{"text": "b"}'], "line 1: is not JSON"),
        (["['a', 'b']", '{"text": "b"}'], "line 1: is not JSON"),
        (
            [r'{"text": "\ud83d\ude00"}', r'{"text": "\ud83d"}'],
            "line 2: has half of a surrogate pair",
        ),
        # Values over several lines, and lists: not one JSON value per line.
        (["[", '{"text": "a"},', '{"text": "b"', "]"], "line 4: is not JSON"),
        ([' [{"text": "a"},', '{"text": "b"', "]"], "line 3: is not JSON"),
        (['{"data": [', '{"text": "a"},', '{"text": "b"', "]}"], "line 4: is not JSON"),
        (["{", '"text": "a"', "}", "{", "text", "}"], "line 5: is not JSON"),
        (
            ["{", '"text": "a"', "}", "{", r'"text": "\udc00"', "}"],
            "row 2: has half of a surrogate pair",
        ),
    ],
)
def test_json_that_cannot_be_read_is_reported_with_its_line(tmp_path, lines, message):
    with pytest.raises(ValueError, match=rf"rows\.jsonl: {message}"):
        read(tmp_path / "rows.jsonl", "\n".join(lines))


@pytest.mark.parametrize("begin", ['{"text": "a"}\n', '{"text":\n "a"}\n'])
@pytest.mark.parametrize("end", ["\n", "\r"])
def test_json_that_is_not_utf_8_is_an_error(tmp_path, begin, end):
    path = tmp_path / "rows.json"
    content = (begin + '{"text": "caf\xe9"}\n').replace("\n", end)
    path.write_bytes(content.encode("latin-1"))
    row = begin.count("\n") + 1
    with pytest.raises(ValueError, match=rf"rows\.json: line {row}: is not UTF-8 text; save"):
        read_table(str(path))
    path.write_bytes(content.encode())
    assert read_table(str(path))["text"][:] == ["a", "caf\xe9"]


def test_a_fault_is_searched_line_by_line(tmp_path):
    """A large file is not read into memory for it."""
    path = tmp_path / "rows.json"
    path.write_text((json.dumps({"text": "a" * 10_000}) + "\n") * 500 + "wrong")
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"line 501: is not JSON"):
        find_fault(str(path), in_pieces=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size / 5


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_columns_are_not_read_row_by_row(tmp_path, monkeypatch, suffix):
    """Reading row by row would take fifty times as long."""

    def iterate(column):
        raise AssertionError

    monkeypatch.setattr(datasets.arrow_dataset.Column, "__iter__", iterate)
    path = write(tmp_path / f"rows.{suffix}", [{"text": "a", "label": n} for n in (0, 1)])
    data = read_table(str(path))
    taken = take_columns(data, str(path), choose_columns(data, str(path)))
    numbered = number_labels(taken, ("1", "0"), str(path))
    assert numbered["label"][:] == [1, 0]


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_a_full_disk_of_the_cache_is_no_fault_of_the_file(tmp_path, monkeypatch, suffix):
    def finalize(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(datasets.arrow_writer.ArrowWriter, "finalize", finalize)
    path = write(tmp_path / f"rows.{suffix}", [{"text": "a", "label": n} for n in (0, 1)])
    cache = tmp_path / "cache"
    with pytest.raises(DiskFullError) as error:
        read_table(str(path), cache_dir=str(cache))
    assert str(error.value).startswith(f"{cache / suffix}: the disk is full: ")


@pytest.mark.parametrize("suffix", ["csv", "json"])
@pytest.mark.parametrize("name", ["*.arrow", "dataset_info.json"])
def test_a_damaged_cache_is_no_fault_of_the_file(tmp_path, suffix, name):
    path = write(tmp_path / f"rows.{suffix}", [{"text": "a", "label": n} for n in (0, 1)])
    cache = tmp_path / "cache"
    read_table(str(path), cache_dir=str(cache))
    (written,) = cache.rglob(name)
    written.write_bytes(b"")  # as after a power failure
    with pytest.raises(OSError, match="the cache is damaged") as error:
        read_table(str(path), cache_dir=str(cache))
    assert str(error.value).startswith(f"{cache / suffix}: the cache is damaged (")
    shutil.rmtree(cache / suffix)  # what the error says to do
    assert len(read_table(str(path), cache_dir=str(cache))) == 2


def test_json_that_is_nested_too_deep_is_an_error(tmp_path, monkeypatch):
    """Here the error is raised by hand: the limit depends on Python's version."""

    def load(*_, **__):
        raise RecursionError("maximum recursion depth exceeded")

    path = tmp_path / "rows.json"
    path.write_text('{"text": "a"}\n{"text": ' + "[" * 3_000 + "]" * 3_000 + "}\n")
    monkeypatch.setattr(text_files, "load_rows", load)
    with pytest.raises(ValueError, match=r"rows\.json: .*is nested too deep"):
        read_table(str(path))


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        (
            "0",
            '"x"',
            r'its label is a text \("x"\), but that of line 1 is a number \(0\): write',
        ),
        ("0", "true", r"its label is true or false \(true\), but that of line 1 is a number"),
        ("0", "0.5", "its label is 0.5, but that of line 1 is 0: write all of them with a"),
        ("null", '"x"', "is the first row with a value for 'label': give one to all rows, or to"),
        ('0, "note": 1, "note 2": "1"', '0, "note": "1", "more": 1', "is the first .* for 'more'"),
        ("0", "1.0", None),
        ("0.5", "1", None),
        ("0", "null", None),
    ],
)
def test_json_values_that_do_not_fit_the_types_of_the_first_piece(tmp_path, first, later, message):
    rows = text_files._PIECE // 10_000 + 1
    line = '{{"text": "{}", "label": {}}}\n'
    path = tmp_path / "rows.json"
    path.write_text(line.format("a" * 10_000, first) * rows + line.format("b", later))
    if message is None:
        assert len(read_table(str(path))) == rows + 1
        return
    with pytest.raises(ValueError, match=rf"rows\.json: line {rows + 1}: {message}"):
        read_table(str(path))


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_empty_texts_are_counted(tmp_path, caplog, suffix):
    texts = ["yes", "", "no", "  ", "yes"]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "csv":
        content = "text,label\n" + "".join(f"{text},{n % 2}\n" for n, text in enumerate(texts))
    else:
        rows = ({"text": text, "label": n % 2} for n, text in enumerate(texts))
        content = "\n".join(map(json.dumps, rows))
    _, rows = read(path, content)
    assert [row["text"] for row in rows] == texts
    (message,) = caplog.messages
    assert message.startswith(f"{path}: 2 of 5 rows have an empty text, row 2 first")
    caplog.clear()
    read(path, content.replace("  ", "why").replace('""', '"not"').replace("\n,", "\nnot,"))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("kind", "content"),
    [("csv", "text,label\n{},a\n"), ("json", '{{"text": "{}"}}\n'), ("text", "{}")],
)
def test_a_file_is_read_again_if_its_content_changes(tmp_path, kind, content):
    """As after `cp -p`; the cache of `datasets` would compare only these two."""
    path = tmp_path / f"rows.{kind}"
    for text in ("first", "other"):
        path.write_text(content.format(text))
        os.utime(path, (1e9, 1e9))
        assert load_rows(kind, str(path))["text"][:] == [text]


def test_a_mapped_table_is_computed_again_if_its_file_changes(tmp_path):
    path = tmp_path / "rows.csv"
    for text in ("first", "other"):
        path.write_text(f"text,label\n{text},a\n")
        os.utime(path, (1e9, 1e9))
        mapped = read_table(str(path)).map(lambda row: {"twice": 2 * row["text"]})
        assert mapped["twice"][:] == [2 * text]


def test_a_column_s_name_may_contain_a_semicolon(tmp_path):
    (tmp_path / "a.csv").write_text("text; and more\nhello\nthere\n")
    assert read_table(str(tmp_path / "a.csv")).column_names == ["text; and more"]


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        ("no date", False),
        ("of 2020-01-01", False),
        ("2020-01-01 and later", False),
        ("2020-01-01", True),
        ("2020-01-01 10:00", True),
        ("2020-01-01T10:00:00.5Z", True),
    ],
)
def test_json_is_read_in_pieces_unless_it_has_dates(tmp_path, monkeypatch, text, is_whole):
    """Reading it whole takes several times as much memory and time."""
    read_options = {}

    def load(kind, path, **options):
        read_options.update(options)
        return load_rows(kind, path, **options)

    monkeypatch.setattr(text_files, "_PIECE", 20)
    monkeypatch.setattr(text_files, "load_rows", load)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"2020-01-01": "a", "text": text}))
    assert read_table(str(path))["text"][:] == [text]
    assert ("chunksize" in read_options) == is_whole


@pytest.mark.parametrize("names", [["from"], ["from", "to"]])
def test_columns_of_dates_alone_stay_texts(tmp_path, names):
    path = tmp_path / "dates.json"
    rows = [dict.fromkeys(names, f"2020-01-0{n}") for n in range(1, 4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_table(str(path)).to_list() == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('null\n{"text": "a"}\n', r"line 1: is not a JSON object \(null\)"),
        ("\ufeff null", r"line 1: is not a JSON object \(null\)"),
        ("5", r"line 1: is not a JSON object \(5\)"),
        ("text\na\n", r"line 1: is not JSON"),
        ('{"text": "b"}\n' + "[" * 100_000, r"line 2: is nested too deep"),
        (" \n", r"holds no examples"),
    ],
)
def test_content_that_the_json_reader_cannot_take_is_an_error(tmp_path, content, message):
    """For example, null, with which pyarrow would crash the process."""
    path = tmp_path / "rows.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"rows\.json: {message}"):
        read_table(str(path))
