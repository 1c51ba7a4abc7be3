"""Beam search over a batch of prompts that differ in length.

The beams of a prompt are branches of one tree, whose trunk is the prompt. Each token of the tree
has one slot in the cache. Its key and value are written there once, for all beams that descend from
it. A mask says which slots a beam sees:

    prompt    a b c, three beams                    slots   a b c . | d e f | g h i
                                                            prompt    step 1  step 2
              .-- d --.-- g                beam 0: c d g    1 1 1 0   1 0 0   1 0 0
    a - b - c |       '-- h                beam 1: c d h    1 1 1 0   1 0 0   0 1 0
              |-- e                        beam 2: c f i    1 1 1 0   0 0 1   0 0 1
              '-- f ----- i
                                           '.' pads a prompt shorter than the batch's longest

Reordering beams reorders rows of the mask, while keys and values stay where they are. A branch that
died out, such as e, is seen by no beam. Every few steps the slots that are still seen are copied
into a cache that fits them. Most branches die soon: with 10 beams and 64 steps, copying halves
attention's time and needs a third of the memory. The same copy drops prompts whose search is over.

The search ends when no open beam can beat the best finished text. A beam's sum of log-probabilities
s only falls, so a beam of length l can at best reach the score s / length^penalty, at the length
from l + 1 to `eval_len` that makes it largest: `eval_len` if the penalty is 0 or more, else l + 1.
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
from loralib.nn.routing import is_by_row, note_tokens
from model import Attend, GPT2LMModel

_NEVER = float("-inf")
# A mask's rows are padded in memory to a multiple of this, so that attention on a GPU does not copy
# the mask.
_ALIGNED = 8


@dataclass(frozen=True)
class BeamSettings:
    """The settings of a beam search.

    Args:
        beam: beams per prompt; 1 is greedy search.
        eval_len: the largest number of generated tokens.
        length_penalty: a text's score is its sum of log-probabilities / length^length_penalty.
        no_repeat_ngram_size: no sequence of this many generated tokens occurs twice; 0: no limit.
        repetition_penalty: positive logits of tokens that a beam has generated are divided by it,
            negative ones are multiplied by it (CTRL, arXiv 1909.05858, section 4.1); 1: no change.
        min_length: the number of generated tokens before an end token is allowed.
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
        # Beyond these, powers of a length leave the range of a floating-point number.
        check_bounds("length_penalty", self.length_penalty, least=-50, most=50)


