"""Defines how PEFT's adapter folders differ from ours: their names, shapes and settings.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors``. PEFT calls a LoRA tensor
``base_model.model.<module>.lora_A.weight`` and writes a head, one of the `modules_to_save`, as
``base_model.model.<module>.weight``. Its LoRA is one update of a module's whole output. The two
updates of rank r that `MergedLinear` has for GPT-2's query and value are one update of rank 2r in
PEFT, made of blocks, with the same scaling, alpha / r = 2 alpha / 2r:

    lora_A (2r, in)                 lora_B (3n, 2r)
    .-----------------.             .-----.-----.
    |   A of query    | r           |  B  |  0  | n   query
    |-----------------|             |-----|-----|
    |   A of value    | r           |  0  |  0  | n   key
    '-----------------'             |-----|-----|
                                    |  0  |  B  | n   value
                                    '-----'-----'

Ranks and alphas that differ between modules are in `rank_pattern` and `alpha_pattern`, both in PEFT
and here. PEFT's keys are regular expressions for the end of a module's name, ours are full names.
An embedding's A and B are called ``lora_embedding_A`` and ``lora_embedding_B``, and a convolution's
magnitudes have the shape (1, out, 1, …). The tensors of an `nn.MultiheadAttention`'s output
projection are under ``base_layer.out_proj``, with the attention's own rank and alpha. PEFT (up to
0.21) adds that update twice, so our B is twice PEFT's B for the same function.

A stack of matrices, see loralib/experts.py, is one of PEFT's ``target_parameters``. Its lora_A is
(experts · r, in), as ours. Its lora_B is (out, r · experts), where column i · experts + e is column
i of expert e's B. Both are under the name of the module that has the stack, with one ``base_layer``
for each other stack of that module that comes later in the model.

Any other PEFT setting that changes what is computed is refused, and the error names it. Folders are
read by peft_reading.py, compared with a model by peft_completeness.py, and written by
peft_writing.py.
"""

import functools
import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."

# The variants, by PEFT's settings use_rslora and use_dora.
VARIANT_OF_FLAGS = {
    (False, False): "lora",
    (True, False): "rslora",
    (False, True): "dora",
    (True, True): "rslora+dora",
}
# PEFT's task types, by head.
TASK_OF_HEAD = {
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "question_answering": "QUESTION_ANS",
    "causal_lm": "CAUSAL_LM",
}
# The modules that PEFT saves as wholes for these task types, whatever its settings say.
HEADS_OF_TASK = {
    "SEQ_CLS": {"classifier", "score"},
    "TOKEN_CLS": {"classifier", "score"},
    "QUESTION_ANS": {"qa_outputs"},
}
# The heads, by the endings of upstream's class names. If there is no task type, PEFT's settings
# record the class.
_HEAD_OF_ENDING = {
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering",
    "ForMultipleChoice": "multiple_choice",
    "ForMaskedLM": "masked_lm",
    "ForCausalLM": "causal_lm",
}
# The names that upstream's models gave to the layers of their mixtures of experts.
NAMES_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
# PEFT (0.21) refuses to adapt modules whose last part of the name is one of these, in models whose
# config has one of these types.
REFUSED_NAMES = {"out_proj", "conv1d"}
REFUSED_IN = {"mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"}
# The suffix that makes an `nn.MultiheadAttention`'s name its output projection's.
OUT_PROJ = ".out_proj"
# How often PEFT adds an update to an attention's output projection. As a power of 2, it divides
# without rounding.
TIMES_ADDED = 2


@functools.lru_cache(maxsize=4096)
def end_of_name(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern's key as PEFT does: it matches a name, or a name's end after a dot."""
    return re.compile(rf"(.*\.)?({pattern})$")


def is_targeted(config: Mapping[str, Any], name: str) -> bool:
    """Returns whether PEFT's settings target a module, by an expression or by its name's end.

    Args:
        config: PEFT's settings, of which target_modules is used, and if present exclude_modules,
            modules_to_save, layers_to_transform and layers_pattern.
        name: the module's name.
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
    """Returns whether PEFT's settings target the parameter of this name."""
    return any(name == t or name.endswith(f".{t}") for t in config.get("target_parameters") or ())


def _is_named(patterns: str | Collection[str] | None, name: str) -> bool:
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    parts = name.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return any(end in (patterns or ()) for end in ends)


def attention_of(module: str, modules: Collection[str]) -> str | None:
    """Returns the `nn.MultiheadAttention` whose output projection this is, or None.

    The names are enough: no other kind of module is adapted together with its own child.
    """
    owner = module.removesuffix(OUT_PROJ)
    return owner if owner != module and owner in modules else None


def head_of_class(name: str) -> str | None:
    """Returns the head of the upstream class with this name, or None."""
    heads = (head for ending, head in _HEAD_OF_ENDING.items() if name.endswith(ending))
    return next(heads, None)


def peft_difference(module: nn.Module) -> str | None:
    """Returns why PEFT's update of a convolution differs from ours, or None if it does not.

    PEFT's lora_A has the kernel size, stride and padding of the convolution, but not its groups,
    dilation and padding_mode.
    """
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and (
        module.groups > 1 or module.padding_mode != "zeros" or set(module.dilation) != {1}
    ):
        return "a convolution with groups, dilation or a padding_mode, which PEFT's lora_A lacks"
    return None


def stacked_B_of(B: Tensor, rank: int) -> Tensor:
    """Converts PEFT's lora_B of a stack, (out, r · experts), to ours, (experts · out, r)."""
    return B.unflatten(1, (rank, -1)).permute(2, 0, 1).flatten(0, 1)


def stacked_B_for(B: Tensor, experts: int) -> Tensor:
    """Converts our lora_B of a stack to PEFT's: the reverse of `stacked_B_of`."""
    return B.unflatten(0, (experts, -1)).permute(1, 2, 0).flatten(1)


def magnitude_for(magnitude: Tensor, A: Tensor) -> Tensor:
    """Converts our magnitudes, (out,), to PEFT's: (1, out, 1, …) if A is a convolution's."""
    return magnitude.view(1, -1, *[1] * (A.dim() - 2)) if A.dim() > 2 else magnitude


def as_int(value: float) -> float:
    """Returns a rank or alpha as PEFT's settings have it: a whole number as an integer."""
    return int(value) if value == int(value) else value
