"""Convert a LoRA adapter: this project's form, the release's, PEFT's; or merge it into its base.

    python utils/convert.py IN --info
    python utils/convert.py output/rte rte_peft --to peft
    python utils/convert.py someone/their-peft-adapter adapter.safetensors --to lora
    python utils/convert.py lora_mnli.bin mnli.safetensors --to lora --lora_alpha 16
    python utils/convert.py model.26289.pt e2e_merged --to merged --base gpt2-medium

IN is an adapter of any form: a file, a folder, or a name on the hub. OUT is

    lora      a .safetensors file, which says rank, alpha, targets, base, task and labels
    release   a .bin or .pt file as microsoft/LoRA's scripts read it
    peft      a new folder, which PEFT opens on the base
    merged    a new folder with base and adapter in one, which upstream Transformers opens

For lora and release OUT may also be a folder. Without --to, OUT's name says which of the two it is,
so that `convert.py old.bin new.bin` gives the release's first DeBERTa files their later names. What
a form cannot hold is listed.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from gpt2_folder import read_gpt2, write_gpt2
from torch import Tensor, nn

from loralib import process
from loralib.checkpoint import Adapter, check_base, lora_info, plain
from loralib.files import CheckpointError, write_whole_folder
from loralib.formats import FORMS, form_of_name, read_adapter, write_adapter
from loralib.hub import resolve_file
from loralib.updates import fold, lora_pairs, rank_of, updated_modules
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.configuration_utils import OWN_SETTINGS, write_settings
from transformers.utils.logging import errors_only

DTYPES = ("float32", "bfloat16", "float16")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "spm.model"),
)


# ------------------------------------------------------------------------------------------------
# The base
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """A base model, to check an adapter against or to merge it into.

    Args:
        name: its folder, file or name on the hub.
        model: a plain model, float32, with a head of the adapter's shape.
        fingerprint: of its weights, see `loralib.checkpoint.fingerprint`.
        settings: the content of its config.json, for upstream.
    """

    name: str
    model: nn.Module
    fingerprint: str | None
    settings: dict


def read_base(name: str, adapter: Adapter) -> Base:
    """The base of this name, for an adapter, which has to fit it.

    Raises:
        CheckpointError: it is damaged, or the adapter is one of another base.
        OSError: there is no such model.
        ValueError: it is a model that was adapted itself, or of no family that is known here.
    """
    first = min(lora_pairs(adapter.tensors, adapter.source))
    if first.startswith("transformer.h."):
        base = Base(name, *read_gpt2(name))
    elif first.startswith(("roberta.", "deberta.")):
        base = _read_encoder(name, adapter)
    else:
        raise CheckpointError(
            f"{adapter.source}: adapts neither RoBERTa, DeBERTa-v2 nor GPT-2 ({first}): its base "
            "cannot be read here"
        )
    check_base(adapter, base.fingerprint)
    updated_modules(base.model, adapter)
    return base


def _read_encoder(name: str, adapter: Adapter) -> Base:
    settings = PretrainedConfig.get_config_dict(name)
    for switch in ("apply_lora", "apply_adapter", "apply_bitfit"):
        if settings.get(switch):
            raise ValueError(f"{name} was trained with --{switch} itself: it is no plain base")
    with errors_only():
        model = AutoModelForSequenceClassification.from_pretrained(name, **_labels(adapter))
    return Base(name, model, model.base_fingerprint, settings)


def _labels(adapter: Adapter) -> dict[str, object]:
    """The settings of a head as the adapter brings it; none where it brings none."""
    for last in ("classifier.out_proj.weight", "classifier.weight"):
        if last in adapter.tensors:
            count = len(adapter.tensors[last])
            known = adapter.info.labels if adapter.info else None
            if known and len(known) == count:
                return {"id2label": dict(enumerate(known))}
            return {"num_labels": count}
    return {}


# ------------------------------------------------------------------------------------------------
# Merging
# ------------------------------------------------------------------------------------------------


def merge(path: Path, adapter: Adapter, base: Base, dtype: torch.dtype) -> None:
    """Writes base and adapter in one, as a plain model's folder.

    Raises:
        CheckpointError: neither of them brings a trained head; or there is something at `path`.
    """
    fold(base.model, adapter)
    base.model.to(dtype)
    with write_whole_folder(path) as folder:
        if isinstance(base.model, PreTrainedModel):
            _write_encoder(folder, adapter, base)
        else:
            write_gpt2(folder, base.model, base.settings)
        copy_tokenizer(base.name, folder)


def _write_encoder(folder: Path, adapter: Adapter, base: Base) -> None:
    model = base.model
    untrained = model.drawn_anew - adapter.tensors.keys()
    if untrained:
        raise CheckpointError(
            f"{adapter.source}: brings no {min(untrained)}, nor does {base.name}: the merged "
            "model would have an untrained head"
        )
    own = {"architectures", "id2label", "label2id", "finetuning_task"}
    settings = {k: v for k, v in base.settings.items() if k not in OWN_SETTINGS}
    model.save_pretrained(folder, safe_serialization=True)
    written = model.config.to_dict()
    settings |= {name: written[name] for name in own if written.get(name) is not None}
    if adapter.info.task:
        settings["finetuning_task"] = adapter.info.task
    settings["torch_dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    write_settings(folder, settings)


def copy_tokenizer(base: str, folder: Path) -> None:
    """Copies the base's tokenizer, as far as it has one: a file of weights has none."""
    if Path(base).is_file():
        return
    for name in TOKENIZER_FILES:
        file = resolve_file(base, name)
        if file is not None:
            (folder / name).write_bytes(file.read_bytes())