@torch.inference_mode()
def search(
    model: GPT2LMModel, prompts: Sequence[Sequence[int]], settings: BeamSettings
) -> list[list[int]]:
    """Returns the best text that beam search finds after each prompt.

    Prompts of similar length are fastest, because shorter ones are padded.

    Args:
        model: on any device, in any precision, in evaluation mode.
        prompts: token ids, at least one per prompt.
        settings: the settings of the search.

    Returns:
        For each prompt the generated tokens, with the end token if there is one.

    Raises:
        ValueError: there is no prompt, or one is empty; the model has too few positions or too
            small a vocabulary; the model computes scores that are not finite.
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
        ("the end token is", settings.eos_token_ids),
    ):
        for token in ids:
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"{what} {token}, outside the vocabulary of {config.vocab_size}")
    if settings.beam > config.vocab_size:
        raise ValueError(f"beam {settings.beam} is more than the {config.vocab_size} tokens")


class _Search:
    """The beams of the prompts whose search is not over, and the best text of each prompt so far.

    A beam is closed when it has an end token or `eval_len` tokens.

    Attributes:
        sums: (prompts, beams), sums of log-probabilities; -inf for a closed beam.
        history: (prompts, beams, length), the generated tokens.
        best_score: (prompts,), the best score among closed beams.
        best_text, best_length: (prompts, eval_len) and (prompts,), the tokens with that score and
            their number.
        lengths: (prompts,), the lengths of the prompts.
        places: each prompt's index in the batch that was given.
        found: the best text so far of each prompt, by place; those of dropped prompts are final.
    """

    _PER_PROMPT = ("sums", "history", "best_score", "best_text", "best_length", "lengths")

    def __init__(
        self, model: GPT2LMModel, prompts: Sequence[Sequence[int]], settings: BeamSettings
    ):
        self.model, self.settings = model, settings
        weight = model.transformer.wte.weight
        device = weight.device
        count = len(prompts)
        self.ends = torch.tensor(settings.eos_token_ids, dtype=torch.int64, device=device)
        self.ids = [torch.tensor(prompt, device="cpu") for prompt in prompts]
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.places = list(range(count))
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.sums = torch.zeros(count, 1, dtype=wide, device=device)
        self.history = torch.zeros(count, 1, 0, dtype=torch.int64, device=device)
        self.best_score = torch.full((count,), _NEVER, dtype=torch.float64, device=device)
        self.best_text = torch.zeros(count, settings.eval_len, dtype=torch.int64, device=device)
        self.best_length = torch.zeros(count, dtype=torch.int64, device=device)
        self.cache = TreeCache(model.config.n_head, settings.beam)
        self.found: dict[int, list[int]] = {}

    def run(self) -> list[list[int]]:
        """Searches to the end, and returns the best text of each prompt."""
        logits = self._read_prompts()
        while True:
            self._grow(logits)
            self._close()
            if self._should_read():
                self._drop_finished()
            if not self.places:
                return [self.found[place] for place in range(len(self.found))]
            logits = self._read_last_tokens()

    def _read_prompts(self) -> Tensor:
        """Fills the cache; returns the logits after each prompt, (prompts, 1, vocabulary)."""
        ids = torch.nn.utils.rnn.pad_sequence(self.ids, batch_first=True).to(self.lengths.device)
        rows = PackedRows.from_lengths([len(prompt) for prompt in self.ids]).to(ids.device).routed()
        last = rows.first + self.lengths - 1
        reading = self.cache.reading(rows)
        hidden = self.model.transformer(rows.pack(ids), rows.positions, reading, last)
        return self.model.lm_head(hidden)[:, None]

    def _read_last_tokens(self) -> Tensor:
        """Returns the logits after each beam's last token, (prompts, beams, vocabulary)."""
        count, beams, length = self.history.shape
        if is_by_row():  # a prompt whose search is over has no tokens any more
            open_ones = {*self.places}
            note_tokens([beams if place in open_ones else 0 for place in range(len(self.ids))])
        positions = (self.lengths + length - 1).repeat_interleave(beams)
        growing = self.cache.growing()
        hidden = self.model.transformer(self.history[..., -1].flatten(), positions, growing)
        return self.model.lm_head(hidden).unflatten(0, (count, beams))

    def _grow(self, logits: Tensor) -> None:
        """Extends each prompt's beams by one token, keeping the best of all continuations."""
        logits = logits.to(self.sums.dtype)
        penalize(logits, self.history, self.ends, self.settings)
        self.sums, parents, tokens = best_candidates(logits, self.sums, self.settings.beam)
        row = torch.arange(len(parents), device=parents.device)[:, None]
        self.history = torch.cat([self.history[row, parents], tokens[..., None]], dim=2)
        self.cache.follow(parents)

    def _close(self) -> None:
        """Closes the beams that have ended; keeps the best of them if it beats the best so far."""
        length, settings = self.history.shape[2], self.settings
        closed = torch.isin(self.history[..., -1], self.ends)
        if length == settings.eval_len:
            closed.fill_(True)
        score = self._score(self.sums, length)
        score, beam = score.masked_fill(~closed, _NEVER).max(dim=1)
        # NaN is kept, because `_drop_finished` reports it.
        better = (score > self.best_score) | score.isnan()
        text = self.history[torch.arange(len(beam), device=beam.device), beam]
        self.best_score = torch.where(better, score, self.best_score)
        self.best_length.masked_fill_(better, length)
        self.best_text[:, :length] = torch.where(better[:, None], text, self.best_text[:, :length])
        self.sums.masked_fill_(closed, _NEVER)

    def _score(self, sums: Tensor, length: int) -> Tensor:
        """Returns the scores of texts of this length, see `BeamSettings.length_penalty`."""
        # A power of integers may be larger than any that PyTorch takes.
        return sums.double() / float(length) ** self.settings.length_penalty

    def _should_read(self) -> bool:
        """Returns whether to find out now which searches are over; the CPU waits for the device.

        On a GPU, this is done only where the CPU has to wait anyway. Until then, a search that is
        over goes on computing, which does not change its result.
        """
        is_last = self.history.shape[2] == self.settings.eval_len
        return is_last or self.cache.is_full or self.lengths.device.type == "cpu"

    def _drop_finished(self) -> None:
        """Drops finished prompts from the batch if that is worth copying the cache."""
        length, settings = self.history.shape[2], self.settings
        reached = settings.eval_len if settings.length_penalty >= 0 else length + 1
        hope = self._score(self.sums.amax(dim=1), reached)
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
        if any(over):  # else the CPU need not wait for texts
            self._store_best()
        rows = [row for row in range(count) if not over[row]]
        self.places = [self.places[row] for row in rows]
        kept = torch.tensor(rows, dtype=torch.int64, device=self.lengths.device)
        for name in self._PER_PROMPT:
            setattr(self, name, getattr(self, name)[kept])
        if len(kept):
            self.cache.keep(kept)

    def _store_best(self) -> None:
        """Copies the best texts so far into `found`."""
        texts, lengths = self.best_text.tolist(), self.best_length.tolist()
        for place, text, length in zip(self.places, texts, lengths, strict=True):
            self.found[place] = text[:length]


