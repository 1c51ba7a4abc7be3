"""Writes gpt2_fixture.safetensors: the logits of upstream's GPT2LMHeadModel on drawn weights.

Run it where upstream's transformers (5.23 made the file) and safetensors are installed, in an
environment of its own:

    python tests/NLG/make_gpt2_fixture.py

The file holds logits alone, `<shape>/padded` for a batch padded on the right and `<shape>/row<i>`
for its rows. Weights and ids are drawn by the functions that do not need upstream, here and in the
tests, from a generator whose numbers NumPy keeps the same in all its versions.
"""

from pathlib import Path

import numpy as np
import torch

FIXTURE = Path(__file__).with_name("gpt2_fixture.safetensors")

# name: width, blocks, heads, vocabulary, positions, and the lengths of the batch's rows
SHAPES = {
    "plain": (32, 2, 4, 53, 20, (7, 3, 12, 20)),
    "one-head": (12, 1, 1, 11, 9, (1, 9, 4)),
    "deep": (24, 5, 2, 97, 16, (16, 16, 2, 11, 5)),
}


def weight_shapes(shape: str) -> dict[str, tuple[int, ...]]:
    """Names, as in GPT-2's published files, and shapes of a model's weights."""
    n, layers, _, vocabulary, positions, _ = SHAPES[shape]
    block = {
        "ln_1.weight": (n,),
        "ln_1.bias": (n,),
        "attn.c_attn.weight": (n, 3 * n),
        "attn.c_attn.bias": (3 * n,),
        "attn.c_proj.weight": (n, n),
        "attn.c_proj.bias": (n,),
        "ln_2.weight": (n,),
        "ln_2.bias": (n,),
        "mlp.c_fc.weight": (n, 4 * n),
        "mlp.c_fc.bias": (4 * n,),
        "mlp.c_proj.weight": (4 * n, n),
        "mlp.c_proj.bias": (n,),
    }
    return {
        "wte.weight": (vocabulary, n),
        "wpe.weight": (positions, n),
        **{f"h.{i}.{name}": sizes for i in range(layers) for name, sizes in block.items()},
        "ln_f.weight": (n,),
        "ln_f.bias": (n,),
    }


def draw_weights(shape: str) -> dict[str, torch.Tensor]:
    """Weights of such a size that every one of them shows in logits of about 1."""
    chance = np.random.RandomState(len(shape))
    weights = {}
    for name, sizes in weight_shapes(shape).items():
        values = chance.standard_normal(sizes)
        if "ln_" in name and name.endswith("weight"):
            values = 1 + 0.3 * values
        elif len(sizes) == 2 and not name.startswith("w"):
            values *= 1.5 / sizes[0] ** 0.5
        else:
            values *= 0.3
        weights[name] = torch.from_numpy(values.astype(np.float32))
    return weights


def draw_rows(shape: str) -> list[torch.Tensor]:
    """The token ids of the batch's rows."""
    *_, vocabulary, _, lengths = SHAPES[shape]
    chance = np.random.RandomState(7)
    return [torch.from_numpy(chance.randint(0, vocabulary, size=length)) for length in lengths]


def pad(rows: list[torch.Tensor]) -> torch.Tensor:
    """(batch, length), padded on the right with 0."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@torch.no_grad()
def upstreams_logits(shape: str) -> dict[str, torch.Tensor]:
    """What upstream computes; zeros where there is padding."""
    import transformers

    n, layers, heads, vocabulary, positions, lengths = SHAPES[shape]
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_embd=n,
        n_layer=layers,
        n_head=heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    weights = {f"transformer.{name}": tensor for name, tensor in draw_weights(shape).items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    model.load_state_dict(weights)
    rows = draw_rows(shape)
    ids = pad(rows)
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    logits = model(ids, attention_mask=mask.long()).logits * mask[..., None]
    found = {f"{shape}/padded": logits}
    for i, row in enumerate(rows):
        found[f"{shape}/row{i}"] = model(row[None]).logits
    return found


def main() -> None:
    """Writes the fixture beside this script."""
    from safetensors.torch import save_file

    import transformers

    tensors = {}
    for shape in SHAPES:
        tensors |= upstreams_logits(shape)
        print(f"{shape}: standard deviation of the logits {tensors[f'{shape}/padded'].std():.2f}")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, FIXTURE, {"transformers": transformers.__version__})
    FIXTURE.chmod(0o644)
    size = FIXTURE.stat().st_size / 1024
    print(f"{FIXTURE.name}: {size:.0f} KiB, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
