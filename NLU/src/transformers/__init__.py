"""A slim fork of Transformers 4.4.2 with LoRA: what GLUE needs, in upstream's places."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from loralib.errors import TrainingError
from loralib.training.process import set_seed

from .configuration_utils import PretrainedConfig
from .data.data_collator import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    default_data_collator,
)
from .data.metrics import glue_compute_metrics
from .data.processors import glue_output_modes, glue_processors, glue_tasks_num_labels
from .data.processors.utils import DataProcessor, InputExample, InputFeatures
from .file_utils import ModelOutput
from .hf_argparser import HfArgumentParser
from .integrations import is_tensorboard_available, is_wandb_available
from .modeling_utils import PreTrainedModel
from .models.auto.configuration_auto import AutoConfig
from .models.auto.modeling_auto import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)
from .models.auto.tokenization_auto import AutoTokenizer
from .models.deberta_v2.configuration_deberta_v2 import DebertaV2Config
from .models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2ForMaskedLM,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
    DebertaV2PreTrainedModel,
)
from .models.deberta_v2.tokenization_deberta_v2 import DebertaV2Tokenizer
from .models.roberta.configuration_roberta import RobertaConfig
from .models.roberta.modeling_roberta import (
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
    RobertaPreTrainedModel,
)
from .models.roberta.tokenization_roberta_fast import RobertaTokenizerFast
from .optimization import AdamW, get_scheduler
from .tokenization_utils_base import BatchEncoding, PreTrainedTokenizerBase
from .tokenization_utils_fast import PreTrainedTokenizerFast
from .trainer import Trainer
from .trainer_callback import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState
from .trainer_utils import (
    EvalPrediction,
    EvaluationStrategy,
    IntervalStrategy,
    SchedulerType,
)
from .training_args import TrainingArguments
from .utils import logging

try:
    __version__ = version("transformers")
except PackageNotFoundError:
    # Run from the source tree without an installation.
    __version__ = "4.4.2+lora"

__all__ = [
    "AdamW",
    "AutoConfig",
    "AutoModel",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoTokenizer",
    "BatchEncoding",
    "DataCollatorForLanguageModeling",
    "DataCollatorWithPadding",
    "DataProcessor",
    "DebertaV2Config",
    "DebertaV2ForMaskedLM",
    "DebertaV2ForSequenceClassification",
    "DebertaV2Model",
    "DebertaV2PreTrainedModel",
    "DebertaV2Tokenizer",
    "EarlyStoppingCallback",
    "EvalPrediction",
    "EvaluationStrategy",
    "HfArgumentParser",
    "InputExample",
    "InputFeatures",
    "IntervalStrategy",
    "ModelOutput",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "PreTrainedTokenizerFast",
    "PretrainedConfig",
    "RobertaConfig",
    "RobertaForMaskedLM",
    "RobertaForSequenceClassification",
    "RobertaModel",
    "RobertaPreTrainedModel",
    "RobertaTokenizerFast",
    "SchedulerType",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "TrainingError",
    "default_data_collator",
    "get_scheduler",
    "glue_compute_metrics",
    "glue_output_modes",
    "glue_processors",
    "glue_tasks_num_labels",
    "is_tensorboard_available",
    "is_wandb_available",
    "logging",
    "set_seed",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"this slim fork of transformers (4.4.2 with LoRA) does not carry '{name}'; for the whole "
        "package install upstream's transformers, in an environment of its own"
    )
