"""The settings of LoRA, bottleneck adapters and BitFit, which are part of `PretrainedConfig`."""

from collections.abc import Iterable, Mapping
from typing import Any

from loralib.errors import CheckpointError

# A projection that LoRA can adapt in an encoder layer of either family -> its module, as
# loralib.adapters.names.lora_targets names it. DeBERTa-v2's first three end in "_proj".
LORA_TARGETS = {
    "query": "query",
    "key": "key",
    "value": "value",
    "attention_output": "attention.output.dense",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
}
# A type of bottleneck adapter -> the projections that it follows.
ADAPTER_TYPES = {"houlsby": ("attention_output", "output"), "pfeiffer": ("output",)}

# A switch -> the settings of what it switches on. The scripts have flags of the same names.
ADAPTATIONS = {
    "apply_lora": (
        *("lora_r", "lora_alpha", "lora_rank_pattern", "lora_alpha_pattern"),
        *("lora_targets", "lora_layers", "lora_positions"),
        *("lora_variant", "lora_init", "lora_freeze_A", "lora_dropout"),
    ),
    "apply_adapter": ("adapter_type", "adapter_size"),
    "apply_bitfit": (),
}
# The ones that may differ from a checkpoint's training, since they do not shape the model.
_MAY_CHANGE = {"lora_freeze_A", "lora_dropout", "apply_bitfit"}
# For these, None means "not given".
ADAPTATION_SETTINGS = tuple(
    name for switch, settings in ADAPTATIONS.items() for name in (switch, *settings)
)
# The values that a file stands for if it is older than a setting.
_BEFORE = {
    "lora_targets": ("query", "value"),
    "lora_positions": False,
    "lora_variant": "lora",
    "lora_init": "default",
    "lora_rank_pattern": {},
    "lora_alpha_pattern": {},
}


class MissingLoraError(CheckpointError):
    """Raised for settings of LoRA that neither the caller gives nor the model that is loaded has.

    Args:
        names: the settings.
        choices: their possible values.
    """

    def __init__(self, names: Iterable[str], choices: str):
        self.names = list(names)
        super().__init__(f"apply_lora needs {' and '.join(self.names)}: {choices}")


def in_order(targets: Iterable[str]) -> list[str]:
    """Returns LoRA's targets, each once: those of `LORA_TARGETS` in that order, then the others."""
    targets = list(targets)
    known = [name for name in LORA_TARGETS if name in targets]
    return list(dict.fromkeys([*known, *targets]))


def targets_of_modules(modules: Iterable[str]) -> list[str]:
    """Returns the names in `LORA_TARGETS` of modules.

    Raises:
        ValueError: no encoder layer has such a module.
    """
    known = {module: name for name, module in LORA_TARGETS.items()}
    targets = []
    for module in modules:
        name = known.get(module.removesuffix("_proj"))
        if name is None:
            raise ValueError(f"unknown lora_targets '{module}' (known: {', '.join(LORA_TARGETS)})")
        targets.append(name)
    return in_order(targets)


def check_same_adaptation(
    source: str, values: Mapping[str, Any], asked_for: Mapping[str, Any]
) -> None:
    """Checks that an adapted model is not read with other settings than it was trained with.

    Args:
        source: the model's name, for the message.
        values: the content of its ``config.json``.
        asked_for: settings by name; those that are absent or None are not compared.

    Raises:
        ValueError: they differ.
    """
    adaptations = {switch: names for switch, names in ADAPTATIONS.items() if values.get(switch)}
    for switch, settings in adaptations.items():
        for name in (switch, *settings):
            if name not in _MAY_CHANGE and asked_for.get(name) is not None:
                check_same_setting(source, name, values, asked_for[name])


def check_same_setting(source: str, name: str, values: Mapping[str, Any], wanted: Any) -> None:
    """Checks one setting, as `check_same_adaptation` does all."""
    trained = values.get(name)
    if trained is None:
        trained = _BEFORE.get(name)
    if name == "lora_targets":
        wanted, trained = in_order(wanted), in_order(trained)
    if wanted != trained:
        said = f"{name} {as_words(trained)}, not {as_words(wanted)}"
        raise ValueError(f"'{source}' was trained with {said}")


def as_words(value: Any) -> Any:
    """Returns a list or a pattern as the scripts' flags take it; other settings as they are."""
    if isinstance(value, Mapping):
        value = [f"{target}={number}" for target, number in value.items()]
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else value
