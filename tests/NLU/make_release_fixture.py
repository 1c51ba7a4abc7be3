"""Makes release_fixture.safetensors: what the release's LoRA and adapters give on tiny models.

The release changed upstream's modules; here its formulas are applied to upstream's models from
outside, so that neither this project's code nor the release's has a part in the numbers:

    LoRA        a model is called with W + (alpha / r) B A in W's place; DeBERTa-v2's positions are
                projected by W alone, which upstream can do with projections of their own
    houlsby     h + B silu(A h), put behind the dropout of both sub-layers
    pfeiffer    h + B relu(A LayerNorm(h + x)), put behind the feed-forward part's

Run it where upstream's transformers (5.23 made the file) and safetensors are installed, in an
environment of its own:

    python tests/NLU/make_release_fixture.py

Weights and inputs are not in the file: `draw` and `draw_inputs` give the tests the same ones. All
is in float64. Tensors are named `<case>/logits`, `<case>/grad/<parameter>` and `<case>/losses`, of
training steps with Transformers 4.4.2's AdamW.
"""

import math
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from torch.func import functional_call

FIXTURE = Path(__file__).with_name("release_fixture.safetensors")
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 1,
    "num_labels": 3,
}
FAMILIES = {
    "roberta": {"type_vocab_size": 1},
    "deberta": {
        "type_vocab_size": 0,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "conv_kernel_size": 3,
        "conv_act": "gelu",
    },
}
# Name -> family, what is trained, which projections LoRA adapts.
CASES = {
    "roberta_lora": ("roberta", "lora", ("query", "value")),
    "roberta_houlsby": ("roberta", "houlsby", ()),
    "roberta_pfeiffer": ("roberta", "pfeiffer", ()),
    "deberta_lora": ("deberta", "lora", ("query_proj", "value_proj")),
}
RANK, ALPHA, SIZE = 3, 12, 5
STEPS, RATE, DECAY, BETAS, EPSILON = 6, 5e-3, 0.1, (0.9, 0.999), 1e-8
LENGTHS = (7, 3, 12, 18)


def draw(name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """A parameter by its name, so large that it shows in logits."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name.endswith("LayerNorm.weight"):
        return 1 + 0.3 * values
    if len(shape) >= 2 and "embeddings" not in name:
        return values * 1.5 / math.prod(shape[1:]) ** 0.5
    return 0.3 * values


def draw_inputs() -> dict[str, Tensor]:
    """A padded batch with its classes."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(3, SHAPE["vocab_size"], mask.shape, generator=generator)
    ids = ids.masked_fill(mask == 0, SHAPE["pad_token_id"])
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([2, 0, 1, 1])}


def added_tensors(case: str) -> dict[str, Tensor]:
    """What is trained in the backbone, under the release's names."""
    family, kind, targets = CASES[case]
    width, layers = SHAPE["hidden_size"], range(SHAPE["num_hidden_layers"])
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        start = f"{family}.encoder.layer.{layer}."
        for target in targets:
            shapes[f"{start}attention.self.{target}.lora_A"] = (RANK, width)
            shapes[f"{start}attention.self.{target}.lora_B"] = (width, RANK)
        for part in {"houlsby": ("attention.output", "output"), "pfeiffer": ("output",)}.get(
            kind, ()
        ):
            for half, shape in (("A", (SIZE, width)), ("B", (width, SIZE))):
                shapes[f"{start}{part}.adapter.adapter_{half}.weight"] = shape
                shapes[f"{start}{part}.adapter.adapter_{half}.bias"] = shape[:1]
    return {name: draw(name, shape) for name, shape in shapes.items()}


def build(family: str) -> torch.nn.Module:
    """Upstream's classifier with drawn weights, and with projections of its own for positions."""
    import transformers

    names = {"roberta": "Roberta", "deberta": "DebertaV2"}
    settings = {**SHAPE, **FAMILIES[family]}
    if family == "deberta":
        settings["share_att_key"] = False
    config = getattr(transformers, f"{names[family]}Config")(**settings)
    model = getattr(transformers, f"{names[family]}ForSequenceClassification")(config).double()
    for name, parameter in model.named_parameters():
        shared = name.replace(".pos_key_proj.", ".key_proj.")
        shared = shared.replace(".pos_query_proj.", ".query_proj.")
        parameter.data.copy_(draw(shared, parameter.shape))
    return model.requires_grad_(False).eval()


