"""How many tokens a row may have, and which texts were cut to that."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loralib.training import launcher_env

from ..configuration_utils import PretrainedConfig
from ..tokenization_utils_base import PreTrainedTokenizerBase

if TYPE_CHECKING:  # imported where data is read, so that --help and wrong flags answer at once
    from datasets import Dataset

logger = logging.getLogger(__name__)

# The number of tokens to which texts are truncated by default.
DEFAULT_LENGTH = 128
# The column of tokenized sets that says whether, or how often, a row was truncated.
CUT = "cut"


def check_length(config: PretrainedConfig, max_seq_length: int) -> None:
    """Refuses a --max_seq_length below 1 or beyond the model's positions.

    Raises:
        ValueError: the length is out of that range.
    """
    longest = config.longest_sequence
    if max_seq_length < 1:
        raise ValueError(f"--max_seq_length {max_seq_length}: give at least 1")
    if longest is not None and max_seq_length > longest:
        raise ValueError(
            f"--max_seq_length {max_seq_length}: the model has {longest} positions; give at most "
            "that"
        )


def choose_length(
    given: int | None,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    is_pair: bool,
    usual: int = DEFAULT_LENGTH,
) -> int:
    """Returns the number of tokens to which texts are truncated.

    That is --max_seq_length or, if it is not given, `usual`, reduced to the model's positions.

    Args:
        given: the value of --max_seq_length, or None.
        config: the model's settings.
        tokenizer: its tokenizer.
        is_pair: whether there are pairs of texts.
        usual: the default length.

    Raises:
        ValueError: the model has fewer positions, or special tokens leave too little room.
    """
    if given is None:
        length = min(usual, config.longest_sequence or usual)
        if length < usual:
            logger.info("the model has %d positions: longer texts are cut to that", length)
    else:
        check_length(config, length := given)
    check_room(length, tokenizer, is_pair)
    return length


def check_room(length: int, tokenizer: PreTrainedTokenizerBase, is_pair: bool) -> None:
    """Refuses a length that leaves no room for a text, or for both texts of a pair.

    Args:
        length: the number of tokens in a row.
        tokenizer: the tokenizer, which adds special tokens.
        is_pair: whether there are pairs of texts.

    Raises:
        ValueError: special tokens leave less than two tokens for each text.
    """
    special = tokenizer.num_special_tokens_to_add(is_pair)
    # Two tokens for each text, because the first one may be only the space before it.
    needed = special + 2 * (1 + is_pair)
    if length < needed:
        what = "a pair of texts" if is_pair else "a text"
        raise ValueError(
            f"--max_seq_length {length}: {what} needs at least {needed} tokens, of which {special} "
            "are special ones"
        )


def truncated_rows(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Sequence[Any]],
    masks: Sequence[Sequence[int]],
    length: int,
    **how: Any,
) -> list[bool]:
    """Returns for each row whether its texts were truncated.

    Args:
        tokenizer: the tokenizer that made the rows.
        texts: one list of texts, or two lists with the first and second text of each pair.
        masks: each row's attention mask, 1 for a token and 0 for padding.
        length: the maximum number of tokens in a row.
        how: further arguments with which the rows were made, such as ``is_split_into_words=True``.
    """
    # A row that is not full was not truncated. Full rows are encoded again with room for one more
    # token, which those that were truncated fill.
    full = [row for row, mask in enumerate(masks) if sum(mask) >= length]
    was_cut = [False] * len(masks)
    if full:
        known = tokenizer.model_max_length
        tokenizer.model_max_length = max(known, length + 1)  # avoids a warning about the length
        try:
            longer = tokenizer(
                *([column[row] for row in full] for column in texts),
                truncation=True,
                max_length=length + 1,
                **how,
            )
        finally:
            tokenizer.model_max_length = known
        for row, ids in zip(full, longer["input_ids"], strict=True):
            was_cut[row] = len(ids) > length
    return was_cut


def drop_cuts(
    sets: Mapping[str, Dataset], length: int, texts_per_row: int = 1
) -> dict[str, Dataset]:
    """Drops the column `CUT`, and logs how many texts of each set were truncated, if any.

    Args:
        sets: the tokenized sets, by name.
        length: the maximum number of tokens in a row.
        texts_per_row: how many texts a row has that can be truncated.
    """
    cut = {name: (sum(rows[CUT][:]), texts_per_row * len(rows)) for name, rows in sets.items()}
    report_truncation(cut, length)
    return {name: rows.remove_columns(CUT) for name, rows in sets.items()}


def report_truncation(cut: Mapping[str, tuple[int, int]], length: int) -> None:
    """Logs in one line how many texts of each set were truncated, if any.

    Args:
        cut: for each set, by name, how many rows were truncated and how many it has.
        length: the maximum number of tokens in a row.
    """
    said = [f"{rows} of {total} in {name}" for name, (rows, total) in cut.items() if rows]
    if said and launcher_env.rank() == 0:
        logger.warning("texts were cut to %d tokens: %s", length, ", ".join(said))
