"""PEFT's adapter folders: ``adapter_config.json`` and ``adapter_model.safetensors``.

PEFT calls a LoRA tensor ``base_model.model.<module>.lora_A.weight`` and writes a head, one of the
`modules_to_save`, as ``base_model.model.<module>.weight``. Its LoRA is one update of a module's
whole output. What `MergedLinear` has as two updates of rank r, for GPT-2's query and value, is for
PEFT one of rank 2r in blocks, with the same scaling, alpha / r = 2 alpha / 2r:

    lora_A (2r, in)                 lora_B (3n, 2r)
    .-----------------.             .-----.-----.
    |   A of query    | r           |  B  |  0  | n   query
    |-----------------|             |-----|-----|
    |   A of value    | r           |  0  |  0  | n   key
    '-----------------'             |-----|-----|
                                    |  0  |  B  | n   value
                                    '-----'-----'

Ranks and alphas that differ between modules are `rank_pattern` and `alpha_pattern` on both sides:
PEFT's keys are regular expressions for the end of a module's name, ours full names. An embedding's
halves are called ``lora_embedding_A`` and ``lora_embedding_B``; the magnitudes of a convolution are
(1, out, 1, …). What belongs to the output projection of an `nn.MultiheadAttention` is under
``base_layer.out_proj``, and has the attention's own rank and alpha; PEFT adds that update twice (up
to 0.21), so that B of the same function is here twice what it is there.

A stack of matrices, see loralib/experts.py, is one of its ``target_parameters``. Its lora_A is
(experts · r, in), as ours is, and of its lora_B, (out, r · experts), column i · experts + e is
column i of expert e's. They are under the name of the module that has the stack, with a
``base_layer`` for each of its other stacks that comes later in the model.

PEFT's settings beyond that which change what is computed are refused by name. A folder is read by
peft_reading.py and written by peft_writing.py.
"""

import functools
import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."

# The variants, by whether PEFT is told use_rslora and use_dora.
VARIANT_OF_FLAGS = {
    (False, False): "lora",
    (True, False): "rslora",
    (False, True): "dora",
    (True, True): "rslora+dora",
}
# PEFT's task types, by the head that each is for.
TASK_OF_HEAD = {
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "question_answering": "QUESTION_ANS",
    "causal_lm": "CAUSAL_LM",
}
# Of these, the tasks of which PEFT expects the head among what is saved.
TASKS_WITH_HEAD = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
# How the names of upstream's classes end, which PEFT's settings have where there is no task type.
HEAD_OF_CLASS = {
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering",
    "ForMultipleChoice": "multiple_choice",
    "ForMaskedLM": "masked_lm",
    "ForCausalLM": "causal_lm",
}
# How upstream's models called the layers of their mixtures of experts.
NAMES_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
# What PEFT (0.21) refuses to adapt, by the last part of its name, in models whose config says one
# of these types.
REFUSED_NAMES = {"out_proj", "conv1d"}
REFUSED_IN = {"mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"}
# What follows the name of an `nn.MultiheadAttention` in its output projection's.
OUT_PROJ = ".out_proj"
# How often PEFT adds an update to an attention's output projection; a power of 2 rounds nothing.
TIMES_ADDED = 2


@functools.lru_cache(maxsize=4096)
def end_of_name(pattern: str) -> re.Pattern[str]:
    """The expression that PEFT makes of a pattern's key: for a name, or its end after a dot."""
    return re.compile(rf"(.*\.)?({pattern})$")


def is_targeted(config: Mapping[str, Any], name: str) -> bool:
    """Whether PEFT's settings mean a module of this name: by an expression, or by its name's end.

    Args:
        config: target_modules, and where there are any exclude_modules, modules_to_save,
            layers_to_transform and layers_pattern.
        name: of a module.
    """
    if _is_named(config.get("exclude_modules"), name):
        return False
    if any(re.match(rf"(^|.*\.){m}($|\..*)", name) for m in config.get("modules_to_save") or ()):
        return False
    targets, layers = config.get("target_modules"), config.get("layers_to_transform")
    by_end = not isinstance(targets, str) and name not in (targets or ())
    if layers is None or layers == [] or not by_end:
        return _is_named(targets, name)
    within = config.get("layers_pattern") or ()
    expressions = [
        rf"(?:^|.*?\.){each}\.(\d+)\." for each in ([within] if isinstance(within, str) else within)
    ]
    for expression in expressions or [r".*?\.[^.]*\.(\d+)\."]:
        number = re.match(expression, name)
        if number:
            wanted = [layers] if isinstance(layers, int) else layers
            return int(number[1]) in wanted and _is_named(targets, name)
    return False


def is_targeted_parameter(config: Mapping[str, Any], name: str) -> bool:
    """Returns whether PEFT's settings mean a parameter of this name."""
    return any(name == t or name.endswith(f".{t}") for t in config.get("target_parameters") or ())


def _is_named(patterns: str | Collection[str] | None, name: str) -> bool:
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == each or name.endswith(f".{each}") for each in patterns or ())


def attention_of(module: str, modules: Collection[str]) -> str | None:
    """Returns the `nn.MultiheadAttention` whose output projection this is.

    No other kind of module is adapted together with a child of its own.
    """
    owner = module.removesuffix(OUT_PROJ)
    return owner if owner != module and owner in modules else None


def peft_difference(module: nn.Module) -> str | None:
    """Why PEFT's update of a convolution computes something else than ours; None if it does not.

    PEFT makes its lora_A with the stride and padding of the convolution, and nothing else of it.
    """
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and (
        module.groups > 1 or module.padding_mode != "zeros" or set(module.dilation) != {1}
    ):
        return "a convolution with groups, dilation or a padding_mode, which PEFT's lora_A lacks"
    return None


def stacked_B_of(B: Tensor, rank: int) -> Tensor:
    """PEFT's lora_B of a stack, (out, r · experts), as ours, (experts · out, r)."""
    return B.unflatten(1, (rank, -1)).permute(2, 0, 1).flatten(0, 1)


def stacked_B_for(B: Tensor, experts: int) -> Tensor:
    """Returns the reverse."""
    return B.unflatten(0, (experts, -1)).permute(1, 2, 0).flatten(1)


def magnitude_of(tensor: Tensor) -> Tensor:
    """PEFT's magnitudes as ours, (out,)."""
    return tensor.flatten()


def magnitude_for(magnitude: Tensor, A: Tensor) -> Tensor:
    """Our magnitudes as PEFT's, which are (1, out, 1, …) where A is a convolution's."""
    return magnitude.view(1, -1, *[1] * (A.dim() - 2)) if A.dim() > 2 else magnitude


def as_int(value: float) -> float:
    """A rank or alpha as PEFT's settings have it: an integer where it is one."""
    return int(value) if value == int(value) else value
