"""Checks the arguments of tokenizers' calls, brings them into one form, and cuts rows' lengths."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .file_utils import ExplicitEnum, PaddingStrategy


class TruncationStrategy(ExplicitEnum):
    """What is cut if a row is too long: a call's ``truncation``."""

    LONGEST_FIRST = "longest_first"
    ONLY_FIRST = "only_first"
    ONLY_SECOND = "only_second"
    DO_NOT_TRUNCATE = "do_not_truncate"


TRUNCATION_STRATEGIES = tuple(each.value for each in TruncationStrategy)
PADDING_STRATEGIES = tuple(each.value for each in PaddingStrategy)


class NotTextError(TypeError, ValueError):
    """Raised for something that is not text, or not a word, in a call or in its data.

    It is a TypeError, as in 4.4.2, and a ValueError, which scripts report in one line as a fault of
    the user's data.
    """


class Inputs(NamedTuple):
    """The inputs of rows: texts, texts as words, or texts' ids.

    Args:
        firsts: each row's first text: a string, a list of words, or a list of ids.
        seconds: each row's second text; None if rows are not pairs.
        batched: a list was given, even one of a single row.
    """

    firsts: list[Any]
    seconds: list[Any] | None
    batched: bool


@dataclass(frozen=True)
class RowSettings:
    """How rows are made from inputs: a call's arguments, checked.

    Args:
        columns: the entries asked for.
        add_special_tokens: add the model's special tokens to the rows.
        truncation: one of `TRUNCATION_STRATEGIES`, "" for none.
        max_length: in tokens, special ones included; None without truncation.
        overflow: keep what is cut off.
        stride: how many tokens of the kept part are repeated in what is cut off.
        words: texts are given as lists of words.
    """

    columns: Sequence[str]
    add_special_tokens: bool = True
    truncation: str = ""
    max_length: int | None = None
    overflow: bool = False
    stride: int = 0
    words: bool = False


# -- Inputs ----------------------------------------------------------------------------------------


def inputs_of_call(text: Any, text_pair: Any, words: bool) -> Inputs:
    """Returns the inputs that a call's `text` and `text_pair` stand for: one text, or a batch.

    Raises:
        NotTextError: something is not text, or not a word.
        ValueError: a text is paired with a list, or the lists have different lengths.
    """
    text = text if isinstance(text, str) else _listed("text", text)
    if isinstance(text, str) or (words and not _holds_texts(text)):
        if text_pair is not None and isinstance(text, str) != isinstance(text_pair, str):
            raise ValueError("text and text_pair are two texts, or two lists of texts")
        return inputs_of_one(text, text_pair, words)
    if text_pair is None:
        return inputs_of_batch(text, words)
    firsts, seconds = _listed("text", text), _listed("text_pair", text_pair)
    if len(firsts) != len(seconds):
        raise ValueError(f"there are {len(firsts)} texts, but {len(seconds)} in text_pair")
    return Inputs(
        _checked("text", firsts, words), _checked("text_pair", seconds, words), batched=True
    )


def inputs_of_one(text: Any, text_pair: Any, words: bool) -> Inputs:
    """Returns the inputs of one text, or one pair."""
    seconds = None if text_pair is None else _checked("text_pair", [text_pair], words)
    return Inputs(_checked("text", [text], words), seconds, batched=False)


def inputs_of_batch(batch: Any, words: bool) -> Inputs:
    """Returns the inputs of a batch of texts, or of pairs of texts.

    Raises:
        NotTextError: something is not text, or not a word.
        ValueError: pairs and single texts are mixed, or a row has other than two texts.
    """
    rows = _listed("text", batch)
    paired = [_is_pair(row, words) for row in rows]
    if not any(paired):
        return Inputs(_checked("text", rows, words), None, batched=True)
    if not all(paired):
        single, pair = paired.index(False), paired.index(True)
        raise ValueError(f"row {pair} is a pair, but row {single} is a single text")
    for index, row in enumerate(rows):
        if len(row) != 2:
            raise ValueError(
                f"row {index} has {len(row)} texts, but a pair has two; "
                "for words pass is_split_into_words=True"
            )
    firsts, seconds = ([row[side] for row in rows] for side in (0, 1))
    return Inputs(_checked("text", firsts, words), _checked("text_pair", seconds, words), True)


def _is_pair(row: Any, words: bool) -> bool:
    return isinstance(row, list | tuple) and (not words or _holds_texts(row))


def _holds_texts(value: Any) -> bool:
    """Returns whether these are several texts, each a list of words, not one such list."""
    return isinstance(value, Iterable) and not isinstance(next(iter(value), ""), str)


def _listed(name: str, value: Any) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise NotTextError(f"{name} is a text or a list of texts, not {type(value).__name__}")
    return list(value)