# ------------------------------------------------------------------------------------------------
# Adapters
# ------------------------------------------------------------------------------------------------


def with_base(adapter: Adapter, base: Base) -> Adapter:
    """The adapter with its base's name and fingerprint."""
    if adapter.info is None:
        return adapter
    own = {"base": base.name, "base_fingerprint": base.fingerprint}
    if base.name != adapter.info.base:
        own["base_revision"] = None
    return replace(adapter, info=replace(adapter.info, **own))


def in_dtype(adapter: Adapter, dtype: torch.dtype | None) -> Adapter:
    """The adapter with all tensors in one dtype.

    Raises:
        CheckpointError: it has several, and none was asked for.
    """
    found = sorted(
        {str(tensor.dtype).removeprefix("torch.") for tensor in adapter.tensors.values()}
    )
    if dtype is None and len(found) > 1:
        raise CheckpointError(
            f"{adapter.source}: holds tensors of {' and '.join(found)}; say which it is to be "
            "with --dtype"
        )
    if dtype is None:
        return adapter
    tensors = {name: tensor.to(dtype) for name, tensor in adapter.tensors.items()}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{adapter.source}: {name} is beyond the range of {dtype}")
    return replace(adapter, tensors=tensors)


def dtypes_of(adapter: Adapter) -> list[str]:
    """The names of the dtypes of an adapter's tensors."""
    return sorted({str(t.dtype).removeprefix("torch.") for t in adapter.tensors.values()})


def describe(adapter: Adapter) -> dict[str, str]:
    """What an adapter is, by name, for people."""
    pairs = lora_pairs(adapter.tensors, adapter.source)
    rank = rank_of(adapter.tensors, adapter.source)
    info = adapter.info or lora_info(adapter.tensors, rank, float("nan"))
    lora = sum(A.numel() + B.numel() for A, B in pairs.values())
    head = _count(adapter.tensors) - lora
    stacked = max(len(A) // B.shape[1] for A, B in pairs.values())
    said = {
        "form": adapter.form,
        "rank": f"{rank}" + (f" ({stacked} updates in each module)" if stacked > 1 else ""),
        "alpha": "not said; --lora_alpha says it" if adapter.info is None else f"{info.alpha:g}",
        "targets": f"{plain(info.targets)}, in {len(pairs)} modules",
        "dropout": info.dropout,
        "biases": info.bias,
        "parameters": f"{lora:,} of LoRA, {head:,} others",
        "size": f"{sum(t.nbytes for t in adapter.tensors.values()) / 2**20:.2f} MiB",
        "dtype": ", ".join(dtypes_of(adapter)),
        "base": info.base,
        "revision": info.base_revision,
        "fingerprint": info.base_fingerprint,
        "task": info.task,
        "labels": plain(info.labels) if info.labels else None,
        "with": plain(info.beside) if info.beside else None,
    }
    return {name: str(value) for name, value in said.items() if value is not None}


def _count(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


# ------------------------------------------------------------------------------------------------
# Run
# ------------------------------------------------------------------------------------------------


def convert(
    adapter: Adapter, path: Path, form: str, base: Base | None, dtype: torch.dtype | None
) -> list[str]:
    """Writes an adapter to `path` in a form, or merged; what a user has to know of it."""
    if adapter.info and adapter.info.beside:
        raise CheckpointError(
            f"{adapter.source}: was trained with {plain(adapter.info.beside)} as well, whose "
            "weights are in another file: without them it is not what was trained"
        )
    if form == "merged":
        if base is None:
            known = f" (it names '{adapter.info.base}')" if adapter.info.base else ""
            raise CheckpointError(f"{adapter.source}: give its base as --base{known}")
        merge(path, adapter, base, dtype or torch.float32)
        return []
    adapter = in_dtype(adapter, dtype)
    if base is not None:
        adapter = with_base(adapter, base)
    return write_adapter(path, adapter, form)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", metavar="IN", help="an adapter: file, folder, or name on the hub")
    add("target", metavar="OUT", nargs="?", type=Path, help="what to write")
    add("--to", choices=[*FORMS, "merged"], help="the form to write")
    add("--info", action="store_true", help="print what IN is, and write nothing")
    add(
        "--base",
        metavar="FOLDER_OR_NAME",
        help="the model that IN was trained on; merged needs it, other forms are checked against "
        "it and say its name. For GPT-2 also a file of weights",
    )
    add("--lora_alpha", type=float, help="the alpha that IN was trained with, if IN does not say")
    add(
        "--dtype",
        choices=DTYPES,
        help="of the written tensors; default: IN's own, or float32 for merged",
    )
    args = parser.parse_args(argv)
    if args.target is None and not args.info:
        parser.error("give OUT, or --info")
    if args.target is not None and args.info:
        parser.error("--info writes nothing: leave OUT out")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Parses, reads, converts, and says what was written."""
    args = parse_args(argv)
    form = args.to or (None if args.info else form_of_name(args.target))
    adapter = read_adapter(args.source, lora_alpha=args.lora_alpha)
    if form == "merged" and adapter.info is None:
        raise CheckpointError(
            f"{adapter.source}: does not say with what alpha it was trained; give it as "
            "--lora_alpha"
        )
    base = read_base(args.base, adapter) if args.base else None
    remarks = []
    if not args.info:
        dtype = getattr(torch, args.dtype) if args.dtype else None
        remarks = convert(adapter, args.target, form, base, dtype)
        print(f"{args.target}: written, form {form}, from {adapter.source}:")
    for name, value in describe(adapter).items():
        print(f"  {name:<12} {value}")
    for remark in remarks:
        print(f"  note: {remark}")


if __name__ == "__main__":
    process.run(main, report=lambda line: print(line, file=sys.stderr))
