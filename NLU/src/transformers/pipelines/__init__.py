"""Pipelines, which turn texts into answers with a fine-tuned model.

    classify = pipeline("sentiment-analysis", model="output/sst2")
    classify(["a good film", "a bad one"])    # [{"label": "positive", "score": 0.98}, …]

`pipeline` loads the model and its tokenizer. It also takes a model object, which may have adapters.
"""

import os
from collections.abc import Mapping
from typing import Any

from ..configuration_utils import PretrainedConfig
from ..modeling_utils import PreTrainedModel
from ..models.auto.modeling_auto import (
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from ..models.auto.tokenization_auto import AutoTokenizer
from ..tokenization_utils_base import PreTrainedTokenizerBase
from .base import ArgumentHandler, Pipeline, PipelineException, check_framework
from .fill_mask import FillMaskPipeline
from .question_answering import QuestionAnsweringArgumentHandler, QuestionAnsweringPipeline
from .text_classification import TextClassificationPipeline
from .token_classification import (
    NerPipeline,
    TokenClassificationArgumentHandler,
    TokenClassificationPipeline,
)

__all__ = [
    "SUPPORTED_TASKS",
    "ArgumentHandler",
    "FillMaskPipeline",
    "NerPipeline",
    "Pipeline",
    "PipelineException",
    "QuestionAnsweringArgumentHandler",
    "QuestionAnsweringPipeline",
    "TextClassificationPipeline",
    "TokenClassificationArgumentHandler",
    "TokenClassificationPipeline",
    "pipeline",
]

SUPPORTED_TASKS: dict[str, dict[str, Any]] = {
    "sentiment-analysis": {
        "impl": TextClassificationPipeline,
        "pt": AutoModelForSequenceClassification,
    },
    "ner": {"impl": TokenClassificationPipeline, "pt": AutoModelForTokenClassification},
    "question-answering": {
        "impl": QuestionAnsweringPipeline,
        "pt": AutoModelForQuestionAnswering,
    },
    "fill-mask": {"impl": FillMaskPipeline, "pt": AutoModelForMaskedLM},
}
# Other names of these tasks, from later versions of transformers.
_ALIASES = {"text-classification": "sentiment-analysis", "token-classification": "ner"}


def pipeline(
    task: str,
    model: str | os.PathLike | PreTrainedModel | None = None,
    config: str | os.PathLike | PretrainedConfig | None = None,
    tokenizer: str | os.PathLike | PreTrainedTokenizerBase | None = None,
    framework: str | None = None,
    revision: str | None = None,
    use_fast: bool = True,
    model_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Pipeline:
    """Makes a task's pipeline.

    Args:
        task: "sentiment-analysis" (or "text-classification"), "ner" (or "token-classification"),
            "question-answering" or "fill-mask".
        model: a model, or its folder or name on the hub.
        config: its settings, or their folder or name, if not the model's.
        tokenizer: a tokenizer, or its folder or name, if not the model's.
        framework: "pt", the only one supported.
        revision: the branch, tag or commit of a model on the hub.
        use_fast: load the fast tokenizer. Question answering always does, because the slow one,
            which gives the same ids, does not map tokens to characters.
        model_kwargs: further arguments of the model's `from_pretrained`.
        kwargs: arguments of the task's class, such as `device` or `top_k`.

    Raises:
        KeyError: this fork has no pipeline for the task.
        ValueError: there is no model, or its tokenizer is unknown.
        PipelineException: the model has another head than the task needs, or an untrained one.
    """
    name = _ALIASES.get(task, task)
    if name not in SUPPORTED_TASKS:
        raise KeyError(
            f"no pipeline for '{task}' here (known: {', '.join(SUPPORTED_TASKS)}); for others, "
            "use upstream's transformers in a separate environment"
        )
    if model is None:
        raise ValueError(f"pipeline('{task}') needs a model: a folder, or a name on the hub")
    check_framework(framework)
    where = {} if revision is None else {"revision": revision}
    if tokenizer is None:
        tokenizer = next(
            (each for each in (model, config) if isinstance(each, str | os.PathLike)), None
        )
    if tokenizer is None:
        raise ValueError(f"pipeline('{task}') cannot know the model's tokenizer: give tokenizer=")
    if isinstance(tokenizer, str | os.PathLike):
        fast = use_fast or name == "question-answering"
        tokenizer = AutoTokenizer.from_pretrained(tokenizer, use_fast=fast, **where)
    if isinstance(model, str | os.PathLike):
        arguments = {**where, **(model_kwargs or {})}
        source = model
        model = SUPPORTED_TASKS[name]["pt"].from_pretrained(source, config=config, **arguments)
        if model.newly_initialized:
            reason = (
                f"{source} has no trained {min(model.newly_initialized)}, …: there is nothing to "
                f"answer '{task}' with; give a model that is trained for it, or make one and load "
                "an adapter into it"
            )
            raise PipelineException(name, os.fspath(source), reason)
    return SUPPORTED_TASKS[name]["impl"](model=model, tokenizer=tokenizer, task=name, **kwargs)
