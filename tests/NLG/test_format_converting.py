"""Tests the three format_converting scripts: the rows that they write, and what they refuse."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import format_converting_dart
import format_converting_e2e
import format_converting_webnlg

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data" / "nlg"

MILL = "name : The Mill | Type : pub"


def webnlg(*entries, numbers=None):
    """Returns entries (category, triples, [(comment, text)]) in WebNLG's format."""
    rows = []
    for number, (category, triples, texts) in enumerate(entries, start=1):
        entry = {
            "category": category,
            "modifiedtripleset": [
                {"object": object_, "property": relation, "subject": subject}
                for subject, relation, object_ in triples
            ],
            "lexicalisations": [{"comment": comment, "lex": text} for comment, text in texts],
        }
        rows.append({(numbers or {}).get(number, str(number)): entry})
    return json.dumps({"entries": rows})


def dart(*entries):
    """Returns entries (triples, texts) in DART's format."""
    return json.dumps(
        [
            {"tripleset": triples, "annotations": [{"source": "x", "text": text} for text in texts]}
            for triples, texts in entries
        ]
    )


AARHUS = ("Aarhus_Airport", "runwayLength", "2702.0")
CITY = ("Aarhus", "leaderName", "Jacob_Bundsgaard")

CASES = {
    "e2e": (
        format_converting_e2e,
        f"{MILL}||The Mill is a pub . \n{MILL}||A pub ,  The Mill . \r\n  x : y ||Café £ 20 .\n\n",
        [
            {"context": MILL, "completion": "The Mill is a pub ."},
            {"context": MILL, "completion": "A pub ,  The Mill ."},
            {"context": "x : y", "completion": "Café £ 20 ."},
        ],
    ),
    "webnlg": (
        format_converting_webnlg,
        webnlg(
            ("Airport", [AARHUS, CITY], [("good", "One."), ("toFix", "Two."), ("good", " Three.")]),
            ("Athlete", [CITY], [("good", "É.")]),
            ("City", [CITY], [("bad", "")]),
        ),
        [
            {
                "context": "Aarhus_Airport : runwayLength : 2702.0 | "
                "Aarhus : leaderName : Jacob_Bundsgaard",
                "completion": text,
                "cate": True,
            }
            for text in ("One.", "Three.")
        ]
        + [
            {
                "context": "Aarhus : leaderName : Jacob_Bundsgaard",
                "completion": "É.",
                "cate": False,
            }
        ],
    ),
    "dart": (
        format_converting_dart,
        dart(
            ([["Mars Hill", "JOINED_In", "1973"], ["[TITLE]", "A", "B"]], ["One\t here.", "Two."]),
            ([["x", "Y", "Z"]], []),
        ),
        [
            {
                "context": "Mars Hill : joined_in : 1973 | [TITLE] : a : B",
                "completion": text,
            }
            for text in ("One\t here.", "Two.")
        ],
    ),
}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", CASES)
def test_rows(name, tmp_path, mark):
    module, content, expected = CASES[name]
    source, target = tmp_path / "source", tmp_path / "made" / "formatted.jsonl"
    source.write_bytes(mark + content.encode())
    module.main([str(source), str(target)])
    assert [json.loads(line) for line in target.read_text("utf-8").splitlines()] == expected


