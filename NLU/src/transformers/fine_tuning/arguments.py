"""The flags that the tasks' scripts share: the model and how it is adapted, and the data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from loralib.functional import VARIANTS
from loralib.initialization import INITIALIZATIONS

from ..adaptation_settings import ADAPTER_TYPES, LORA_TARGETS
from ..adapter_kinds import PATHS
from ..hf_argparser import flag

SUFFIXES = (".csv", ".json", ".jsonl")  # of data files
_OF_TABS = "save it with commas in place of tabs, and texts that contain one in quotes"
_QUANTIZED = "quantized models are adapted in code only: docs/any-model.md"


@dataclass
class AdaptedModelArguments:
    """The model, and how it is adapted."""

    # Flags of today's scripts, and what is meant by them here; see `ArgumentParser`.
    _other_names: ClassVar[dict[str, str]] = {
        "attn_implementation": "there is only one implementation of attention",
        "load_in_4bit": _QUANTIZED,
        "load_in_8bit": _QUANTIZED,
        "token": "--use_auth_token",
        "trust_remote_code": "code from the hub is never run",
        "use_dora": "--lora_variant dora",
        "use_lora": "--apply_lora",
        "use_peft": "--apply_lora",
        "use_rslora": "--lora_variant rslora",
    }

    model_name_or_path: str = field(metadata={"help": "a model's folder, or its name on the hub"})
    config_name: str | None = flag(None, "folder or name of the settings, if not the model's")
    tokenizer_name: str | None = flag(None, "folder or name of the tokenizer, if not the model's")
    cache_dir: str | None = flag(None, "folder for downloads and for tables of data")
    use_fast_tokenizer: bool = flag(True, "both values give the same ids")
    model_revision: str = flag("main", "branch, tag or commit on the hub")
    use_auth_token: bool = flag(False, "use the token of `hf auth login`, for private models")
    apply_lora: bool = flag(False, "train LoRA and the head; the model's own weights are frozen")
    lora_alpha: int | None = flag(None, "the LoRA update is scaled by lora_alpha / lora_r", least=1)
    lora_r: int | None = flag(None, "rank of the LoRA update", least=1)
    lora_path: str | None = flag(
        None,
        "a LoRA adapter to start from or to evaluate: .bin or .safetensors, a folder with one, a "
        "folder of PEFT's, or the name of a repository on the hub",
    )
    lora_targets: list[str] | None = flag(
        None,
        f"the projections that LoRA adapts (default: query value): {', '.join(LORA_TARGETS)} "
        f"(intermediate and output are feed-forward, up and down), ends of module names, globs, "
        f"or all-linear",
    )
    lora_layers: list[str] | None = flag(
        None,
        "the layers that LoRA adapts: numbers from 0 on and ranges such as 6-11 (default: all)",
    )
    lora_rank_pattern: list[str] | None = flag(
        None,
        "other ranks than lora_r, as target=rank …, such as value=4 layer.0.*=16; the first match "
        "counts",
    )
    lora_alpha_pattern: list[str] | None = flag(
        None, "other alphas than lora_alpha, as target=alpha …, likewise"
    )
    lora_variant: str | None = flag(
        None,
        "LoRA's variant (default: lora): rslora scales the update by lora_alpha / √lora_r (arXiv "
        "2312.03732), dora trains magnitude and direction separately (arXiv 2402.09353)",
        choices=list(VARIANTS),
    )
    lora_init: str | None = flag(
        None,
        "initial values of A and B (default: A random, B zero): pissa, from the weight's largest "
        "singular values (arXiv 2404.02948); olora, from its QR factors (arXiv 2406.01775); "
        "orthogonal, random with B A = 0",
        choices=list(INITIALIZATIONS),
    )
    lora_freeze_A: bool | None = flag(
        None,
        "LoRA-FA (arXiv 2308.03303): A keeps its initial values, and only B is trained (default: "
        "false)",
    )
    lora_dropout: float | None = flag(
        None, "dropout on the LoRA update's input (default: 0)", least=0, below=1
    )
    lora_positions: bool | None = flag(
        None,
        "for DeBERTa-v2: LoRA also applies to positions, which share projections with contents, "
        "as in PEFT (default: false, as in the release)",
    )
    apply_adapter: bool = flag(False, "train bottleneck adapters and the head")
    adapter_type: str | None = flag(
        None,
        "houlsby (the default) after attention and feed-forward, pfeiffer only after the latter",
        choices=list(ADAPTER_TYPES),
    )
    adapter_size: int | None = flag(None, "width of the bottleneck (default: 64)", least=1)
    adapter_path: str | None = flag(
        None,
        "bottleneck adapters to start from or to evaluate: .bin or .safetensors, a folder with one "
        "or with AdapterHub's pytorch_adapter.bin and pytorch_model_head.bin, or a repository",
    )
    apply_bitfit: bool = flag(False, "train the biases and the head")
    bitfit_path: str | None = flag(
        None, "trained biases to start from or to evaluate; given like lora_path"
    )

    @property
    def sources(self) -> dict[str, str | None]:
        """Where weights are read from (folder, file or name on the hub), by flag name."""
        return {name: getattr(self, name) for name in ("model_name_or_path", *PATHS.values())}


@dataclass
class DataArguments:
    """The flags of all tasks: the user's own data files, and limits on the number of examples."""

    overwrite_cache: bool = flag(False, "tokenize again what an earlier run has cached")
    max_train_samples: int | None = flag(None, "train on this many examples at most")
    max_val_samples: int | None = flag(None, "evaluate on this many examples at most")
    max_test_samples: int | None = flag(None, "predict this many examples at most")
    train_file: str | None = flag(None, "CSV or JSON of your own, to train on")
    validation_file: str | None = flag(None, "the same, to evaluate on")
    test_file: str | None = flag(None, "the same, to predict; needs no labels")

    @property
    def files(self) -> dict[str, str | None]:
        """The files by split."""
        names = ("train", "validation", "test")
        return {split: getattr(self, f"{split}_file") for split in names}

    def check_files(self) -> None:
        """Refuses files whose names do not end in one of `SUFFIXES`.

        Raises:
            ValueError: there is such a file.
        """
        for file in filter(None, self.files.values()):
            if Path(file).suffix not in SUFFIXES:
                way_out = f"; {_OF_TABS}" if Path(file).suffix == ".tsv" else ""
                raise ValueError(f"{file}: its name must end in .csv, .json or .jsonl{way_out}")


@dataclass
class HubDataArguments(DataArguments):
    """Files, or a data set on the hub."""

    dataset_name: str | None = flag(None, "a data set on the hub, for splits without a file")
    dataset_config_name: str | None = flag(None, "its configuration, if it has several")
    preprocessing_num_workers: int | None = flag(
        None, "processes that tokenize (default: one)", least=1
    )
    pad_to_max_length: bool = flag(
        False, "pad every row to max_seq_length, not to the longest of its batch"
    )

    def __post_init__(self) -> None:
        if self.dataset_name is None and not any(self.files.values()):
            raise ValueError(
                "give --dataset_name, or --train_file / --validation_file / --test_file"
            )
        self.check_files()