def _checked(name: str, texts: list[Any], words: bool) -> list[Any]:
    """Checks that each text is a string, or with `words` a list of words; returns the texts."""
    if words:
        return [_checked_words(f"{name} {index}", row) for index, row in enumerate(texts)]
    for index, each in enumerate(texts):
        if not isinstance(each, str):
            hint = "; for words pass is_split_into_words=True" if _is_words(each) else ""
            kind = type(each).__name__
            raise NotTextError(f"{name} {index} is {kind} ({each!r:.40}), not a text{hint}")
    return texts


def _is_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], str)


def _checked_words(name: str, row: Any) -> list[str]:
    if isinstance(row, str) or not isinstance(row, Iterable):
        raise NotTextError(
            f"{name} is {type(row).__name__} ({row!r:.40}), not a list of words, which "
            "is_split_into_words=True asks for"
        )
    row = list(row)
    for place, word in enumerate(row):
        if not isinstance(word, str):
            raise NotTextError(
                f"{name}: word {place} is {type(word).__name__} ({word!r:.40}), not a string: "
                "make it one, or leave it out"
            )
    return row


# -- Settings --------------------------------------------------------------------------------------


def strategy(name: str, value: Any, known: tuple[str, ...]) -> str:
    """Returns a strategy's name, or "". True means the first of `known`; the last means none."""
    value = getattr(value, "value", value)
    if value is True:
        return known[0]
    if not value or value == known[-1]:
        return ""
    if value not in known:
        raise ValueError(f"{name} is True, False or one of {', '.join(known)}, not {value!r}")
    return value


def with_present_names(
    padding: Any, truncation: Any, max_length: int | None, deprecated: dict[str, Any]
) -> tuple[Any, Any]:
    """Returns `padding` and `truncation`, from their deprecated names if only these are given.

    Raises:
        TypeError: an argument is unknown.
    """
    to_max_length = deprecated.pop("pad_to_max_length", False)
    cut = deprecated.pop("truncation_strategy", False)
    if deprecated:
        raise TypeError(f"calls of tokenizers have no argument {', '.join(sorted(deprecated))}")
    if to_max_length and padding is False:
        _deprecated("pad_to_max_length=True", "padding='max_length'")
        padding = "longest" if max_length is None else "max_length"
    if cut and truncation is False:
        _deprecated(f"truncation_strategy={cut!r}", f"truncation={cut!r}")
        truncation = cut
    return padding, truncation


def _deprecated(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated: pass {new}", FutureWarning, stacklevel=4)


# -- Lengths ---------------------------------------------------------------------------------------


def cut_lengths(first: int, second: int | None, how: str, room: int) -> tuple[int, int]:
    """Returns how many tokens of each text are kept.

    With "longest_first", the longer text is cut first, then both evenly. If the number of tokens is
    odd, the longer text keeps one more; of equally long ones, the second.

    Args:
        first, second: the texts' lengths in tokens; None for no second text.
        how: one of `TRUNCATION_STRATEGIES`.
        room: how many tokens both may have in all.

    Raises:
        ValueError: the text to be cut has too few tokens.
    """
    excess = first + (second or 0) - room
    if excess <= 0:
        return first, second or 0
    if second is None and how != "only_second":
        return room, 0
    if how == "longest_first":
        short = min(first, second or 0, room // 2)
        return (room - short, short) if first > (second or 0) else (short, room - short)
    lengths = [first, second or 0]
    cut = 0 if how == "only_first" else 1
    if lengths[cut] <= excess:
        raise ValueError(
            f"the texts cannot be encoded (truncation={how!r}): {excess} tokens are too many, but "
            f"the text to be cut has {lengths[cut]}; use a larger max_length, or longest_first"
        )
    lengths[cut] -= excess
    return lengths[0], lengths[1]


def check_stride(
    stride: int, max_length: int, frame: int, first: int = 0, second: int = 0, how: str = ""
) -> None:
    """Checks that a stride leaves room for new tokens.

    Args:
        stride: how many tokens a row repeats.
        max_length: the length of a row.
        frame: how many special tokens a row has.
        first, second: how many tokens a pair's texts have.
        how: one of `TRUNCATION_STRATEGIES`, for pairs.

    Raises:
        ValueError: there is no room.
    """
    room = max_length - frame
    if first or second:
        if first + second <= room:
            return
        kept = cut_lengths(first, second, how, room)
        cut = [new for new, old in zip(kept, (first, second), strict=True) if new < old]
        room = min(cut)
    if stride >= room:
        rest = f"{frame} special tokens"
        if first or second:
            rest += f" and the rest of a pair of {first} and {second} tokens"
        raise ValueError(
            f"stride={stride} is not smaller than the {room} tokens that max_length={max_length} "
            f"leaves beside {rest}: take a smaller stride or a larger max_length"
        )
