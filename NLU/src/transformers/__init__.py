"""A slim fork of Transformers 4.4.2 with LoRA: what GLUE needs, under transformers' module names.

Modules are imported when one of their public names is first used, so that a script's --help does
not wait for models and tokenizers. The names are listed twice: as imports for type checkers, and
with their modules for `__getattr__`.
"""

# ruff: noqa: F401 - the imports are only for type checkers

import importlib
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .models import registry as _families  # registers the families, which reading adapters needs
from .utils import logging

if TYPE_CHECKING:
    from loralib.errors import TrainingError
    from loralib.training.determinism import set_seed

    from .configuration_utils import PretrainedConfig
    from .data.data_collator import (
        DataCollator,
        DataCollatorForLanguageModeling,
        DataCollatorForMultipleChoice,
        DataCollatorForTokenClassification,
        DataCollatorForWholeWordMask,
        DataCollatorWithPadding,
        default_data_collator,
    )
    from .data.datasets.language_modeling import LineByLineTextDataset
    from .data.metrics import glue_compute_metrics
    from .data.processors import glue_output_modes, glue_processors, glue_tasks_num_labels
    from .data.processors.squad import SquadExample
    from .data.processors.utils import DataProcessor, InputExample, InputFeatures
    from .file_utils import (
        CONFIG_NAME,
        MODEL_CARD_NAME,
        SPIECE_UNDERLINE,
        WEIGHTS_NAME,
        ModelOutput,
        TensorType,
        is_apex_available,
        is_datasets_available,
        is_faiss_available,
        is_flax_available,
        is_psutil_available,
        is_py3nvml_available,
        is_sentencepiece_available,
        is_sklearn_available,
        is_tf_available,
        is_tokenizers_available,
        is_torch_available,
        is_torch_tpu_available,
    )
    from .hf_argparser import HfArgumentParser
    from .integrations import (
        is_optuna_available,
        is_tensorboard_available,
        is_wandb_available,
    )
    from .modeling_utils import PreTrainedModel
    from .models.auto.configuration_auto import AutoConfig
    from .models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
        MODEL_FOR_MULTIPLE_CHOICE_MAPPING,
        MODEL_FOR_PRETRAINING_MAPPING,
        MODEL_FOR_QUESTION_ANSWERING_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        MODEL_MAPPING,
        MODEL_WITH_LM_HEAD_MAPPING,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForMultipleChoice,
        AutoModelForPreTraining,
        AutoModelForQuestionAnswering,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        AutoModelWithLMHead,
    )
    from .models.auto.tokenization_auto import TOKENIZER_MAPPING, AutoTokenizer
    from .models.deberta_v2.configuration_deberta_v2 import DebertaV2Config
    from .models.deberta_v2.modeling_deberta_v2 import (
        DebertaV2ForMaskedLM,
        DebertaV2ForQuestionAnswering,
        DebertaV2ForSequenceClassification,
        DebertaV2ForTokenClassification,
        DebertaV2Model,
        DebertaV2PreTrainedModel,
    )
    from .models.deberta_v2.tokenization_deberta_v2 import DebertaV2Tokenizer
    from .models.deberta_v2.tokenization_deberta_v2_fast import DebertaV2TokenizerFast
    from .models.roberta.configuration_roberta import RobertaConfig
    from .models.roberta.modeling_roberta import (
        RobertaForCausalLM,
        RobertaForMaskedLM,
        RobertaForMultipleChoice,
        RobertaForQuestionAnswering,
        RobertaForSequenceClassification,
        RobertaForTokenClassification,
        RobertaModel,
        RobertaPreTrainedModel,
    )
    from .models.roberta.tokenization_roberta import RobertaTokenizer
    from .models.roberta.tokenization_roberta_fast import RobertaTokenizerFast
    from .optimization import (
        Adafactor,
        AdamW,
        get_constant_schedule,
        get_constant_schedule_with_warmup,
        get_cosine_schedule_with_warmup,
        get_cosine_with_hard_restarts_schedule_with_warmup,
        get_linear_schedule_with_warmup,
        get_polynomial_decay_schedule_with_warmup,
        get_scheduler,
    )
    from .pipelines import (
        FillMaskPipeline,
        NerPipeline,
        Pipeline,
        QuestionAnsweringPipeline,
        TextClassificationPipeline,
        TokenClassificationPipeline,
        pipeline,
    )
    from .tokenization_utils import PreTrainedTokenizer
    from .tokenization_utils_base import (
        AddedToken,
        BatchEncoding,
        CharSpan,
        PreTrainedTokenizerBase,
        SpecialTokensMixin,
        TokenSpan,
    )
    from .tokenization_utils_fast import PreTrainedTokenizerFast
    from .trainer import Trainer
    from .trainer_callback import (
        DefaultFlowCallback,
        EarlyStoppingCallback,
        PrinterCallback,
        ProgressCallback,
        TrainerCallback,
        TrainerControl,
        TrainerState,
    )
    from .trainer_pt_utils import torch_distributed_zero_first
    from .trainer_utils import EvalPrediction, EvaluationStrategy, IntervalStrategy, SchedulerType
    from .training_args import TrainingArguments

