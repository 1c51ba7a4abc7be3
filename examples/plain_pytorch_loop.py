"""LoRA in a plain PyTorch training loop: nothing but `loralib`, torch and a small model.

A classifier of handwritten digits is trained as usual, and becomes the base. Then all images are
turned by 90 degrees, which the base has never seen, and LoRA adapts the base to them, within
seconds, in six steps that are the same for any model:

    1  replace layers with loralib's layers of the same name, and load the base's weights into them
    2  freeze all parameters except the LoRA matrices
    3  give the optimizer the parameters that are not frozen
    4  train with the same loop as the base
    5  save only the LoRA matrices
    6  load the base and the LoRA file into a new model

The digits come with scikit-learn.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loralib as lora
from loralib.io.command_line import ArgumentParser, summary
from loralib.training import process

Examples = tuple[Tensor, Tensor]
"""Images (examples, 64), each pixel from 0 to 1, and their digits (examples,)."""


def load_data(turned: bool) -> tuple[Examples, Examples]:
    """Returns 1,297 training and 500 test examples of scikit-learn's digits, turned or upright."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise OSError("the digits come with scikit-learn: pip install scikit-learn") from error
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8) / 16
    images = images.rot90(k=int(turned), dims=(1, 2)).flatten(1)
    labels = torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, test = order[500:], order[:500]
    return (images[training], labels[training]), (images[test], labels[test])


def make_model() -> nn.Module:
    """Returns a classifier with three layers, (examples, 64) -> (examples, 10)."""
    layers = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    return nn.Sequential(*layers)


def add_lora(model: nn.Module, r: int, lora_alpha: float = 16) -> None:
    """Replaces every `nn.Linear` of any model with a `lora.Linear` of the same weights (step 1)."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            size, bias = (layer.in_features, layer.out_features), layer.bias is not None
            new = lora.Linear(*size, r=r, lora_alpha=lora_alpha, bias=bias)
            # Not strict, because the old layer has no LoRA matrices. Their B is zero, so the output
            # does not change yet.
            new.load_state_dict(layer.state_dict(), strict=False)
            model.set_submodule(name, new)


def train(name: str, model: nn.Module, examples: Examples, epochs: int) -> None:
    """Trains a model as usual, without its frozen parameters (steps 3 and 4)."""
    images, labels = examples
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    model.train()
    for epoch in range(1, epochs + 1):
        for batch in torch.randperm(len(labels)).split(64):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"{name}: epoch {epoch} of {epochs}, last loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def accuracy(model: nn.Module, examples: Examples) -> float:
    """Returns the share of `examples` that `model` classifies correctly."""
    images, labels = examples
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


def train_base(file: Path, epochs: int) -> nn.Module:
    """Trains the base on upright digits, and saves it to `file`."""
    examples, _ = load_data(turned=False)
    model = make_model()
    train("base", model, examples, epochs)
    torch.save(model.state_dict(), file)
    return model


def adapt(base_file: Path, lora_file: Path, r: int, epochs: int) -> nn.Module:
    """Adapts the base to turned digits, and saves the LoRA matrices to `lora_file`."""
    examples, _ = load_data(turned=True)
    model = make_model()
    model.load_state_dict(torch.load(base_file, weights_only=True))
    add_lora(model, r)  # step 1
    lora.mark_only_lora_as_trainable(model)  # step 2
    train("base + LoRA", model, examples, epochs)  # steps 3 and 4
    torch.save(lora.lora_state_dict(model), lora_file)  # step 5
    return model


def reload(base_file: Path, lora_file: Path, r: int) -> nn.Module:
    """Loads the adapted model from its two files, which together hold every tensor (step 6)."""
    model = make_model()
    add_lora(model, r)
    model.load_state_dict(
        torch.load(base_file, weights_only=True) | torch.load(lora_file, weights_only=True)
    )
    return model


def count_parameters(model: nn.Module) -> int:
    """Returns the number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = ArgumentParser(description=summary(__doc__))
    parser.add_argument("--r", type=int, default=8, help="rank of the update")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the data, each time")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order")
    parser.add_argument("--output_dir", type=Path, default="runs/plain_loop", help="for the files")
    args = parser.parse_args(argv)
    for name in ("r", "epochs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(args, name)}")
    return args


def main(argv: list[str] | None = None) -> None:
    """Trains the base, adapts it, reloads it, and prints the accuracy of each model."""
    args = parse(argv)
    torch.manual_seed(args.seed)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    base_file, lora_file = args.output_dir / "base.pt", args.output_dir / "lora.pt"

    base = train_base(base_file, args.epochs)
    adapted = adapt(base_file, lora_file, args.r, args.epochs)
    again = reload(base_file, lora_file, args.r)

    _, upright = load_data(turned=False)
    _, turned = load_data(turned=True)
    print("                 parameters trained      file  upright   turned")
    for name, model, file in (("base", base, base_file), ("base + LoRA", adapted, lora_file)):
        print(
            f"{name:<17}{count_parameters(model):>18,}{file.stat().st_size / 1024:>7.0f} KB"
            f"{accuracy(model, upright):>9.1%}{accuracy(model, turned):>9.1%}"
        )
    print(f"{'reloaded':<17}{accuracy(again, upright):>37.1%}{accuracy(again, turned):>9.1%}")


if __name__ == "__main__":
    process.run(main)
