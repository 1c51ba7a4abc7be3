"""Compares the config.json next to a GPT-2's weights with the model that is computed here.

Different models can have weights of the same shape: the number of heads, the activation and the
epsilon of the norms are not in the tensors. Upstream's Transformers reads them from config.json.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from loralib.errors import CheckpointError
from loralib.text import first_line
from model import GPT2Config, config_of
from weights import card_of, shape_of

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
"""Upstream's names for the activation that GPT-2 has here; its "gelu" uses erf, and differs."""


def check_settings_beside(path: str, tensors: Mapping[str, Tensor]) -> None:
    """Checks that weights with the shape of a model card belong to that card's model.

    Args:
        path: the weights' file.
        tensors: the file's tensors under canonical names.

    Raises:
        CheckpointError: the config.json next to the file has the settings of another model.
    """
    card, settings = card_of(tensors), read_config_json(path, tensors)
    if card is None or settings is None:
        return
    different = first_difference(settings, config_of(card))
    if different is not None:
        field, theirs, ours = different
        file = Path(path)
        raise CheckpointError(
            f"{file.with_name(CONFIG_NAME)}: {field} is {theirs}, but {card} has {ours}, and "
            f"{file.name} would run as a different model: give another base or, if this "
            f"{CONFIG_NAME} belongs to other weights, keep the two in different folders"
        )


def read_config_json(path: str, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Reads the config.json next to a file of weights.

    Returns:
        Its settings. None if there is no such file or its model is not a GPT-2. Also None, with a
        warning, if it cannot be read or its shape is not that of the weights.
    """
    file = Path(path).with_name(CONFIG_NAME)
    try:
        settings = json.loads(file.read_text("utf-8-sig"))
        if not isinstance(settings, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        logger.warning(
            "%s: cannot be read (%s): could not check that the weights next to it are for this "
            "GPT-2",
            *(file, first_line(error)),
        )
        return None
    if settings.get("model_type", "gpt2") != "gpt2":
        return None
    shape = shape_of(tensors) or ()
    for field, theirs in zip(("n_embd", "n_layer"), shape, strict=False):
        if settings.get(field, theirs) != theirs:
            logger.warning(
                "%s: is ignored: its %s is %s, but that of the weights next to it is %s",
                *(file, field, settings[field], theirs),
            )
            return None
    return settings


def first_difference(
    settings: Mapping[str, Any], config: GPT2Config
) -> tuple[str, Any, Any] | None:
    """Returns the first setting with which upstream computes something else than the model here.

    Args:
        settings: the settings of a config.json; one that it lacks counts as equal.
        config: the model's configuration.

    Returns:
        The setting's name, its value and the model's value; None if all agree.
    """
    expected: dict[str, tuple[Any, ...]] = {
        "n_head": (config.n_head,),
        "n_positions": (config.n_positions,),
        "layer_norm_epsilon": (config.layer_norm_epsilon,),
        "activation_function": TANH_GELUS,
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    }
    for field, right in expected.items():
        value = settings.get(field)
        if value is not None and value not in right:
            return field, value, right[0]
    return None
