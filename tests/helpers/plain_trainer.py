"""GPT-2's training by its formulas, slow and in float64, to compare gpt2_ft.py with.

All rows are padded to the sequence length, logits are computed for all positions and the whole
vocabulary, several processes are one loop, and optimizer and learning rates are written out.
"""

import math
import random
from argparse import Namespace
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

Example = dict[str, list[int]]


class PlainTrainer:
    """A run of `flags` on the weights of a file.

    Args:
        flags: those of gpt2_ft.py, with their defaults filled in.
        weights: tensors under the release's names, including LoRA's if it is trained.
        heads: the number of attention heads.
        examples: the training data.
        world_size: the number of simulated processes.
    """

    def __init__(
        self,
        flags: Namespace,
        weights: dict[str, Tensor],
        heads: int,
        examples: list[Example],
        world_size: int = 1,
    ):
        self.flags, self.heads, self.world_size = flags, heads, world_size
        self.p = {
            name.removeprefix("module.transformer."): tensor.double()
            for name, tensor in weights.items()
        }
        lora = {name for name in self.p if "lora_" in name}
        self.scaling = flags.lora_alpha / flags.lora_dim if lora else 0.0
        self.trained = sorted(lora or self.p)
        self.moments = {name: [torch.zeros_like(self.p[name])] * 2 for name in self.trained}
        self.updates = 0
        missing = -len(examples) % flags.train_batch_size
        filling = random.Random(flags.random_seed).choices(range(len(examples)), k=missing)
        self.examples = examples + [examples[index] for index in filling]
        if flags.scheduler == "cycle":
            given = flags.i_steps, flags.i_lrs
            self.points = [[float(number) for number in text.split(",")] for text in given]
            self.max_step = int(self.points[0][-1])
        else:
            batches = len(self.examples) // flags.train_batch_size
            self.max_step = flags.max_step or math.ceil(flags.max_epoch * batches / world_size)

    def steps(self) -> Iterator[tuple[float, float]]:
        """Trains; after each micro-step yields the first process's loss, and the learning rate."""
        flags, done = self.flags, 0
        gradients = {name: torch.zeros_like(self.p[name]) for name in self.trained}
        for epoch in range(1, (flags.max_epoch or self.max_step) + 1):
            shares = [list(self._batches(rank, epoch)) for rank in range(self.world_size)]
            for batches in zip(*shares, strict=True):
                if done == self.max_step:
                    return
                lr = self.lr_at(done)
                losses = []
                for batch in batches:
                    loss, own = self._gradients(batch)
                    losses.append(loss)
                    for name, gradient in own.items():
                        gradients[name] += gradient / flags.grad_acc / self.world_size
                done += 1
                if done % flags.grad_acc == 0:
                    self._update(gradients, lr)
                    gradients = {name: torch.zeros_like(self.p[name]) for name in self.trained}
                yield losses[0], lr

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        flags, last = self.flags, self.max_step
        if flags.scheduler == "cycle":
            steps, rates = self.points
            for begin, end, low, high in zip(steps, steps[1:], rates, rates[1:], strict=False):
                if begin <= step <= end:
                    return low + (high - low) * (step - begin) / (end - begin)
            return rates[0] if step < steps[0] else rates[-1]
        if step < flags.warmup_step:
            return flags.lr * step / flags.warmup_step
        if flags.scheduler == "linear":
            return flags.lr * (last - step) / (last - flags.warmup_step)
        if flags.scheduler == "cosine":
            return flags.lr * (1 + math.cos(math.pi * min(step, last) / last)) / 2
        return flags.lr

    def _batches(self, rank: int, epoch: int) -> Iterator[list[Example]]:
        flags = self.flags
        sampler = DistributedSampler(self.examples, self.world_size, rank, seed=flags.random_seed)
        sampler.set_epoch(epoch)
        order, size = list(sampler), flags.train_batch_size
        for start in range(0, len(order) - size + 1, size):
            yield [self.examples[index] for index in order[start : start + size]]

    def _padded(self, examples: list[Example], obj: str) -> tuple[Tensor, Tensor, Tensor]:
        """Input, target and mask, (batch, seq_len)."""
        length = self.flags.seq_len
        inputs, targets = (torch.zeros(len(examples), length, dtype=torch.int64) for _ in "it")
        mask = torch.zeros(len(examples), length, dtype=torch.float64)
        for row, example in enumerate(examples):
            tokens = example["context"] + example["completion"]
            begin = 1 if obj == "jlm" else max(1, len(example["context"]))
            for position, token in enumerate(tokens):
                if position < length:
                    inputs[row, position] = token
                if 1 <= position <= length:
                    targets[row, position - 1] = token
                    mask[row, position - 1] = position >= begin
        return inputs, targets, mask

    def _gradients(self, examples: list[Example]) -> tuple[float, dict[str, Tensor]]:
        leaves = {name: self.p[name].clone().requires_grad_() for name in self.trained}
        inputs, targets, mask = self._padded(examples, self.flags.obj)
        log_p = torch.log_softmax(self.logits(inputs, {**self.p, **leaves}), dim=-1)
        token_loss = -log_p.gather(-1, targets[..., None])[..., 0]
        epsilon = self.flags.label_smooth
        if epsilon > 0.0001:
            token_loss = (1 - epsilon) * token_loss - epsilon * log_p.mean(dim=-1)
        loss = (mask * token_loss).sum() / (mask.sum() + 0.0001)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return loss.item(), dict(zip(leaves, gradients, strict=True))

    def _update(self, gradients: dict[str, Tensor], lr: float) -> None:
        flags = self.flags
        if flags.clip > 0:
            norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
            factor = min(1.0, flags.clip / norm)
            gradients = {name: g * factor for name, g in gradients.items()}
        self.updates += 1
        beta1, beta2 = flags.adam_beta1, flags.adam_beta2
        c = 1.0
        if flags.correct_bias:
            c = math.sqrt(1 - beta2**self.updates) / (1 - beta1**self.updates)
        for name, g in gradients.items():
            m, v = self.moments[name]
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g**2
            self.moments[name] = [m, v]
            p = self.p[name] - lr * c * m / (v.sqrt() + flags.adam_epislon)
            exempt = flags.no_decay_bias and (name.endswith("bias") or "ln_" in name)
            self.p[name] = p if exempt else p - lr * flags.weight_decay * p

    def valid_loss(self, examples: list[Example]) -> float:
        """The plain mean over all tokens of completions, one example at a time."""
        losses = []
        for example in examples:
            inputs, targets, mask = self._padded([example], "clm")
            log_p = torch.log_softmax(self.logits(inputs, self.p), dim=-1)
            nll = -log_p.gather(-1, targets[..., None])[..., 0]
            losses += nll[mask == 1].tolist()
        return sum(losses) / len(losses)

    def logits(self, ids: Tensor, p: dict[str, Tensor]) -> Tensor:
        """(batch, length) -> (batch, length, vocabulary)."""
        x = p["wte.weight"][ids] + p["wpe.weight"][: ids.shape[1]]
        for layer in range(sum(name.endswith("ln_1.weight") for name in p)):
            own = f"h.{layer}."
            of = {name.removeprefix(own): w for name, w in p.items() if name.startswith(own)}
            x = x + self._attention(_norm(x, of, "ln_1"), of)
            inner = _norm(x, of, "ln_2") @ of["mlp.c_fc.weight"] + of["mlp.c_fc.bias"]
            cubic = inner + 0.044715 * inner**3
            inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * cubic))
            x = x + inner @ of["mlp.c_proj.weight"] + of["mlp.c_proj.bias"]
        return _norm(x, p, "ln_f") @ p["wte.weight"].T

    def _attention(self, x: Tensor, p: dict[str, Tensor]) -> Tensor:
        batch, length, n = x.shape
        query, key, value = (x @ p["attn.c_attn.weight"] + p["attn.c_attn.bias"]).split(n, dim=-1)
        if self.scaling:
            a, b = p["attn.c_attn.lora_A"], p["attn.c_attn.lora_B"]
            r = self.flags.lora_dim
            query = query + self.scaling * (x @ a[:r].T @ b[:n].T)
            value = value + self.scaling * (x @ a[r:].T @ b[n:].T)
        query, key, value = (
            part.view(batch, length, self.heads, n // self.heads).transpose(1, 2)
            for part in (query, key, value)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(n // self.heads)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ value
        joined = mixed.transpose(1, 2).reshape(batch, length, n)
        return joined @ p["attn.c_proj.weight"] + p["attn.c_proj.bias"]


def _norm(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    centered = x - x.mean(dim=-1, keepdim=True)
    variance = (centered**2).mean(dim=-1, keepdim=True)
    return centered / torch.sqrt(variance + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]
