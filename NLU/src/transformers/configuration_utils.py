"""`PretrainedConfig`: what a model is built from, kept as ``config.json``."""

import copy
import json
import os
from pathlib import Path
from typing import Any

from loralib.checkpoint import write_whole

from .file_utils import CONFIG_NAME, resolve_file

LORA_SETTINGS = ("apply_lora", "lora_r", "lora_alpha")


class PretrainedConfig:
    """The settings common to all models. Settings it does not know are kept, and written again.

    Args:
        num_labels: outputs of a classification head; `id2label` and `label2id` win over it.
        return_dict: models return a `ModelOutput` rather than a tuple.
        output_hidden_states: models also return every layer's output.
        gradient_checkpointing: in training, layers' activations are computed again by the backward
            pass rather than held: less memory, more time, the same numbers.
        finetuning_task: name of the task that the head is for.
        apply_lora: put LoRA into the model's attention.
        lora_r: its rank.
        lora_alpha: its scale; the update is multiplied by lora_alpha / lora_r.
        name_or_path: where the settings were read.
        base_name_or_path: the model that LoRA was put into, where that is another.
    """

    model_type: str = ""

    def __init__(
        self,
        num_labels: int | None = None,
        id2label: dict[int, str] | None = None,
        label2id: dict[str, int] | None = None,
        return_dict: bool = True,
        output_hidden_states: bool = False,
        gradient_checkpointing: bool = False,
        finetuning_task: str | None = None,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        apply_lora: bool = False,
        lora_r: int | None = None,
        lora_alpha: float | None = None,
        name_or_path: str = "",
        base_name_or_path: str | None = None,
        **others: Any,
    ):
        self.return_dict = return_dict
        self.output_hidden_states = output_hidden_states
        self.gradient_checkpointing = gradient_checkpointing
        self.finetuning_task = finetuning_task
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.apply_lora = apply_lora
        self.lora_r = lora_r
        self.lora_alpha = lora_alpha
        self.name_or_path = name_or_path
        self.base_name_or_path = base_name_or_path
        if id2label is not None:
            self.id2label = {int(index): label for index, label in id2label.items()}
            self.label2id = label2id or {label: index for index, label in self.id2label.items()}
        else:
            self.num_labels = 2 if num_labels is None else num_labels
        for key, value in others.items():
            if key not in ("model_type", "transformers_version"):
                setattr(self, key, value)
        if apply_lora:
            self._check_lora()

    def _check_lora(self) -> None:
        for name in ("lora_r", "lora_alpha"):
            value = getattr(self, name)
            if value is None:
                raise ValueError(f"apply_lora needs {name}: give --{name}")
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"{name} must be a positive number, not {value!r}")

    @property
    def num_labels(self) -> int:
        """Outputs of a classification head."""
        return len(self.id2label)

    @num_labels.setter
    def num_labels(self, count: int) -> None:
        self.id2label = {index: f"LABEL_{index}" for index in range(count)}
        self.label2id = {label: index for index, label in self.id2label.items()}

    @classmethod
    def get_config_dict(cls, name_or_path: str | os.PathLike, **where: Any) -> dict[str, Any]:
        """The content of a model's ``config.json``; `where` as in `resolve_file`.

        Raises:
            OSError: there is no such model, it has no ``config.json``, or that is damaged.
        """
        name = os.fspath(name_or_path)
        path = Path(name) if os.path.isfile(name) else resolve_file(name, CONFIG_NAME, **where)
        if path is None:
            raise OSError(f"'{name}' has no {CONFIG_NAME}, so it is not a model folder")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise OSError(f"{path}: not a JSON file ({error})") from error
        if not isinstance(values, dict):
            raise OSError(f"{path}: holds a {type(values).__name__}, not settings by name")
        return values

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        *,
        cache_dir: str | None = None,
        revision: str | None = None,
        use_auth_token: str | bool | None = None,
        **overrides: Any,
    ) -> "PretrainedConfig":
        """Reads a model's settings; `overrides` replace the file's.

        A LoRA setting of None is one that is not given: the file's holds.

        Raises:
            OSError: as `get_config_dict`.
            ValueError: the model is of another type, or was trained with other LoRA settings.
        """
        values = cls.get_config_dict(
            name_or_path, cache_dir=cache_dir, revision=revision, token=use_auth_token
        )
        model_type = values.get("model_type")
        if cls.model_type and model_type and model_type != cls.model_type:
            raise ValueError(f"'{name_or_path}' is a {model_type} model, not {cls.model_type}")
        name = os.fspath(name_or_path)
        overrides = {
            key: value
            for key, value in overrides.items()
            if key not in LORA_SETTINGS or value is not None
        }
        check_same_lora(name, values, overrides)
        if not values.get("apply_lora"):
            values["base_name_or_path"] = name
        return cls.from_dict({**values, "name_or_path": name}, **overrides)

    @classmethod
    def from_dict(cls, values: dict[str, Any], **overrides: Any) -> "PretrainedConfig":
        """Builds the settings from a dict as `to_dict` gives it."""
        values = dict(values)
        old_labels = len(values.get("id2label") or ())
        if "id2label" in overrides or overrides.get("num_labels", old_labels) != old_labels:
            values.pop("id2label", None)
            values.pop("label2id", None)
        return cls(**{**values, **overrides})

    def to_dict(self) -> dict[str, Any]:
        """All settings, with the model type."""
        values = {
            name: copy.deepcopy(value)
            for name, value in vars(self).items()
            if not name.startswith("_") and name != "name_or_path"
        }
        return {**values, "model_type": self.model_type}

    def to_json_string(self) -> str:
        """The settings as ``config.json`` holds them."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Writes ``config.json`` into `folder`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        with write_whole(Path(folder, CONFIG_NAME)) as path:
            path.write_text(self.to_json_string(), encoding="utf-8")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PretrainedConfig) and self.to_dict() == other.to_dict()

    __hash__ = None

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.to_json_string()}"


def check_same_lora(source: str, values: dict[str, Any], asked_for: dict[str, Any]) -> None:
    """Refuses to read an adapted model with other LoRA settings than it was trained with.

    Args:
        source: the model's name, for the message.
        values: the content of its ``config.json``.
        asked_for: settings by name; those that are absent or None are not asked for.

    Raises:
        ValueError: they differ.
    """
    if not values.get("apply_lora"):
        return
    for name in LORA_SETTINGS:
        asked = asked_for.get(name)
        if asked is not None and asked != values.get(name):
            raise ValueError(f"'{source}' was trained with {name} {values.get(name)}, not {asked}")
