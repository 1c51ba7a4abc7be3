"""Reads and writes GPT-2 as a model folder of upstream Transformers."""

import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from conversion.dtypes import name_of
from loralib.adapters.adapter import Adapter
from loralib.adapters.fingerprint import fingerprint, has_float16
from loralib.adapters.formats import SUFFIXES
from loralib.errors import CheckpointError
from loralib.io.tensors import read_tensors, write_tensors
from transformers.configuration_utils import PretrainedConfig, write_settings
from transformers.file_utils import CONFIG_NAME, SAFE_WEIGHTS_NAME
from transformers.weight_files import read_weights

# The NLG tree is a folder of scripts, not a package.
sys.path.append(str(Path(__file__).resolve().parents[2] / "NLG" / "src"))
from config_json import TANH_GELUS, first_difference, read_config_json
from encoded import END_OF_TEXT_ID
from model import MODEL_CARDS, GPT2Config, config_of
from weights import canonical_names, card_of, load_base

_SHAPE = ("n_embd", "n_layer", "n_head", "vocab_size", "n_positions")
# The head's name in this project, if it is not tied to the embedding.
_HEAD = "lm_head.decoder.weight"
# Upstream's settings, besides the shape, that describe this project's GPT-2.
_FIXED = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": END_OF_TEXT_ID,
}


def read_gpt2(
    name: str, revision: str | None = None
) -> tuple[nn.Module, str, bool, dict[str, Any]]:
    """Reads a plain GPT-2; returns what a `Base` records of it, from the model to its settings.

    Args:
        name: a folder, a name on the hub, or a file of weights as the release's scripts use it. A
            file's settings are those of the config.json next to it or, without one, of its model
            card.
        revision: branch, tag or commit, for the hub.

    Raises:
        CheckpointError: its weights are damaged, or do not fit its settings.
        OSError: there is no such model.
        ValueError: it holds LoRA, or has settings that this project's GPT-2 does not have.
    """
    if Path(name).is_file():
        tensors = _plain_weights(read_tensors(name, verify=True)[0], name)
        settings = read_config_json(name, tensors) or _of_shape(tensors, name)
    else:
        settings = PretrainedConfig.read_values(name, revision=revision)
        tensors = _plain_weights(read_weights(name, verify=True, revision=revision), name)
    model = load_base(_config(settings, name), tensors, name)
    return model, fingerprint(tensors), has_float16(tensors), settings


def is_whole_gpt2(source: str) -> bool:
    """Returns whether a file holds a GPT-2 with the shape of a model card, and no LoRA.

    gpt2_ft.py writes such files without --lora_dim.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = Path(source)
    if not path.is_file() or path.suffix not in SUFFIXES:
        return False
    tensors, _ = read_tensors(path)
    has_lora = any("lora_" in name for name in tensors)
    return not has_lora and card_of(canonical_names(tensors, source)) is not None


def _plain_weights(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    if any("lora_" in tensor for tensor in tensors):
        raise ValueError(f"{name} itself holds LoRA weights: it is not a plain base")
    return canonical_names(tensors, name)


def _of_shape(tensors: dict[str, Tensor], name: str) -> dict[str, Any]:
    card = card_of(tensors)
    if card is None:
        raise CheckpointError(
            f"{name}: its shape is that of none of {', '.join(MODEL_CARDS)}; give the model's "
            "folder, with its config.json, instead"
        )
    config = config_of(card)
    return {**_FIXED, **{key: getattr(config, key) for key in _SHAPE}}


def _config(settings: dict[str, Any], name: str) -> GPT2Config:
    for key, known in (("model_type", ("gpt2",)), ("activation_function", TANH_GELUS)):
        if settings.get(key, known[0]) not in known:
            raise ValueError(f"{name}: its {key} is {settings[key]}, not {known[0]}")
    missing = [key for key in _SHAPE if key not in settings]
    if missing:
        raise ValueError(f"{name}: its settings lack {', '.join(missing)}")
    shape = {key: settings[key] for key in _SHAPE}
    epsilon = settings.get("layer_norm_epsilon", _FIXED["layer_norm_epsilon"])
    try:
        return GPT2Config(**shape, layer_norm_epsilon=epsilon)
    except ValueError as error:
        raise ValueError(f"{name}/{CONFIG_NAME}: {error}") from error


def check_trained_on_card(adapter: Adapter, base: str, settings: dict[str, Any]) -> None:
    """Checks that the base of an adapter in the release's format computes what its card says.

    Neither the adapter's tensors nor the base's fingerprint show the number of heads. But the
    scripts that write this format train only models of their cards.

    Args:
        adapter: a GPT-2 adapter from a file of those scripts.
        base: the base's name, for the error.
        settings: the base's settings.

    Raises:
        CheckpointError: the base has a card's shape, but other settings.
    """
    shapes = {its[:2]: card for card, its in MODEL_CARDS.items()}
    card = shapes.get((settings["n_embd"], settings["n_layer"]))
    if card is None:
        return
    different = first_difference(settings, config_of(card))
    if different is not None:
        field, theirs, ours = different
        raise CheckpointError(
            f"{adapter.source}: was trained as {card}, whose {field} is {ours}, but {base} has "
            f"{theirs}: give the base that it was trained on"
        )


def write_gpt2(folder: Path, model: nn.Module, settings: dict[str, Any]) -> None:
    """Writes a plain GPT-2 as config.json and model.safetensors."""
    weights = dict(model.named_parameters())
    # Merging an adapter of the embedding has untied the head from it.
    head = weights.pop(_HEAD, None)
    if head is not None:
        weights["lm_head.weight"] = head
    write_tensors(folder / SAFE_WEIGHTS_NAME, weights)
    # Tied or not depends on the merged model, whatever the base's settings say.
    own = {
        "architectures": _FIXED["architectures"],
        "torch_dtype": name_of(weights["transformer.wte.weight"].dtype),
        "tie_word_embeddings": head is None,
    }
    # Upstream's later name for torch_dtype.
    settings = {key: value for key, value in settings.items() if key != "dtype"}
    write_settings(folder, {**settings, **own})
