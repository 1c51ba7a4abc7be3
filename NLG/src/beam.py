"""Beam search over a batch of prompts that differ in length.

Beams of one prompt are branches of one tree, whose trunk is the prompt. Each token of the tree has
one slot of the cache, where its key and value are written once and seen by all the beams that
descend from it; a mask says which slots a beam sees:

    prompt    a b c, three beams                    slots   a b c . | d e f | g h i
                                                            prompt    step 1  step 2
              .-- d --.-- g                beam 0: c d g    1 1 1 0   1 0 0   1 0 0
    a - b - c |       '-- h                beam 1: c d h    1 1 1 0   1 0 0   0 1 0
              |-- e                        beam 2: c f i    1 1 1 0   0 0 1   0 0 1
              '-- f ----- i
                                           '.' pads a prompt shorter than the batch's longest

Reordering beams reorders rows of the mask; keys and values stay where they are. A branch that died
out, such as e, is seen by no beam. Every few steps the slots that are still seen are copied into a
cache that fits them: most branches die soon, and with 10 beams and 64 steps that halves attention's
time and takes a third of the memory. Prompts whose search is over leave the batch in the same copy.

The search ends when no beam can win any more. A beam's sum of log-probabilities s only falls, so a
beam of length l can at best reach the score s / length^penalty, at the length from l + 1 to
`eval_len` that makes it largest: the last one if the penalty is 0 or more, else the next one.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from encoded import END_OF_TEXT_ID
from loralib.io.command_line import check_bounds
from loralib.nn.packing import PackedRows, attend
from model import Attend, GPT2LMModel

_NEVER = float("-inf")
# What a mask's rows are a multiple of in memory, so that attention on a GPU takes no copy of it.
_ALIGNED = 8


@dataclass(frozen=True)
class BeamSettings:
    """How to search.

    Args:
        beam: beams a prompt; 1 is greedy search.
        eval_len: tokens that are generated at most.
        length_penalty: a text's score is its sum of log-probabilities / length^length_penalty.
        no_repeat_ngram_size: no sequence of this many generated tokens occurs twice; 0: any may.
        repetition_penalty: logits of tokens that a beam has generated are divided by it where they
            are positive and multiplied with it where they are negative (CTRL, arXiv 1909.05858,
            section 4.1); 1: no change.
        min_length: generated tokens before there may be an end token.
        eos_token_ids: the end tokens.

    Raises:
        ValueError: a value is out of its range.
    """

    beam: int = 1
    eval_len: int = 64
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    min_length: int = 0
    eos_token_ids: tuple[int, ...] = (END_OF_TEXT_ID,)

    def __post_init__(self):
        lowest = {"beam": 1, "eval_len": 1, "no_repeat_ngram_size": 0, "min_length": 0}
        for name, least in lowest.items():
            check_bounds(name, getattr(self, name), least=least)
        check_bounds("repetition_penalty", self.repetition_penalty, above=0, below=math.inf)
        # Beyond, powers of a length leave the range of a floating-point number.
        check_bounds("length_penalty", self.length_penalty, least=-50, most=50)


@torch.inference_mode()
def search(
    model: GPT2LMModel, prompts: Sequence[Sequence[int]], settings: BeamSettings
) -> list[list[int]]:
    """The best text that beam search finds after each prompt.

    Prompts of similar length are fastest, because shorter ones are padded.

    Args:
        model: on any device, in any precision, in evaluation mode.
        prompts: token ids, at least one each.
        settings: how to search.

    Returns:
        For each prompt the generated tokens, the end token included where there is one.

    Raises:
        ValueError: there is no prompt, or one is empty; the model's positions or vocabulary are
            not enough; the model computes scores that are not finite.
    """
    _check(model, prompts, settings)
    return _Search(model, prompts, settings).run()


def _check(model: GPT2LMModel, prompts: Sequence[Sequence[int]], settings: BeamSettings) -> None:
    if not prompts or not all(prompts):
        raise ValueError("beam search needs a prompt of at least one token")
    config = model.config
    longest = max(map(len, prompts))
    if longest + settings.eval_len - 1 > config.n_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {settings.eval_len} generated ones are more than "
            f"the model's {config.n_positions} positions"
        )
    for what, ids in (
        ("prompts have token", {token for prompt in prompts for token in prompt}),
        ("the end token is", set(settings.eos_token_ids)),
    ):
        for token in ids:
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"{what} {token}, outside the vocabulary of {config.vocab_size}")
    if settings.beam > config.vocab_size:
        raise ValueError(f"beam {settings.beam} is more than the {config.vocab_size} tokens")


class _Search:
    """The beams of the prompts whose search is not over, and the best text of each so far.

    Attributes:
        sums: (prompts, beams), log-probabilities; -inf for a beam that is closed.
        history: (prompts, beams, length), the generated tokens.
        best_score: (prompts,), of closed beams.
        best_text, best_length: (prompts, eval_len) and (prompts,), the tokens of that score.
        lengths: (prompts,), the prompts'.
        places: (prompts,), where in the batch each was.
        found: the sequences of prompts whose search has finished, by place.
    """

    _PER_PROMPT = ("sums", "history", "best_score", "best_text", "best_length", "lengths", "places")

    def __init__(
        self, model: GPT2LMModel, prompts: Sequence[Sequence[int]], settings: BeamSettings
    ):
        self.model, self.settings = model, settings
        weight = model.transformer.wte.weight
        device = weight.device
        count = len(prompts)
        ends = sorted(set(settings.eos_token_ids))
        self.ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self.ids = [torch.tensor(prompt, device="cpu") for prompt in prompts]
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.places = torch.arange(count, device=device)
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.sums = torch.zeros(count, 1, dtype=wide, device=device)
        self.history = torch.zeros(count, 1, 0, dtype=torch.int64, device=device)
        self.best_score = torch.full((count,), _NEVER, dtype=torch.float64, device=device)
        self.best_text = torch.zeros(count, settings.eval_len, dtype=torch.int64, device=device)
        self.best_length = torch.zeros(count, dtype=torch.int64, device=device)
        self.cache = TreeCache(model.config.n_head, settings.beam)
        self.found: dict[int, list[int]] = {}

    def run(self) -> list[list[int]]:
        """Searches to the end."""
        logits = self._read_prompts()
        while True:
            self._grow(logits)
            self._close()
            if self._should_read():
                self._drop_finished()
            if not len(self.places):
                return [self.found[place] for place in range(len(self.found))]
            logits = self._read_last_tokens()

    def _read_prompts(self) -> Tensor:
        """Fills the cache; the logits after each prompt, (prompts, 1, vocabulary)."""
        ids = torch.nn.utils.rnn.pad_sequence(self.ids, batch_first=True).to(self.places.device)
        rows = PackedRows.from_lengths([len(prompt) for prompt in self.ids]).to(ids.device).routed()
        last = rows.first + self.lengths - 1
        reading = self.cache.reading(rows)
        hidden = self.model.transformer(rows.pack(ids), rows.positions, reading, last)
        return self.model.lm_head(hidden)[:, None]

    def _read_last_tokens(self) -> Tensor:
        """The logits after each beam's last token, (prompts, beams, vocabulary)."""
        count, beams, length = self.history.shape
        positions = (self.lengths + length - 1).repeat_interleave(beams)
        growing = self.cache.growing()
        hidden = self.model.transformer(self.history[..., -1].flatten(), positions, growing)
        return self.model.lm_head(hidden).unflatten(0, (count, beams))

    def _grow(self, logits: Tensor) -> None:
        """Extends each prompt's beams by a token: the best of all continuations."""
        logits = logits.to(self.sums.dtype)
        penalise(logits, self.history, self.ends, self.settings)
        self.sums, parents, tokens = best_candidates(logits, self.sums, self.settings.beam)
        row = torch.arange(len(parents), device=parents.device)[:, None]
        self.history = torch.cat([self.history[row, parents], tokens[..., None]], dim=2)
        self.cache.follow(parents)

    def _close(self) -> None:
        """Closes the beams that came to an end, and keeps a text that is better than the best."""
        length, settings = self.history.shape[2], self.settings
        closed = torch.isin(self.history[..., -1], self.ends)
        if length == settings.eval_len:
            closed.fill_(True)
        score = self.sums.double() / length**settings.length_penalty
        score, beam = score.masked_fill(~closed, _NEVER).max(dim=1)
        better = (score > self.best_score) | score.isnan()  # `_drop_finished` reports these
        text = self.history[torch.arange(len(beam), device=beam.device), beam]
        self.best_score = torch.where(better, score, self.best_score)
        self.best_length.masked_fill_(better, length)
        self.best_text[:, :length] = torch.where(better[:, None], text, self.best_text[:, :length])
        self.sums.masked_fill_(closed, _NEVER)

    def _should_read(self) -> bool:
        """Whether to find out which searches are over, for which the CPU waits for the device.

        On a GPU only where it has to wait in any case. What a search that is over computes until
        then changes nothing.
        """
        is_last = self.history.shape[2] == self.settings.eval_len
        return is_last or self.cache.is_full or self.places.device.type == "cpu"

    def _drop_finished(self) -> None:
        """Drops finished prompts from the batch, once that is worth a copy of the cache."""
        length, settings = self.history.shape[2], self.settings
        reached = settings.eval_len if settings.length_penalty >= 0 else length + 1
        hope = self.sums.amax(dim=1).double() / reached**settings.length_penalty
        pairs = torch.stack([self.best_score, hope], dim=1).tolist()
        if any(map(math.isnan, itertools.chain(*pairs))):
            raise ValueError(
                "the model's scores are not finite numbers: its weights are damaged, or too large "
                "for this precision"
            )
        over = [best >= hope for best, hope in pairs]
        count = len(over)
        if not (8 * sum(over) >= count or self.cache.is_full):
            return
        if any(over):
            self._note_found(over)
        kept = torch.tensor(
            [row for row in range(count) if not over[row]],
            dtype=torch.int64,
            device=self.places.device,
        )
        for name in self._PER_PROMPT:
            setattr(self, name, getattr(self, name)[kept])
        if len(kept):
            self.cache.keep(kept)

    def _note_found(self, over: list[bool]) -> None:
        """Takes over the best texts of the searches that are over."""
        columns = (self.places, self.best_text, self.best_length)
        rows = zip(over, *(column.tolist() for column in columns), strict=True)
        for is_over, place, text, size in rows:
            if is_over:
                self.found[place] = text[:size]