@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_pipe(name, tmp_path):
    """Such as bash's <(zcat …). It can be read only once."""
    module, content, expected = CASES[name]
    reader, writer = os.pipe()
    with open(writer, "wb") as file:
        file.write(content.encode())
    with open(reader, "rb"):
        module.main([f"/dev/fd/{reader}", str(tmp_path / "formatted.jsonl")])
    lines = (tmp_path / "formatted.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "e2e",
            f"{MILL}||Good .\n{MILL} A pub .\n",
            ":2: not of the form meaning representation||text",
        ),
        ("e2e", f"{MILL}||Good .\n\n{MILL}||Good .\n", ":2: not of the form"),
        ("e2e", f"{MILL}||a||b\n", ":1: not of the form"),
        ("e2e", f"{MILL}||Good .\n{MILL}||  \n{MILL}||Good .\n", ":2: the completion is empty"),
        ("e2e", f"{MILL}||\n", ":1: the completion is empty"),
        ("e2e", "||Good .\n", ":1: the context is empty"),
        ("e2e", "", ":1: not of the form"),
        ("e2e", "mr,ref\n", ": holds no texts"),
        ("e2e", 'mr,ref\nname[A],"Good."\nname A,Good.\n', ":3: not a row"),
        ("e2e", "mr,ref\nname[A],Good.\nname[A]\n", ":3: not a row"),
        ("e2e", 'mr,ref\nname[A],"Two\nlines."\nname[A]," "\n', ":4: the completion is empty"),
        ("e2e", 'mr,ref\nname[A],"Good."x\n', ":2: not CSV"),
        ("webnlg", "{", ": not JSON"),
        ("webnlg", "[" * 100_000, ": is nested too deep"),
        ("webnlg", "[]", ': not WebNLG\'s format, it has no list of "entries"'),
        ("webnlg", webnlg(), ": holds no texts"),
        (
            "webnlg",
            webnlg(("City", [CITY], [("toFix", "One."), ("", "Two.")])),
            ': no text has the comment "good", which marks the texts to use: all 2 have',
        ),
        (
            "webnlg",
            webnlg(("City", [CITY], [("good", "One.")]), ("City", [CITY], [("good", "")])),
            ": entry 2: the completion is empty",
        ),
        (
            "webnlg",
            webnlg(*[("City", [CITY], [("good", "One.")])] * 2, numbers={2: "7"}),
            ": entry 2: not in WebNLG's format",
        ),
        (
            "webnlg",
            '{"entries": [{"1": {"category": "City"}}]}',
            ": entry 1: not in WebNLG's format",
        ),
        ("dart", "{}", ": not DART's format, it is not a list"),
        ("dart", "[1]", ": entry 1: not in DART's format"),
        ("dart", dart(([["a", "b", "c"]], ["One."]), ([["a", "b"]], ["One."])), ": entry 2: a tri"),
        ("dart", dart(([["a", "b", "c"]], ["One.", "\n"])), ": entry 1: the completion is empty"),
        (
            "dart",
            dart(([["a", "b", "c"]], [None])),
            ": entry 1: the completion is not a text: None",
        ),
        ("dart", dart(([["a", "b", 3]], ["One."])), ": entry 1: not in DART's format"),
        ("dart", dart(([], ["One."])), ": entry 1: the context is empty"),
    ],
)
def test_bad_input_is_refused(name, content, message, tmp_path):
    source, target = tmp_path / "source", tmp_path / "formatted.jsonl"
    source.write_text(content, "utf-8")
    with pytest.raises(ValueError) as error:  # noqa: PT011
        CASES[name][0].main([str(source), str(target)])
    assert str(error.value).startswith(f"{source}{message}")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("name", CASES)
def test_utf_16_is_an_error_that_names_it(name, tmp_path):
    """Some Windows programs save text as UTF-16."""
    module, content, _ = CASES[name]
    source = tmp_path / "source"
    source.write_text(content, "utf-16")
    with pytest.raises(ValueError, match=r"source: is UTF-16"):
        module.main([str(source), str(tmp_path / "formatted.jsonl")])


def test_texts_that_are_left_out_are_counted(tmp_path, caplog):
    """They are WebNLG's texts that are not marked as good."""
    for name, (module, content, _) in CASES.items():
        (tmp_path / name).write_text(content, "utf-8")
        with caplog.at_level(logging.INFO):
            module.main([str(tmp_path / name), str(tmp_path / "formatted.jsonl")])
    path = tmp_path / "webnlg"
    assert caplog.messages == [f'{path}: left out 2 of 5 texts, whose comment is not "good"']