class TreeCache:
    """The keys and values of the prompts' trees, as drawn in the module's docstring.

    Args:
        heads: number of attention heads.
        beams: beams per prompt.

    Attributes:
        keys, values: for each layer (prompts, slots, n); slots beyond those of `seen` are free.
        seen: (prompts, beams, slots), which slots each beam sees; one row for all beams after
            `reading`.
    """

    # A new cache has free slots for this many steps.
    ROOM = 8

    def __init__(self, heads: int, beams: int):
        self.heads, self.beams = heads, beams
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.seen: Tensor

    @property
    def is_full(self) -> bool:
        """Whether the cache has no free slots for another step."""
        return self.seen.shape[2] + self.beams > self.keys[0].shape[1]

    def reading(self, rows: PackedRows) -> Attend:
        """Returns the attention within prompts, which writes their keys and values to the cache."""
        self.seen = rows.is_token[:, None]

        def attend_and_hold(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            for held, part in ((self.keys, key), (self.values, value)):
                held.append(F.pad(rows.pad(part), (0, 0, 0, self.ROOM * self.beams)))
            return attend(query, key, value, rows, self.heads, causal=True)

        return attend_and_hold

    def follow(self, parents: Tensor) -> None:
        """Makes beam i a descendant of beam parents[:, i]; parents is (prompts, beams)."""
        row = torch.arange(len(parents), device=parents.device)[:, None]
        self.seen = self.seen[row, parents]

    def growing(self) -> Attend:
        """Returns the attention for one new token per beam, which fills the next free slots.

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
        """Returns (prompts, 1, beams, slots): 0 for a slot that a beam sees, else -inf.

        PyTorch would compute the same from `seen` in every layer. Rows are aligned as its GPU
        kernels need them.
        """
        width = -(-slots // _ALIGNED) * _ALIGNED
        mask = self.keys[0].new_zeros(*self.seen.shape[:2], width)[..., :slots]
        return mask.masked_fill_(~self.seen, _NEVER)[:, None]

    def keep(self, prompts: Tensor) -> None:
        """Copies the slots that beams of these prompts see to a new cache, and adds free slots.

        Args:
            prompts: (kept,), the indices of the prompts to keep, at least one.
        """
        seen = self.seen[prompts]
        alive = seen.any(dim=1)
        count = int(alive.sum(dim=1).max())
        slots = alive.int().argsort(dim=1, descending=True, stable=True)[:, :count]
        self.seen = seen.gather(2, slots[:, None].expand(-1, seen.shape[1], -1))
        # Free slots hold copies of a used one, because even masked values must be finite.
        source = prompts[:, None] * self.keys[0].shape[1] + slots
        source = F.pad(source, (0, self.ROOM * self.beams))
        for held in (self.keys, self.values):
            for layer, old in enumerate(held):
                new = old.flatten(0, 1).index_select(0, source.flatten())
                held[layer] = new.unflatten(0, source.shape)


def penalize(logits: Tensor, history: Tensor, ends: Tensor, settings: BeamSettings) -> None:
    """Applies the repetition penalty, and sets logits of forbidden tokens to -inf, in place.

    Args:
        logits: (prompts, beams, vocabulary).
        history: (prompts, beams, length), the tokens generated so far.
        ends: (k,), the end tokens.
        settings: the settings of the search.
    """
    length, size = history.shape[2], settings.no_repeat_ngram_size
    if settings.repetition_penalty != 1:
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


# `best_candidates` first takes the maxima of blocks of this many tokens. (GPT-2's vocabulary and 10
# beams are half a million candidates.)
_BLOCK = 64


def best_candidates(logits: Tensor, sums: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the candidates with the largest sums + log_softmax(logits), for each prompt.

    The best `count` candidates lie in the `count` blocks with the largest maxima. Only the largest
    probability of the softmax is used: log Σ exp(logits) = max(logits) - log max(softmax).

    Args:
        logits: (prompts, beams, vocabulary), float32 or wider.
        sums: (prompts, beams), each beam's sum of log-probabilities.
        count: the number of candidates per prompt, at most the vocabulary's size.

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


# Rows per softmax on a CPU. The C library returns larger blocks of memory to the system, and has to
# request them again in each step.
_ROWS_AT_ONCE = 16


def _largest_probability(logits: Tensor) -> Tensor:
    """Returns the maximum of softmax(logits), (prompts, beams, 1)."""
    rows = logits.flatten(0, 1)
    parts = rows.split(_ROWS_AT_ONCE) if rows.device.type == "cpu" else [rows]
    largest = torch.cat([part.softmax(dim=1).amax(dim=1) for part in parts])
    return largest.view(*logits.shape[:2], 1)


def _block_maxima(logits: Tensor) -> Tensor:
    """Returns the maxima of blocks of `_BLOCK` tokens, (prompts, beams, blocks)."""
    blocks, rest = divmod(logits.shape[2], _BLOCK)
    whole = logits[..., : blocks * _BLOCK].unflatten(2, (blocks, _BLOCK)).amax(dim=3)
    if not rest:
        return whole
    return torch.cat([whole, logits[..., -rest:].amax(dim=2, keepdim=True)], dim=2)
