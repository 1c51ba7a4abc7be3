"""Writes loralib_0_1_2.safetensors: what PyPI's loralib 0.1.2 computes, layer by layer.

Run by hand, as a script, in an environment that has that package and not this project:

    pip install torch safetensors loralib==0.1.2
    python tests/loralib/make_fixture.py

Every tensor is named `layer/what`. `what` is init/… for the state dict under seed 0, then, with
random LoRA parameters: state/… in training mode, x, train and eval (outputs in either mode), out
(the output's gradient) and grad/… (x's and the trainable parameters'). The metadata holds, for each
layer, its class and arguments as JSON.
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

import loralib

# name: class, positional arguments, keyword arguments, shape of x
LAYERS = {
    "linear": ("Linear", [6, 10], {"r": 3, "lora_alpha": 6}, [4, 6]),
    "linear_3d_no_bias": ("Linear", [6, 10], {"r": 2, "bias": False}, [2, 3, 6]),
    "linear_fan_in_fan_out": (
        "Linear",
        [6, 10],
        {"r": 3, "lora_alpha": 2, "fan_in_fan_out": True},
        [4, 6],
    ),
    "linear_not_merging": ("Linear", [6, 6], {"r": 1, "merge_weights": False}, [4, 6]),
    "linear_r0": ("Linear", [6, 10], {}, [4, 6]),
    "merged_qv": (
        "MergedLinear",
        [6, 12],
        {"r": 2, "lora_alpha": 8, "enable_lora": [True, False, True]},
        [2, 3, 6],
    ),
    "merged_last": ("MergedLinear", [6, 8], {"r": 3, "enable_lora": [False, True]}, [4, 6]),
    "merged_fan_in_fan_out": (
        "MergedLinear",
        [6, 12],
        {"r": 2, "enable_lora": [True, True, False], "fan_in_fan_out": True},
        [4, 6],
    ),
    "merged_r0": ("MergedLinear", [6, 12], {"enable_lora": [True, False, True]}, [4, 6]),
    "embedding": ("Embedding", [9, 5], {"r": 2, "lora_alpha": 4}, [3, 4]),
    "embedding_padding": ("Embedding", [9, 5], {"r": 2, "padding_idx": 1}, [3, 4]),
    "conv1d_kernel_1": ("Conv1d", [4, 6, 1], {"r": 2, "lora_alpha": 3}, [2, 4, 7]),
    "conv2d": ("Conv2d", [4, 6, 3], {"r": 2, "lora_alpha": 3}, [2, 4, 6, 6]),
    "conv2d_groups": (
        "Conv2d",
        [4, 6, 3],
        {"r": 2, "groups": 2, "stride": 2, "padding": 1, "bias": False},
        [2, 4, 6, 6],
    ),
    "conv2d_r0": ("Conv2d", [4, 6, 3], {"dilation": 2}, [2, 4, 6, 6]),
    "conv3d_kernel_1": ("Conv3d", [4, 6, 1], {"r": 2}, [2, 4, 3, 3, 3]),
}


def record(kind: str, args: list, kwargs: dict, x_shape: list[int]) -> dict[str, torch.Tensor]:
    """One layer's tensors, named as the module's docstring says."""
    torch.manual_seed(0)
    layer = getattr(loralib, kind)(*args, **kwargs)
    tensors = {f"init/{name}": value.clone() for name, value in layer.state_dict().items()}
    for name, parameter in layer.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randint(args[0], x_shape) if kind == "Embedding" else torch.randn(x_shape)
    x.requires_grad = x.is_floating_point()
    tensors |= {f"state/{name}": value.clone() for name, value in layer.state_dict().items()}
    tensors |= {"x": x.detach().clone(), "train": layer(x)}
    tensors["out"] = torch.randn_like(tensors["train"]) / 10
    tensors["train"].backward(tensors["out"])
    trained = {"x": x, **dict(layer.named_parameters())}
    tensors |= {f"grad/{name}": t.grad for name, t in trained.items() if t.grad is not None}
    layer.eval()
    tensors["eval"] = layer(x)
    return {name: value.detach().contiguous() for name, value in tensors.items()}


def main(argv: list[str] | None = None) -> None:
    """Computes and writes the fixture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).with_name("loralib_0_1_2.safetensors")
    parser.add_argument("--output", type=Path, default=default, help="the file to write")
    args = parser.parse_args(argv)
    if hasattr(loralib, "__version__") or version("loralib") != "0.1.2":
        raise SystemExit(f"{loralib.__file__} is not PyPI's loralib 0.1.2")
    tensors, metadata = {}, {}
    for name, (kind, positional, keyword, x_shape) in LAYERS.items():
        recorded = record(kind, positional, keyword, x_shape)
        tensors |= {f"{name}/{what}": value for what, value in recorded.items()}
        metadata[name] = json.dumps([kind, positional, keyword])
    save_file(tensors, args.output, metadata)
    print(f"{args.output}: {len(LAYERS)} layers, {args.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
