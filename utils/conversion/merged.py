"""Merges an adapter into its base, and writes the result as the folder of a plain model."""

from pathlib import Path

import torch

from conversion.bases import Base
from conversion.dtypes import check_range, name_of
from conversion.gpt2_folder import read_gpt2, write_gpt2
from family import GPT2
from loralib.adapters.adapter import Adapter
from loralib.adapters.merging import merge_into
from loralib.errors import CheckpointError
from loralib.io.atomic import atomic_write_folder
from loralib.io.hub import resolve_file
from transformers import PreTrainedModel
from transformers.configuration_utils import OWN_SETTINGS, write_settings

# The files that tokenizers of all families may have (`Family` has the others), and the settings of
# generation.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "generation_config.json"),
)
# Settings of the base that the merged model's own replace: labels, and upstream's later name for
# torch_dtype.
_REPLACED = ("num_labels", "_num_labels", "dtype")
# Settings of the base that are true only of its own head.
_OF_HEAD = ("problem_type", "text_columns")


def merge(path: Path, adapter: Adapter, base: Base, dtype: torch.dtype) -> dict[str, str]:
    """Merges an adapter into its base, and writes the folder of a plain model.

    Returns:
        A description of what was written, by name, as text for users.

    Raises:
        CheckpointError: neither of them has a trained head; the merged weights are beyond the range
            of `dtype`; or there is something at `path` other than an empty folder.
    """
    merge_into(base.model, adapter)
    return _write_model(path, base, dtype, adapter)


def write_full_model(source: str, path: Path, dtype: torch.dtype) -> dict[str, str]:
    """Writes a GPT-2 that was trained as a whole, without LoRA, as the folder of a plain model.

    Returns:
        A description of what was written, by name, as text for users.

    Raises:
        CheckpointError: its values are damaged, or beyond the range of `dtype`; or there is
            something at `path` other than an empty folder.
    """
    return _write_model(path, Base(GPT2, source, None, *read_gpt2(source)), dtype)


def _write_model(
    path: Path, base: Base, dtype: torch.dtype, adapter: Adapter | None = None
) -> dict[str, str]:
    """Writes the folder of a plain model, and returns its description."""
    base.model.to(dtype)
    check_range(dict(base.model.named_parameters()), path, dtype)
    with atomic_write_folder(path) as folder:
        if isinstance(base.model, PreTrainedModel):
            _write_encoder(folder, adapter, base)
        else:
            write_gpt2(folder, base.model, base.settings)
        copy_tokenizer(base, folder)
    values = sum(parameter.numel() for parameter in base.model.parameters())
    size = f"{values * dtype.itemsize / 2**20:.2f} MiB"
    return {"format": "merged", "size": size, "dtype": name_of(dtype)}


def _write_encoder(folder: Path, adapter: Adapter, base: Base) -> None:
    model = base.model
    untrained = model.newly_initialized - adapter.tensors.keys()
    if untrained:
        raise CheckpointError(
            f"{adapter.source}: has no {min(untrained)}, and neither has {base.name}: the merged "
            "model would have an untrained head"
        )
    brought = {name.partition(".")[0] for name in adapter.besides}
    backbone = f"{model.base_model_prefix}."
    own = {name for name, _ in model.named_parameters() if not name.startswith(backbone)}
    lacking = {name for name in own if name.partition(".")[0] in brought} - adapter.tensors.keys()
    if lacking:
        raise CheckpointError(f"{adapter.source}: its head lacks {min(lacking)}")
    model.save_pretrained(folder, safe_serialization=True)
    # Upstream's settings are copied from the base, without this project's own and stale ones.
    is_own_head = brought.isdisjoint(name.partition(".")[0] for name in own)
    left_out = {*OWN_SETTINGS, *_REPLACED, *(() if is_own_head else _OF_HEAD)}
    settings = {k: v for k, v in base.settings.items() if k not in left_out}
    written = model.config.to_dict()
    # With share_att_key, because merging may have untied the projections of positions.
    from_model = ("architectures", "id2label", "label2id", *settings.keys() & {"share_att_key"})
    settings |= {name: written[name] for name in from_model}
    if not written["tie_word_embeddings"]:
        settings["tie_word_embeddings"] = False
    if adapter.metadata.is_decoder:
        settings["is_decoder"] = True
    if adapter.metadata.task:
        settings["finetuning_task"] = adapter.metadata.task
    if adapter.metadata.text_columns:
        settings["text_columns"] = list(adapter.metadata.text_columns)
    settings["torch_dtype"] = name_of(next(model.parameters()).dtype)
    write_settings(folder, settings)


def copy_tokenizer(base: Base, folder: Path) -> None:
    """Copies the base's tokenizer and generation settings; a base that is one file has none."""
    if Path(base.name).is_file():
        return
    for name in (*TOKENIZER_FILES, *base.family.tokenizer_files):
        file = resolve_file(base.name, name, revision=base.revision)
        if file is not None:
            (folder / name).write_bytes(file.read_bytes())