try:
    __version__ = version("transformers")
except PackageNotFoundError:
    # Runs from the source tree without being installed.
    __version__ = "4.4.2+lora.1"  # as in setup.py

# Public name -> its module.
_MODULE_OF = {
    "TrainingError": "loralib.errors",
    "set_seed": "loralib.training.determinism",
    "PretrainedConfig": ".configuration_utils",
    "DataCollator": ".data.data_collator",
    "DataCollatorForLanguageModeling": ".data.data_collator",
    "DataCollatorForMultipleChoice": ".data.data_collator",
    "DataCollatorForTokenClassification": ".data.data_collator",
    "DataCollatorForWholeWordMask": ".data.data_collator",
    "DataCollatorWithPadding": ".data.data_collator",
    "default_data_collator": ".data.data_collator",
    "LineByLineTextDataset": ".data.datasets.language_modeling",
    "glue_compute_metrics": ".data.metrics",
    "glue_output_modes": ".data.processors",
    "glue_processors": ".data.processors",
    "glue_tasks_num_labels": ".data.processors",
    "SquadExample": ".data.processors.squad",
    "DataProcessor": ".data.processors.utils",
    "InputExample": ".data.processors.utils",
    "InputFeatures": ".data.processors.utils",
    "CONFIG_NAME": ".file_utils",
    "MODEL_CARD_NAME": ".file_utils",
    "SPIECE_UNDERLINE": ".file_utils",
    "WEIGHTS_NAME": ".file_utils",
    "ModelOutput": ".file_utils",
    "TensorType": ".file_utils",
    "is_apex_available": ".file_utils",
    "is_datasets_available": ".file_utils",
    "is_faiss_available": ".file_utils",
    "is_flax_available": ".file_utils",
    "is_psutil_available": ".file_utils",
    "is_py3nvml_available": ".file_utils",
    "is_sentencepiece_available": ".file_utils",
    "is_sklearn_available": ".file_utils",
    "is_tf_available": ".file_utils",
    "is_tokenizers_available": ".file_utils",
    "is_torch_available": ".file_utils",
    "is_torch_tpu_available": ".file_utils",
    "HfArgumentParser": ".hf_argparser",
    "is_optuna_available": ".integrations",
    "is_tensorboard_available": ".integrations",
    "is_wandb_available": ".integrations",
    "PreTrainedModel": ".modeling_utils",
    "AutoConfig": ".models.auto.configuration_auto",
    "MODEL_FOR_CAUSAL_LM_MAPPING": ".models.auto.modeling_auto",
    "MODEL_FOR_MASKED_LM_MAPPING": ".models.auto.modeling_auto",
    "MODEL_FOR_PRETRAINING_MAPPING": ".models.auto.modeling_auto",
    "MODEL_WITH_LM_HEAD_MAPPING": ".models.auto.modeling_auto",
    "MODEL_FOR_MULTIPLE_CHOICE_MAPPING": ".models.auto.modeling_auto",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING": ".models.auto.modeling_auto",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING": ".models.auto.modeling_auto",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING": ".models.auto.modeling_auto",
    "MODEL_MAPPING": ".models.auto.modeling_auto",
    "AutoModel": ".models.auto.modeling_auto",
    "AutoModelForCausalLM": ".models.auto.modeling_auto",
    "AutoModelForMaskedLM": ".models.auto.modeling_auto",
    "AutoModelForPreTraining": ".models.auto.modeling_auto",
    "AutoModelWithLMHead": ".models.auto.modeling_auto",
    "AutoModelForMultipleChoice": ".models.auto.modeling_auto",
    "AutoModelForQuestionAnswering": ".models.auto.modeling_auto",
    "AutoModelForSequenceClassification": ".models.auto.modeling_auto",
    "AutoModelForTokenClassification": ".models.auto.modeling_auto",
    "TOKENIZER_MAPPING": ".models.auto.tokenization_auto",
    "AutoTokenizer": ".models.auto.tokenization_auto",
    "DebertaV2Config": ".models.deberta_v2.configuration_deberta_v2",
    "DebertaV2ForMaskedLM": ".models.deberta_v2.modeling_deberta_v2",
    "DebertaV2ForQuestionAnswering": ".models.deberta_v2.modeling_deberta_v2",
    "DebertaV2ForSequenceClassification": ".models.deberta_v2.modeling_deberta_v2",
    "DebertaV2ForTokenClassification": ".models.deberta_v2.modeling_deberta_v2",
    "DebertaV2Model": ".models.deberta_v2.modeling_deberta_v2",
    "DebertaV2PreTrainedModel": ".models.deberta_v2.modeling_deberta_v2",
    "DebertaV2Tokenizer": ".models.deberta_v2.tokenization_deberta_v2",
    "DebertaV2TokenizerFast": ".models.deberta_v2.tokenization_deberta_v2_fast",
    "RobertaConfig": ".models.roberta.configuration_roberta",
    "RobertaForCausalLM": ".models.roberta.modeling_roberta",
    "RobertaForMaskedLM": ".models.roberta.modeling_roberta",
    "RobertaForMultipleChoice": ".models.roberta.modeling_roberta",
    "RobertaForQuestionAnswering": ".models.roberta.modeling_roberta",
    "RobertaForSequenceClassification": ".models.roberta.modeling_roberta",
    "RobertaForTokenClassification": ".models.roberta.modeling_roberta",
    "RobertaModel": ".models.roberta.modeling_roberta",
    "RobertaPreTrainedModel": ".models.roberta.modeling_roberta",
    "RobertaTokenizer": ".models.roberta.tokenization_roberta",
    "RobertaTokenizerFast": ".models.roberta.tokenization_roberta_fast",
    "Adafactor": ".optimization",
    "AdamW": ".optimization",
    "get_constant_schedule": ".optimization",
    "get_constant_schedule_with_warmup": ".optimization",
    "get_cosine_schedule_with_warmup": ".optimization",
    "get_cosine_with_hard_restarts_schedule_with_warmup": ".optimization",
    "get_linear_schedule_with_warmup": ".optimization",
    "get_polynomial_decay_schedule_with_warmup": ".optimization",
    "get_scheduler": ".optimization",
    "FillMaskPipeline": ".pipelines",
    "NerPipeline": ".pipelines",
    "Pipeline": ".pipelines",
    "QuestionAnsweringPipeline": ".pipelines",
    "TextClassificationPipeline": ".pipelines",
    "TokenClassificationPipeline": ".pipelines",
    "pipeline": ".pipelines",
    "PreTrainedTokenizer": ".tokenization_utils",
    "AddedToken": ".tokenization_utils_base",
    "BatchEncoding": ".tokenization_utils_base",
    "CharSpan": ".tokenization_utils_base",
    "PreTrainedTokenizerBase": ".tokenization_utils_base",
    "SpecialTokensMixin": ".tokenization_utils_base",
    "TokenSpan": ".tokenization_utils_base",
    "PreTrainedTokenizerFast": ".tokenization_utils_fast",
    "Trainer": ".trainer",
    "DefaultFlowCallback": ".trainer_callback",
    "EarlyStoppingCallback": ".trainer_callback",
    "PrinterCallback": ".trainer_callback",
    "ProgressCallback": ".trainer_callback",
    "TrainerCallback": ".trainer_callback",
    "TrainerControl": ".trainer_callback",
    "TrainerState": ".trainer_callback",
    "torch_distributed_zero_first": ".trainer_pt_utils",
    "EvalPrediction": ".trainer_utils",
    "EvaluationStrategy": ".trainer_utils",
    "IntervalStrategy": ".trainer_utils",
    "SchedulerType": ".trainer_utils",
    "TrainingArguments": ".training_args",
}

__all__ = sorted([*_MODULE_OF, "logging"])

# Importing the registry has set this attribute. Deleted so that `__getattr__` loads its modules.
del globals()["models"]


def module_of(name: str) -> str | None:
    """Returns the module that defines a public name, relative to this package, or None."""
    return _MODULE_OF.get(name) or _families.modules_of_classes().get(name)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name], __name__), name)
        globals()[name] = value
        return value
    if name.startswith("__"):
        raise AttributeError(name)
    if name.isidentifier() and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return _submodule(name)
    # A class of a registered model family that is not listed above.
    classes = _families.modules_of_classes()
    if name in classes:
        return getattr(importlib.import_module(classes[name], __name__), name)
    raise AttributeError(
        f"this slim fork of transformers (4.4.2 with LoRA) does not include '{name}'; for the full "
        "package, use upstream's transformers in a separate environment"
    )


def _submodule(name: str) -> Any:
    """Imports a module of this package and those of its submodules that have public names."""
    module = importlib.import_module(f".{name}", __name__)
    for inner in sorted({home for home in _MODULE_OF.values() if home.startswith(f".{name}.")}):
        importlib.import_module(inner, __name__)
    globals()[name] = module
    return module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
