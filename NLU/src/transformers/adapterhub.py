"""Reads AdapterHub's bottleneck adapters: a folder with an adapter's weights and its head's.

Nothing is written in this format.

Source: the release's run_glue.py, whose ``--adapter_path`` takes such a folder.
"""

import re
from pathlib import Path

from torch import Tensor

from loralib.adapters.adapter import Adapter, Foreign, Kind
from loralib.adapters.families import in_known_backbone
from loralib.errors import CheckpointError
from loralib.io.tensors import read_tensors

_WEIGHTS, _HEAD = "pytorch_adapter.bin", "pytorch_model_head.bin"
_NAME = re.compile(
    r"(?P<layer>.+)\.adapters\.((?P<task>[^.]+)\.)?(?P<part>adapter_down\.0|adapter_up)"
    r"\.(?P<end>weight|bias)"
)
_HEAD_NAME = re.compile(r"heads\.(?P<task>[^.]+)\.(?P<part>1|4)\.(?P<end>weight|bias)")
# AdapterHub's names of layers -> this project's.
_PARTS = {
    "adapter_down.0": "adapter.adapter_A",
    "adapter_up": "adapter.adapter_B",
    "1": "classifier.dense",
    "4": "classifier.out_proj",
}


def _read(path: Path, kind: Kind) -> Adapter:
    """Reads a bottleneck adapter and its head; `path` is the file of either."""
    found: list[tuple[str, str | None, Tensor]] = []
    for name, pattern in ((_WEIGHTS, _NAME), (_HEAD, _HEAD_NAME)):
        file = path.with_name(name)
        if not file.is_file():
            raise CheckpointError(
                f"{path.parent}: {name} is missing; an AdapterHub adapter consists of {_WEIGHTS} "
                f"and {_HEAD}"
            )
        for theirs, tensor in read_tensors(file, verify=True)[0].items():
            found.append((*_canonical_name(theirs, pattern, file), tensor))
    tasks = sorted({task for _, task, _ in found if task})
    if len(tasks) > 1:
        raise CheckpointError(
            f"{path.parent}: holds adapters or heads of several tasks, {', '.join(tasks)}; give a "
            "folder with one"
        )
    tensors: dict[str, Tensor] = {}
    for own, _, tensor in found:
        if own in tensors:
            raise CheckpointError(f"{path.parent}: holds {own} under two names")
        tensors[own] = tensor
    return Adapter(tensors, None, str(path.parent), kind, "hub")


def _canonical_name(name: str, pattern: re.Pattern[str], file: Path) -> tuple[str, str | None]:
    """Returns the canonical name of one of AdapterHub's tensors, and its task."""
    if match := pattern.fullmatch(name):
        layer = f"{match['layer']}." if "layer" in pattern.groupindex else ""
        return f"{layer}{_PARTS[match['part']]}.{match['end']}", match["task"]
    # A head that belongs to a model's class has that class's names, which are the canonical ones.
    if pattern is _HEAD_NAME and not name.startswith("heads.") and not in_known_backbone(name):
        return name, None
    what = "the head" if pattern is _HEAD_NAME else "bottleneck adapters"
    raise CheckpointError(f"{file}: holds {name}, which is not a known tensor of {what}")


ADAPTERHUB = Foreign("AdapterHub", (_WEIGHTS,), (_HEAD,), _read)