def insert(model: torch.nn.Module, module: str, kind: str, added: dict[str, Tensor]) -> None:
    """Puts a bottleneck adapter into an output module of upstream's."""
    output = model.get_submodule(module)

    def project(x: Tensor, half: str) -> Tensor:
        start = f"{module}.adapter.adapter_{half}."
        return F.linear(x, added[f"{start}weight"], added[f"{start}bias"])

    def forward(hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        h = output.dropout(output.dense(hidden_states))
        if kind == "houlsby":
            y = project(F.silu(project(h, "A")), "B") + h
        else:
            y = project(F.relu(project(output.LayerNorm(h + input_tensor), "A")), "B") + h
        return output.LayerNorm(y + input_tensor)

    output.forward = forward


def adapted(case: str, trained: dict[str, Tensor]) -> Callable[[], Tensor]:
    """The logits of a case as a function of what `trained` holds when it is called."""
    family, kind, _ = CASES[case]
    model, inputs = build(family), draw_inputs()
    del inputs["labels"]
    for module in {name.partition(".adapter.")[0] for name in trained if ".adapter." in name}:
        insert(model, module, kind, trained)
    weights = dict(model.named_parameters())

    def logits() -> Tensor:
        changed = {name: tensor for name, tensor in trained.items() if name in weights}
        for name in trained:
            module = name.removesuffix(".lora_A")
            if module != name:
                product = trained[f"{module}.lora_B"] @ trained[name]
                changed[f"{module}.weight"] = weights[f"{module}.weight"] + ALPHA / RANK * product
        return functional_call(model, changed, kwargs=inputs).logits

    return logits


def step(
    parameters: dict[str, Tensor], moments: dict[str, list[Tensor]], number: int, rate: float
) -> None:
    """One step of 4.4.2's AdamW; biases do not decay. `number` counts from 1."""
    correction = math.sqrt(1 - BETAS[1] ** number) / (1 - BETAS[0] ** number)
    for name, p in parameters.items():
        m, v = moments[name]
        m.mul_(BETAS[0]).add_(p.grad, alpha=1 - BETAS[0])
        v.mul_(BETAS[1]).addcmul_(p.grad, p.grad, value=1 - BETAS[1])
        with torch.no_grad():
            p.sub_(rate * correction * m / (v.sqrt() + EPSILON))
            if not name.endswith("bias"):
                p.sub_(rate * DECAY * p)
        p.grad = None


def outputs(case: str) -> dict[str, Tensor]:
    """Logits, gradients and the losses of a few steps."""
    family = CASES[case][0]
    heads = {n: p for n, p in build(family).named_parameters() if not n.startswith(f"{family}.")}
    trained = {name: t.requires_grad_() for name, t in {**added_tensors(case), **heads}.items()}
    logits, labels = adapted(case, trained), draw_inputs()["labels"]
    moments = {name: [torch.zeros_like(t), torch.zeros_like(t)] for name, t in trained.items()}
    found, losses = {"logits": logits().detach()}, []
    for number in range(1, STEPS + 1):
        loss = F.cross_entropy(logits(), labels)
        loss.backward()
        losses.append(loss.detach())
        if number == 1:
            found |= {f"grad/{name}": t.grad.clone() for name, t in trained.items()}
        step(trained, moments, number, RATE)
    return {**found, "losses": torch.stack(losses)}


def main() -> None:
    """Writes the fixture beside this script."""
    import transformers

    tensors = {}
    for case in CASES:
        tensors |= {f"{case}/{name}": t.contiguous() for name, t in outputs(case).items()}
        losses = tensors[f"{case}/losses"].tolist()
        print(case, "losses", " ".join(f"{loss:.4f}" for loss in losses))
    save_file(tensors, FIXTURE, {"transformers": transformers.__version__})
    FIXTURE.chmod(0o644)
    print(f"{FIXTURE.name}: {FIXTURE.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