class TreeCache:
    """The keys and values of the prompts' trees, as pictured at the head of this file.

    Args:
        heads: attention heads.
        beams: beams a prompt.

    Attributes:
        keys, values: for each layer (prompts, slots, n); slots beyond those of `seen` are free.
        seen: (prompts, beams, slots), which slots each beam looks at; one row for all beams after
            `reading`.
    """

    # A copy makes room for the slots of this many steps.
    ROOM = 8

    def __init__(self, heads: int, beams: int):
        self.heads, self.beams = heads, beams
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.seen: Tensor

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another step."""
        return self.seen.shape[2] + self.beams > self.keys[0].shape[1]

    def reading(self, rows: PackedRows) -> Attend:
        """Attention within prompts; their keys and values become the cache's."""
        self.seen = rows.is_token[:, None]

        def attend_and_hold(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            for held, part in ((self.keys, key), (self.values, value)):
                held.append(F.pad(rows.pad(part), (0, 0, 0, self.ROOM * self.beams)))
            return attend(query, key, value, rows, self.heads, causal=True)

        return attend_and_hold

    def follow(self, parents: Tensor) -> None:
        """Beam i becomes a descendant of beam parents[:, i]; parents is (prompts, beams)."""
        row = torch.arange(len(parents), device=parents.device)[:, None]
        self.seen = self.seen[row, parents]

    def growing(self) -> Attend:
        """Attention of one new token a beam, whose keys and values take the next free slots.

        The cache must not be full.
        """
        count, _, start = self.seen.shape
        own = torch.eye(self.beams, dtype=torch.bool, device=self.seen.device)
        self.seen = torch.cat([self.seen, own.expand(count, -1, -1)], dim=2)
        end = start + self.beams
        mask = self._mask(end)

        def attend_to_tree(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            for held, part in ((self.keys, key), (self.values, value)):
                held[layer][:, start:end] = part.unflatten(0, (count, self.beams))
            query, key, value = (
                part.unflatten(2, (self.heads, -1)).transpose(1, 2)
                for part in (
                    query.unflatten(0, (count, self.beams)),
                    self.keys[layer][:, :end],
                    self.values[layer][:, :end],
                )
            )
            collected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            return collected.transpose(1, 2).flatten(2).flatten(0, 1)

        return attend_to_tree

    def _mask(self, slots: int) -> Tensor:
        """(prompts, 1, beams, slots): 0 for a slot that a beam sees, else -inf.

        What PyTorch would make of `seen` in every layer; aligned as its kernels for GPUs have it.
        """
        width = -(-slots // _ALIGNED) * _ALIGNED
        mask = self.keys[0].new_zeros(*self.seen.shape[:2], width)[..., :slots]
        return mask.masked_fill_(~self.seen, _NEVER)[:, None]

    def keep(self, prompts: Tensor) -> None:
        """Copies what beams of these prompts see into a cache of its size, with new room.

        Args:
            prompts: (kept,), at least one.
        """
        seen = self.seen[prompts]
        alive = seen.any(dim=1)
        count = int(alive.sum(dim=1).max())
        slots = alive.int().argsort(dim=1, descending=True, stable=True)[:, :count]
        self.seen = seen.gather(2, slots[:, None].expand(-1, seen.shape[1], -1))
        # New room holds copies of a used slot, because even masked values must be numbers.
        source = prompts[:, None] * self.keys[0].shape[1] + slots
        source = F.pad(source, (0, self.ROOM * self.beams))
        for held in (self.keys, self.values):
            for layer, old in enumerate(held):
                new = old.flatten(0, 1).index_select(0, source.flatten())
                held[layer] = new.unflatten(0, source.shape)


def penalise(logits: Tensor, history: Tensor, ends: Tensor, settings: BeamSettings) -> None:
    """Applies the repetition penalty, and suppresses what may not follow, in place.

    Args:
        logits: (prompts, beams, vocabulary).
        history: (prompts, beams, length), the tokens generated so far.
        ends: (k,), the end tokens.
        settings: which penalties there are.
    """
    length, size = history.shape[2], settings.no_repeat_ngram_size
    if settings.repetition_penalty != 1 and length:
        scores, penalty = logits.gather(2, history), settings.repetition_penalty
        logits.scatter_(2, history, torch.where(scores > 0, scores / penalty, scores * penalty))
    if length < settings.min_length:
        logits.index_fill_(2, ends, _NEVER)
    if 0 < size <= length:
        ngrams = history.unfold(2, size, 1)  # (prompts, beams, ngrams, size)
        begun = history[:, :, None, length - size + 1 :]
        again = (ngrams[..., :-1] == begun).all(dim=-1)
        bound = logits.new_full(again.shape, float("inf")).masked_fill_(again, _NEVER)
        logits.scatter_reduce_(2, ngrams[..., -1], bound, "amin")


# Half a million candidates are searched through the maxima of blocks of this many tokens.
_BLOCK = 64


def best_candidates(logits: Tensor, sums: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The candidates with the largest sums + log_softmax(logits), for each prompt.

    The best `count` candidates lie in the `count` blocks with the largest maxima. Of the softmax
    only its largest probability is used: log Σ exp(logits) = max(logits) - log max(softmax).

    Args:
        logits: (prompts, beams, vocabulary), float32 or wider.
        sums: (prompts, beams).
        count: how many; at most the vocabulary.

    Returns:
        Sums, beams and tokens, each (prompts, count), the best first.
    """
    vocabulary = logits.shape[2]
    maxima = _block_maxima(logits)
    peak = maxima.amax(dim=2, keepdim=True)
    total = peak - _largest_probability(logits).log().clamp(max=0)
    # A beam whose tokens are all suppressed has no softmax.
    total.masked_fill_(peak.isneginf(), 0)
    sums = sums[..., None]

    block_sums = (sums + (maxima - total)).flatten(1)
    block = block_sums.topk(min(count, block_sums.shape[1])).indices[..., None]
    beam, block = block // maxima.shape[2], block % maxima.shape[2]
    inside = torch.arange(_BLOCK, device=logits.device)
    tokens = block * _BLOCK + inside  # (prompts, blocks, _BLOCK)
    is_beyond = tokens >= vocabulary
    tokens.clamp_(max=vocabulary - 1)
    row = torch.arange(len(logits), device=logits.device)[:, None, None]
    reached = sums[row, beam, 0] + (logits[row, beam, tokens] - total[row, beam, 0])
    reached.masked_fill_(is_beyond, _NEVER)
    found, at = reached.flatten(1).topk(count)
    return found, beam.expand_as(tokens).flatten(1).gather(1, at), tokens.flatten(1).gather(1, at)


# On a CPU, the C library returns larger blocks of memory to the system, and requests them each
# step.
_ROWS_AT_ONCE = 16


def _largest_probability(logits: Tensor) -> Tensor:
    """The maximum of softmax(logits), (prompts, beams, 1)."""
    rows = logits.flatten(0, 1)
    parts = rows.split(_ROWS_AT_ONCE) if rows.device.type == "cpu" else [rows]
    largest = torch.cat([part.softmax(dim=1).amax(dim=1) for part in parts])
    return largest.view(*logits.shape[:2], 1)


def _block_maxima(logits: Tensor) -> Tensor:
    """The maxima of blocks of `_BLOCK` tokens, the last one shorter: (prompts, beams, blocks)."""
    blocks, rest = divmod(logits.shape[2], _BLOCK)
    whole = logits[..., : blocks * _BLOCK].unflatten(2, (blocks, _BLOCK)).amax(dim=3)
    if not rest:
        return whole
    return torch.cat([whole, logits[..., -rest:].amax(dim=2, keepdim=True)], dim=2)
