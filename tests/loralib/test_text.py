"""Tests that names and values are shortened to one line for messages."""

import pytest

from loralib import text


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], ""),
        (["b", "a"], "b, a"),
        ([str(n) for n in range(10)], "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"),
        ([str(n) for n in range(3_200)], "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 … and 3,190 more"),
        (["a" * 61], "a" * 60 + "…"),
        (["a\nb", "c"], "a b, c"),
        ([letter * 60 for letter in "abcd"], f"{'a' * 60}, {'b' * 60}, {'c' * 60} … and 1 more"),
        (["a" * 300, "b" * 300] * 9, f"{'a' * 60}…, {'b' * 60}…, {'a' * 60}… … and 15 more"),
    ],
)
def test_a_list_of_names_is_shortened(names, expected):
    assert text.in_short(iter(names)) == expected


def test_a_shortened_name_in_quotes_has_its_closing_quote():
    assert text.quoted(iter(["b", " a"])) == "'b', ' a'"
    assert text.quoted(["a" * 61, "b"]) == f"'{'a' * 60}…', 'b'"


def test_fewer_names_where_there_is_less_room():
    assert text.in_short(["one", "two", "three"], width=10) == "one, two … and 1 more"
    assert text.in_short(["a" * 50, "two"], width=10) == f"{'a' * 50} … and 1 more"


def test_values_are_shown_in_one_short_line():
    assert text.shown({"a": "b\nc"}) == r"{'a': 'b\nc'}"
    assert text.shown("a" * 70) == "'" + "a" * 59 + "…"
    assert text.as_json([None, "ä", {1}]) == '[null, "ä", "{1}"]'
    assert text.as_json("a" * 70) == '"' + "a" * 59 + "…"
