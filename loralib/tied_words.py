"""Finds language models whose settings tie two weights although merging has untied them.

Upstream's language models say in `config.tie_word_embeddings` whether the head's weight is that of
the word embeddings. Whatever loads a saved model may rely on that: Transformers 4 then replaces the
head's weight by the embeddings', and converters leave one of the two out.

A model that keeps the setting itself has a method `note_untied()`, which is called here.
"""

import logging
from typing import Any, NamedTuple

from torch import nn

from .text import module_label
from .trained import is_untied

logger = logging.getLogger(__name__)


class TiedWords(NamedTuple):
    """Word embeddings, and a head with the same weight.

    Args:
        owner: the language model that has them.
        words, head: the names of the two modules in the whole model.
    """

    owner: Any
    words: str
    head: str


def tied_words(model: nn.Module) -> list[TiedWords]:
    """Returns the embeddings and heads in a model that its settings tie.

    They share a weight, or did so before an adapter untied them.
    """
    names = {module: name for name, module in model.named_modules()}
    found: dict[tuple[Any, Any], TiedWords] = {}
    for part in model.modules():
        words, head = _words_and_head(part)
        if words not in names or head not in names:
            continue
        if head.weight is words.weight or is_untied(head) or is_untied(words):
            found.setdefault((words, head), TiedWords(part, names[words], names[head]))
    return list(found.values())


def warn_of_untied(model: nn.Module, tied: list[TiedWords]) -> None:
    """Warns of weights that are not shared any more, unless the model notes that itself.

    Args:
        model: the merged model.
        tied: what `tied_words` returned before it was merged.
    """
    for owner, words, head in tied:
        if model.get_submodule(words).weight is model.get_submodule(head).weight:
            continue
        if hasattr(owner, "note_untied"):
            owner.note_untied()
            continue
        logger.warning(
            "%s and %s have a weight each now, but the config of the %s has "
            "tie_word_embeddings=True, by which loading may tie them again: set it to False before "
            "you save the model",
            *(module_label(words), module_label(head), type(owner).__name__),
        )


def let_note_untied(model: nn.Module) -> None:
    """Lets models that keep the setting themselves note that an adapter has untied weights."""
    for part in model.modules():
        note = getattr(part, "note_untied", None)
        if callable(note):
            note()


def _words_and_head(part: Any) -> tuple[Any, Any]:
    """Returns the word embeddings and the head of a language model whose settings tie them."""
    config = vars(part).get("config")
    of_text = getattr(config, "text_config", None)  # as in models of images and texts
    if not any(getattr(each, "tie_word_embeddings", False) is True for each in (config, of_text)):
        return None, None
    try:
        both = part.get_input_embeddings(), part.get_output_embeddings()
    except Exception as error:  # no words, no head, or a user's methods that only have these names
        logger.debug("%s: its word embeddings are not known (%r)", type(part).__name__, error)
        return None, None
    return both if all(hasattr(module, "weight") for module in both) else (None, None)