@pytest.mark.parametrize("name", CASES)
def test_the_input_is_not_overwritten(name, tmp_path):
    source = tmp_path / "source"
    source.write_text(CASES[name][1], "utf-8")
    with pytest.raises(ValueError, match="source: is an input as well; give another name"):
        CASES[name][0].main([str(source), str(source)])
    assert source.read_text("utf-8") == CASES[name][1].replace("\r\n", "\n")


@pytest.mark.slow
def test_an_error_is_one_line_and_keeps_the_old_file(tmp_path):
    source, target = tmp_path / "source", tmp_path / "formatted.jsonl"
    source.write_text("no bars\n")
    target.write_text("old")
    script = ROOT / "NLG" / "src" / "format_converting_e2e.py"
    result = subprocess.run(
        [sys.executable, str(script), str(source), str(target)], capture_output=True, text=True
    )
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        f"format_converting_e2e.py: error: {source}:1: not of the form meaning "
        "representation||text: no bars"
    ]
    assert target.read_text() == "old"


# Sentences in the style of the corpus, in the challenge's form and in the release's.
SENTENCES = [
    ("The Mill, a pub, isn't family-friendly.", "The Mill , a pub , isn 't family - friendly . "),
    ("It's rated 3.5; it costs £20-25!", "It 's rated 3.5 ; it costs £ 20 - 25 ! "),
    ("A 5-star pub (1,000 seats) ...", "A 5 - star pub ( 1,000 seats ) ... "),
    ("the 'Café' we're in..Yes", "the ' Café ' we 're in .. Yes "),
]
TEST_SENTENCES = [
    ("The Mill isn't family-friendly.", "The Mill is n't family - friendly . "),
    ("A 5-star pub, thats £20-£25.", "A 5-star pub , that s £ 20-£25 . "),
]


@pytest.mark.parametrize(
    ("name", "sentences"), [("trainset.csv", SENTENCES), ("testset_w_refs.csv", TEST_SENTENCES)]
)
def test_csv_is_converted_to_the_releases_format(name, sentences, tmp_path):
    rows = [
        f'"name[The Mill], eatType[pub], priceRange[£20-25], familyFriendly[no]","{text}"'
        for text, _ in sentences
    ]
    # As spreadsheets write it: a byte-order mark, and an empty line at the end.
    (tmp_path / name).write_text("\n".join(["mr,ref", *rows, "", ""]), "utf-8-sig")
    context = "name : The Mill | Type : pub | price : £ 20 - 25 | family friendly : no"
    lines = format_converting_e2e.as_lines(tmp_path / name)
    assert lines == [f"{context}||{text}" for _, text in sentences]
    assert format_converting_e2e.read_rows(str(tmp_path / name)) == [
        {"context": context, "completion": text.strip()} for _, text in sentences
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("published", "release", "differing"),
    [("devset.csv", "valid.txt", 1), ("testset_w_refs.csv", "test.txt", 0)],
)
def test_the_challenges_csv_files_become_the_releases_files(published, release, differing):
    if not (DATA / "e2e" / published).is_file():
        pytest.skip(f"needs e2e/{published} in {DATA}")
    lines = format_converting_e2e.as_lines(DATA / "e2e" / published)
    expected = (DATA / "e2e" / release).read_text("utf-8").splitlines()
    assert len(lines) == len(expected)
    assert sum(ours != theirs for ours, theirs in zip(lines, expected, strict=True)) == differing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "rows", "contexts"),
    [
        ("e2e", "e2e/test.txt", 4693, 630),
        ("webnlg", "webnlg/dev.json", 2258, 870),
        ("dart", "dart/dart-v1.1.1-full-dev.json", 6980, 2721),
    ],
)
def test_whole_corpora(name, file, rows, contexts):
    if not (DATA / file).is_file():
        pytest.skip(f"needs {file} in {DATA}")
    made = CASES[name][0].read_rows(str(DATA / file))
    assert (len(made), len({row["context"] for row in made})) == (rows, contexts)
