"""The kinds of weights that can be trained in a frozen backbone: LoRA, and the paper's baselines.

The baselines are bottleneck adapters (see adapters.py) and BitFit, which trains the biases. A run
writes a file for each kind. To loralib, all of them are adapters.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from loralib.adapters.adapter import LORA, Kind, in_words
from loralib.adapters.families import in_backbone
from loralib.adapters.metadata import AdapterMetadata
from loralib.adapters.names import within_layer
from loralib.errors import CheckpointError, SettingsError

from .adapterhub import ADAPTERHUB
from .models import registry  # noqa: F401 - registers the families that adapters are of


@dataclass(frozen=True, kw_only=True)
class BottleneckMetadata(AdapterMetadata):
    """Metadata of bottleneck adapters.

    Args:
        adapter_type: where the adapters are and what they compute, such as "houlsby".
        adapter_size: width of the bottleneck.
    """

    adapter_type: str
    adapter_size: int

    own: ClassVar[frozenset[str]] = frozenset({"adapter_type", "adapter_size"})

    def check(self, path: object) -> None:
        """Checks the fields, as `AdapterMetadata` does, and those of this class."""
        super().check(path)
        kind, size = self.adapter_type, self.adapter_size
        if not (isinstance(kind, str) and isinstance(size, int) and size >= 1):
            message = f"adapter_type {kind!r}, adapter_size {size!r} in its metadata"
            raise CheckpointError(f"{path}: {message}")


@dataclass(frozen=True, kw_only=True)
class BiasMetadata(AdapterMetadata):
    """Metadata of biases that were trained in place.

    Args:
        biases: which biases; "all" means all of the backbone's.
    """

    biases: str = "all"

    own: ClassVar[frozenset[str]] = frozenset({"biases"})


@dataclass(frozen=True)
class _Bottlenecks(Kind):
    def mismatch(self, theirs: Iterable[str], ours: Iterable[str]) -> str | None:
        """Returns how their places in a layer differ from the model's; None if they do not."""
        trained, built = self._places(theirs), self._places(ours)
        if trained == built:
            return None
        return (
            f"has adapters after {in_words(trained)} of a layer, but the model has them after "
            f"{in_words(built)}: give another --adapter_type"
        )

    def _places(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the modules of a layer that bottlenecks belong to, each once, sorted."""
        modules = {name.partition(f".{self.part}")[0] for name in names}
        return tuple(sorted({within_layer(module) for module in modules}))


@dataclass(frozen=True)
class _Biases(Kind):
    def holds(self, name: str, backbones: tuple[str, ...]) -> bool:
        """Does what `Kind` does, but leaves out the biases of heads and of bottleneck adapters."""
        return self.part in name and BOTTLENECK.part not in name and in_backbone(name, backbones)


BOTTLENECK = _Bottlenecks(
    name="adapter",
    part="adapter",
    file="pytorch_model_adapter",
    metadata=BottleneckMetadata,
    switch="apply_adapter",
    sized_by=("adapter_A.weight", "adapter_size"),
    foreign=ADAPTERHUB,
)

BITFIT = _Biases(
    name="BitFit",
    part="bias",
    file="pytorch_model_bitfit",
    metadata=BiasMetadata,
    switch="apply_bitfit",
)

# The setting, and the scripts' flag, that names a kind's file.
PATHS = {LORA: "lora_path", BOTTLENECK: "adapter_path", BITFIT: "bitfit_path"}
KINDS = tuple(PATHS)
# A field of an adapter's metadata -> the scripts' flag for the same setting.
FROM_METADATA = {
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "targets": "lora_targets",
    "positions": "lora_positions",
    "variant": "lora_variant",
    "initialization": "lora_init",
    "dropout": "lora_dropout",
    "freeze_A": "lora_freeze_A",
    "rank_pattern": "lora_rank_pattern",
    "alpha_pattern": "lora_alpha_pattern",
    "adapter_type": "adapter_type",
    "adapter_size": "adapter_size",
}


def path_flag(switch: str) -> str:
    """Returns the scripts' flag that names the file of the kind with this switch."""
    return next((f"--{path}" for kind, path in PATHS.items() if kind.switch == switch), switch)


def other_kind(source: str, kind: Kind) -> Kind | None:
    """Returns the kind whose file `source` is, by its name, if it is not `kind`; else None.

    Args:
        source: a file, or a folder, which may hold several.
        kind: the kind that is asked for.
    """
    is_file = os.path.isfile(source)
    there = {os.path.basename(source)} if is_file else {*_listed(source)}
    found = [each for each in KINDS if there & {*each.files}]
    return None if kind in found or not found else found[0]


def _listed(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def without(kind: Kind) -> str:
    """Returns the advice which flags to leave out of a command that is not to use this kind."""
    start = PATHS[kind].partition("_")[0]
    return f"leave --{kind.switch} and every --{start}_… flag out"


def fitting_flag(error: SettingsError, is_resumed: bool = False) -> str:
    """Returns which flags of the scripts fit an adapter that was trained with another setting.

    Returns "" if no flag is for that setting.

    Args:
        error: names the setting.
        is_resumed: whether a run resumes from the checkpoint that holds the adapter.
    """
    flag, value = FROM_METADATA.get(error.what, error.what), error.theirs
    if flag not in FROM_METADATA.values():
        return ""
    if error.module:
        # A pattern covers several modules, and each would be an error of its own. If an alpha
        # is given, it is the file's, or it would have been refused earlier; a file may have none.
        flags = "--lora_r, --lora_rank_pattern and --lora_alpha_pattern"
        if is_resumed:
            return f"give the same {flags} as when the run began, or another --output_dir"
        return f"leave {flags} out: the file records them"
    words = " ".join(value) if isinstance(value, tuple) else in_words(value)
    is_long = len(words) > 120
    if is_resumed:
        given = f"give the same --{flag}" if is_long else f"give --{flag} {words}"
        return f"{given} as when the run began, or give another --output_dir"
    given = f"leave --{flag} out" if is_long else f"--{flag} {words}, or leave it out"
    return f"{given}: the file records it"
