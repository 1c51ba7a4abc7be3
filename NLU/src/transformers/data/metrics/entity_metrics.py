"""Scores tagged words: whole entities, as the CoNLL tasks count them, and single words.

An entity is a run of words of one type: B-PER I-PER. Entities are read from tags by the rules of
conlleval (Tjong Kim Sang and De Meulder 2003, the shared task of CoNLL). These handle every scheme
of B, I, E and S, and take an I- that continues nothing as a start. seqeval's default mode is the
same.

The rules know no other prefixes: in BILOU's B-PER L-PER B-PER, they lose the first entity.
`conll_tags` converts such tags to those with the same meaning.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

OUTSIDE = "O"
# The prefix of a tag, and its type if it has one.
_TAG = re.compile(r"([BIES])(?:-(.+))?")
# The same in other schemes: BILOU (Ratinov and Roth 2009), BMES, BMEWO; and with "_".
_OTHER_TAG = re.compile(r"([BIESMLUW])(?:([-_])(.+))?")
_STANDS_FOR = {"M": "I", "L": "E", "U": "S", "W": "S"}
# A tag that seems to have a scheme's prefix or suffix, but in a form that is not read.
_UNREAD = re.compile(r"[BIESMLUW]([^\w].+|_.+)|[bi][-_].+|.+[-_][BIbi]")


class Entity(NamedTuple):
    """Words that belong together.

    Args:
        type: such as "PER"; "_" if tags are prefixes without types.
        start, end: the first word, and the one after the last.
    """

    type: str
    start: int
    end: int


def conll_tags(names: Sequence[str]) -> list[str]:
    """Converts the names of tags to the prefixes B, I, E and S, and "-" before the type.

    It knows the prefixes of BILOU, BMES and BMEWO, and "_" for "-": B_PER and U_PER become B-PER
    and S-PER. A set of tags without such a B (or an I with a type) follows none of these schemes
    and stays as it is. So does a set in which two tags would become the same.
    """
    matches = [_OTHER_TAG.fullmatch(name) for name in names]
    begin = [match for match in matches if match and match[1] in ("BI" if match[2] else "B")]
    forms = {match[2] for match in begin}
    read = [
        _STANDS_FOR.get(match[1], match[1]) + (f"-{match[3]}" if match[3] else "")
        if match and match[2] in forms
        else name
        for name, match in zip(names, matches, strict=True)
    ]
    return read if len({*read}) == len({*names}) else list(names)


def unread_tags(names: Sequence[str]) -> list[str]:
    """Returns the tags that seem to say where an entity starts or ends, but are not read that way.

    If other tags have a prefix, these include all tags without one, except O.
    """
    read = [_TAG.fullmatch(name) for name in conll_tags(names)]
    have_prefixes = any(match and match[2] for match in read)
    return [
        name
        for name, match in zip(names, read, strict=True)
        if name != OUTSIDE and not match and (have_prefixes or _UNREAD.fullmatch(name))
    ]


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """Returns the entities in one row of tags, in their order.

    Tags without a prefix, such as parts of speech, are types: consecutive words with the same tag
    are one entity.
    """
    found: list[Entity] = []
    before = (OUTSIDE, "")
    for index, tag in enumerate(tags):
        prefix, kind = _parts(tag)
        if prefix != OUTSIDE:
            if kind == before[1] and before[0] in "BI" and prefix in "IE":
                found[-1] = found[-1]._replace(end=index + 1)
            else:
                found.append(Entity(kind, index, index + 1))
        before = (prefix, kind)
    return found


def _parts(tag: str) -> tuple[str, str]:
    """Returns a tag's prefix and type."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    match = _TAG.fullmatch(tag)
    return (match[1], match[2] or "_") if match else ("I", tag)


def entity_metrics(
    predictions: Sequence[Sequence[str]], labels: Sequence[Sequence[str]]
) -> dict[str, float | dict[str, float]]:
    """Computes precision, recall and F1 of entities, by type and overall, and words' accuracy.

    An entity is right if its type, start and end are those of a true one. Undefined scores, such as
    the precision of a type that is never predicted, are 0.

    Args:
        predictions: the predicted tags of each row.
        labels: the true tags of each row.

    Returns:
        Type -> ``precision``, ``recall``, ``f1`` and ``number`` (of true entities); and
        ``overall_precision``, ``overall_recall``, ``overall_f1``, ``overall_accuracy``.

    Raises:
        ValueError: a row has different numbers of predictions and labels, or there are no words.
    """
    right, found, true = Counter(), Counter(), Counter()
    for row, (ours, theirs) in enumerate(zip(predictions, labels, strict=True)):
        if len(ours) != len(theirs):
            raise ValueError(f"row {row}: {len(ours)} predictions for {len(theirs)} labels")
        mine, real = set(entities_of(ours)), set(entities_of(theirs))
        found.update(entity.type for entity in mine)
        true.update(entity.type for entity in real)
        right.update(entity.type for entity in mine & real)
    words = sum(map(len, labels))
    if not words:
        raise ValueError("there are no words to score")
    scores: dict[str, float | dict[str, float]] = {
        kind: {**_scores(right[kind], found[kind], true[kind]), "number": true[kind]}
        for kind in sorted(found | true)
    }
    overall = _scores(*(sum(counts.values()) for counts in (right, found, true)))
    scores.update({f"overall_{name}": value for name, value in overall.items()})
    same = sum(
        mine == real
        for ours, theirs in zip(predictions, labels, strict=True)
        for mine, real in zip(ours, theirs, strict=True)
    )
    return {**scores, "overall_accuracy": same / words}


def _scores(right: int, found: int, true: int) -> dict[str, float]:
    """Computes precision, recall and F1 from counts."""
    return {
        "precision": right / found if found else 0.0,
        "recall": right / true if true else 0.0,
        "f1": 2 * right / (found + true) if found + true else 0.0,
    }
