"""LoRA in a language model of another library, upstream's Transformers, in three calls of loralib.

    pip install transformers .    # in an environment without the fork in NLU/
    python examples/any_model.py --model HuggingFaceTB/SmolLM2-135M --text my_text.txt

It trains on nine tenths of the text, saves the adapter as a folder that PEFT can also load, and
loads it into a fresh base. At each stage, it prints the loss on the last tenth of the text.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import loralib as lora
import transformers
from loralib.io.command_line import ArgumentParser, summary
from loralib.training import process

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(output_dir: Path) -> None:
    """Checks that upstream's Transformers is installed and that `output_dir` is new or empty."""
    if "+lora" in transformers.__version__:
        raise ValueError(
            "this needs upstream's Transformers, but the fork in NLU/, which has the same name, is "
            "installed: in another environment, run pip install transformers ."
        )
    if output_dir.is_file() or (output_dir.is_dir() and any(output_dir.iterdir())):
        raise ValueError(f"{output_dir}: exists already: give another --output_dir")


def load_blocks(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Returns the text's tokens in blocks for training and held-out ones, (blocks, length) each."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    ids = torch.tensor(tokenizer(args.text.read_text(encoding="utf-8")).input_ids, device=DEVICE)
    blocks = ids[: len(ids) // args.length * args.length].view(-1, args.length)
    if len(blocks) < 2:
        raise ValueError(f"{args.text}: {len(ids)} tokens do not fill two blocks: lower --length")
    training, held_out = blocks.tensor_split([len(blocks) * 9 // 10])
    return training, held_out


def train(model: nn.Module, blocks: Tensor, args: argparse.Namespace) -> None:
    """Trains a model as usual; the groups hold the parameters that add_lora has not frozen."""
    optimizer = torch.optim.AdamW(lora.parameter_groups(model, args.lr, args.lora_plus_ratio))
    model.train()
    for _ in range(args.epochs):
        for batch in blocks[torch.randperm(len(blocks))].split(args.batch_size):
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def loss_of(model: nn.Module, blocks: Tensor) -> float:
    """Returns the mean loss per token."""
    model.eval()
    return torch.stack([model(input_ids=b, labels=b).loss for b in blocks.split(1)]).mean().item()


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = ArgumentParser(description=summary(__doc__))

    def add(name: str, default: Any, text: str, **more: Any) -> None:
        parser.add_argument(f"--{name}", default=default, help=text, **more)

    parser.add_argument("--model", required=True, help="the base: a folder, or a name on the hub")
    parser.add_argument("--text", type=Path, required=True, help="what to train on, in UTF-8")
    add(
        "output_dir",
        "runs/any_model",
        "folder for the adapter; must not contain one yet",
        type=Path,
    )
    add("targets", ["all-linear"], "what is adapted: ends of names, or all-linear", nargs="+")
    add("r", 8, "rank of the update", type=int)
    add("lora_alpha", 16, "the update is scaled by lora_alpha / r", type=float)
    add("variant", "lora", "of the update: lora, rslora, dora or rslora+dora")
    add("lr", 2e-4, "learning rate", type=float)
    add("lora_plus_ratio", 1.0, "learning rate of B over that of A, for LoRA+", type=float)
    add("epochs", 3, "passes over the text", type=int)
    add("batch_size", 8, "blocks in a step", type=int)
    add("length", 128, "tokens in a block", type=int)
    add("seed", 0, "seed of LoRA's initial values and of the order of blocks", type=int)
    args = parser.parse_args(argv)
    for name in ("epochs", "batch_size", "length"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(args, name)}")
    return args


def main(argv: list[str] | None = None) -> None:
    """Adapts the model, saves the adapter, and loads it into the base again."""
    args = parse(argv)
    check(args.output_dir)
    torch.manual_seed(args.seed)
    training, held_out = load_blocks(args)

    model = transformers.AutoModelForCausalLM.from_pretrained(args.model).to(DEVICE)
    print(f"base      loss {loss_of(model, held_out):.4f}")

    names = lora.add_lora(model, args.targets, args.r, args.lora_alpha, variant=args.variant)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{len(names)} modules adapted, {trained:,} parameters to train")
    train(model, training, args)
    print(f"adapted   loss {loss_of(model, held_out):.4f}")
    lora.save_adapter(model, args.output_dir)

    again = transformers.AutoModelForCausalLM.from_pretrained(args.model).to(DEVICE)
    lora.load_adapter(again, args.output_dir)
    print(f"reloaded  loss {loss_of(again, held_out):.4f}")
    print(f"merged    loss {loss_of(lora.merge(again), held_out):.4f}")


if __name__ == "__main__":
    process.run(main)
