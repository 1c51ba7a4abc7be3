"""Tests beam search against a plain search, which has no cache and never ends early."""

import dataclasses
import itertools
import math
import random

import pytest
import torch
from compare import assert_close_to_rounding
from covering import covering

import beam
import loralib as lora
from beam import BeamSettings, TreeCache, best_candidates, penalize, search
from loralib.adapters.saving import adapter_of
from model import GPT2Config, GPT2LMModel

WORDS = 28
STOP, BLANK = 28, 29
CONFIG = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=30, n_positions=40)
PROMPTS = [[3, 9], [5], [1, 20, 7, 7, 12, 4, 26], [17, 2, 2, 8], [11]]


def toy_sentences(count: int, length: int) -> torch.Tensor:
    """Draws rows of sentences: words have three likely successors each, and some end a sentence."""
    draw = random.Random(5)
    follow = [draw.sample(range(WORDS), k=3) for _ in range(WORDS)]

    def following(word: int) -> int:
        if word >= WORDS or draw.random() < 0.03:
            return draw.randrange(WORDS)
        options = [*follow[word], STOP, BLANK]
        weights = [60, 25, 15, 2, 2]
        if word % 6 == 0:
            weights = [6, 3, 1, 80, 10] if word % 12 else [6, 3, 1, 10, 80]
        return draw.choices(options, weights)[0]

    rows = []
    for _ in range(count):
        row = [draw.randrange(WORDS)]
        while len(row) < length:
            row.append(following(row[-1]))
        rows.append(row)
    return torch.tensor(rows)


@pytest.fixture(scope="module")
def model():
    """A model trained for a second or two, so that some continuations are far likelier than others.

    It is in float64, where rounding cannot change their order.
    """
    torch.manual_seed(0)
    model = GPT2LMModel(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    sentences = toy_sentences(16 * 70, 20)
    for batch in sentences.split(16):
        targets = batch[:, 1:]
        loss = model(batch[:, :-1], targets, torch.ones(targets.shape))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 2  # log of the vocabulary is 3.4
    return model.double().eval()


def random_model(seed: int, vocab_size: int) -> GPT2LMModel:
    torch.manual_seed(seed)
    # In a second layer, what a token attends to in the first one changes the scores after it.
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=vocab_size, n_positions=32)
    model = GPT2LMModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.25)
    return model


# ------------------------------------------------------------------------------------------------
# The plain search
# ------------------------------------------------------------------------------------------------


def may_follow(text: list[int], token: int, settings: BeamSettings) -> bool:
    if token in settings.eos_token_ids and len(text) < settings.min_length:
        return False
    size, longer = settings.no_repeat_ngram_size, [*text, token]
    ngrams = [longer[i : i + size] for i in range(len(longer) - size + 1)]
    return not (size and len(longer) >= size and ngrams[-1] in ngrams[:-1])


def log_probabilities(logits: list[float], text: list[int], settings: BeamSettings) -> list[float]:
    """Returns each token's log-probability after a text; -inf for one that may not follow it."""
    logits = list(logits)
    for token in set(text):
        penalty = settings.repetition_penalty
        logits[token] *= 1 / penalty if logits[token] > 0 else penalty
    for token in range(len(logits)):
        if not may_follow(text, token, settings):
            logits[token] = -math.inf
    total = math.log(sum(math.exp(logit) for logit in logits))
    return [logit - total for logit in logits]


@torch.no_grad()
def texts_of(model, prompt: list[int], settings: BeamSettings) -> list[tuple[float, list[int]]]:
    """Returns all texts that compete, each with its sum of log-probabilities."""
    beams, ended = [(0.0, [])], []
    for _ in range(settings.eval_len):
        rows = model(torch.tensor([prompt + text for _, text in beams]))[:, -1].tolist()
        candidates = [
            (total + value, [*text, token])
            for (total, text), row in zip(beams, rows, strict=True)
            for token, value in enumerate(log_probabilities(row, text, settings))
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        best = candidates[: settings.beam]
        ended += [(total, text) for total, text in best if text[-1] in settings.eos_token_ids]
        beams = [(total, text) for total, text in best if text[-1] not in settings.eos_token_ids]
        if not beams:
            break
    return ended + beams


def best_of(texts: list[tuple[float, list[int]]], length_penalty: float) -> list[int]:
    return max(texts, key=lambda text: text[0] / len(text[1]) ** length_penalty)[1]


LENGTH_PENALTIES = (0, 0.8, 1.5, -1, 50)


def first_is_fast(*values):
    """Returns the values as parameters of a test, which is marked slow for all but the first."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.slow) for value in others)]


@pytest.mark.parametrize(
    ("beams", "ngram", "repetition", "min_length", "ends"),
    covering((5, 1, 10), (0, 2, 4), (1, 1.3), (0, 5), ((STOP, BLANK), (STOP,))),
)
def test_same_as_the_plain_search(model, beams, ngram, repetition, min_length, ends):
    settings = BeamSettings(beams, 12, 1, ngram, repetition, min_length, ends)
    prompts = PROMPTS[:3]
    texts = [texts_of(model, prompt, settings) for prompt in prompts]
    for length_penalty in LENGTH_PENALTIES:
        now = dataclasses.replace(settings, length_penalty=length_penalty)
        assert search(model, prompts, now) == [best_of(some, length_penalty) for some in texts]


@pytest.mark.parametrize("seed", [1, *first_is_fast(3, 0, 2, *range(4, 12))])
def test_same_as_the_plain_search_on_random_models_and_settings(seed):
    draw = random.Random(seed)
    model = random_model(seed, draw.choice([7, 20, 64, 130]))
    ends = tuple(draw.sample(range(model.config.vocab_size), draw.choice([0, 1, 3])))
    settings = BeamSettings(
        beam=draw.choice([2, 4, 7]),
        eval_len=draw.choice([1, 6, 18]),
        length_penalty=draw.uniform(-1, 2),
        no_repeat_ngram_size=draw.choice([0, 2, 3]),
        repetition_penalty=draw.choice([0.8, 1.2]),
        min_length=draw.choice([0, 2]),
        eos_token_ids=ends,
    )
    tokens = range(model.config.vocab_size)
    prompts = [draw.choices(tokens, k=draw.randint(1, 12)) for _ in range(5)]
    expected = [
        best_of(texts_of(model, prompt, settings), settings.length_penalty) for prompt in prompts
    ]
    assert search(model, prompts, settings) == expected


def test_every_setting_changes_some_text(model):
    """Otherwise the comparisons above would not test the settings. Texts end in every way, too."""
    lasts, lengths = set(), set()
    for one, other in (
        ({"beam": 5, "length_penalty": 0}, {"beam": 1}),
        ({"length_penalty": 0.8}, {"length_penalty": 1.5}),
        ({"length_penalty": 0.8}, {"length_penalty": -0.5}),
        ({"no_repeat_ngram_size": 0}, {"no_repeat_ngram_size": 2}),
        ({"repetition_penalty": 1}, {"repetition_penalty": 1.3}),
        ({"min_length": 0}, {"min_length": 5}),
        ({"length_penalty": 0}, {"eos_token_ids": (STOP, BLANK)}),
    ):
        first = BeamSettings(**{"beam": 5, "eval_len": 12, "eos_token_ids": (STOP,), **one})
        second = dataclasses.replace(first, **other)
        found = [search(model, PROMPTS, settings) for settings in (first, second)]
        assert found[0] != found[1]
        lasts |= {text[-1] for text in itertools.chain(*found)}
        lengths |= {len(text) for text in itertools.chain(*found)}
    assert {STOP, BLANK} < lasts
    assert len(lengths) > 2
    assert 12 in lengths


def test_one_beam_is_greedy_search(model):
    settings = BeamSettings(1, 20, 1, eos_token_ids=(STOP,))
    for prompt in PROMPTS:
        text = []
        while len(text) < 20 and STOP not in text:
            text.append(int(model(torch.tensor([prompt + text]))[0, -1].argmax()))
        assert search(model, [prompt], settings) == [text]


@pytest.mark.slow
@pytest.mark.parametrize("length_penalty", LENGTH_PENALTIES)
def test_a_batch_gives_the_same_texts_as_single_prompts(model, length_penalty):
    prompts = [[first, *prompt] for first in range(6) for prompt in PROMPTS]
    settings = BeamSettings(4, 25, length_penalty, 3, eos_token_ids=(STOP, BLANK))
    together = search(model, prompts, settings)
    assert together == [search(model, [prompt], settings)[0] for prompt in prompts]
    assert len({len(text) for text in together}) > 1


@pytest.mark.parametrize("prompts", [PROMPTS, [[3, 9, 5], [5]]])  # the latter: 4 tokens, 4 beams
@pytest.mark.parametrize("beams", [1, 2])
def test_prompts_may_have_different_adapters(prompts, beams):
    """Although rows of beams are not those of prompts, and some searches end before others."""
    model = random_model(seed=0, vocab_size=CONFIG.vocab_size)
    bank = lora.AdapterBank(model)
    for name in "ab":
        trained = GPT2LMModel(dataclasses.replace(model.config, lora_attn_dim=4)).double()
        trained.load_state_dict(model.state_dict(), strict=False)
        lora.mark_only_lora_as_trainable(trained)
        for block in trained.transformer.h:
            torch.nn.init.normal_(block.attn.c_attn.lora_B)
        bank.add(name, adapter_of(trained))
    settings = BeamSettings(beams, 8, length_penalty=-1, eos_token_ids=(BLANK,))
    names, alone = [*"abaab"[: len(prompts)]], {}
    for name in "ab":
        with bank.use(name):
            alone[name] = [search(model, [prompt], settings)[0] for prompt in prompts]
    with bank.use(names):
        mixed = search(model, prompts, settings)
    assert mixed == [alone[name][row] for row, name in enumerate(names)]
    assert mixed not in alone.values()
    assert len(mixed[0]) < len(mixed[1])


# ------------------------------------------------------------------------------------------------
# What is computed
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def rows_read(model):
    """A list of the number of tokens whose logits each step computes."""
    counts = []
    hook = model.lm_head.register_forward_hook(lambda _, __, logits: counts.append(len(logits)))
    yield counts
    hook.remove()


def test_all_steps_run_if_no_text_ends(model, rows_read):
    search(model, PROMPTS, BeamSettings(3, 12, eos_token_ids=()))
    assert rows_read == [len(PROMPTS), *[3 * len(PROMPTS)] * 11]


@pytest.mark.parametrize("length_penalty", [0, 0.8, -0.5])
def test_a_search_ends_when_no_beam_can_win(model, rows_read, length_penalty):
    settings = BeamSettings(3, 30, length_penalty, 3, eos_token_ids=(STOP, BLANK))
    search(model, PROMPTS, settings)
    steps, alone = len(rows_read), []
    assert steps < 30
    assert rows_read[1:] == sorted(rows_read[1:], reverse=True)
    for prompt in PROMPTS:
        rows_read.clear()
        search(model, [prompt], settings)
        alone.append(len(rows_read))
    assert max(alone) == steps
    assert min(alone) < steps


@pytest.mark.parametrize(
    ("length_penalty", "before", "ends", "after"),
    [(0.8, 0, 0.6, 1), (50, 10, 0.6, 1), (-0.5, 0, 0.4, STOP)],
)
def test_a_search_goes_on_while_a_beam_can_win(length_penalty, before, ends, after):
    """In one step, a text ends with a probability; the other text is better, but only later."""
    odds = iter([{1: 1.0}] * before + [{STOP: ends, 1: 1 - ends}] + [{after: 1.0}] * 11)

    def follow_the_odds(_, __, logits):
        logits.fill_(-math.inf)
        for token, probability in next(odds).items():
            logits[:, token] = math.log(probability)

    model = GPT2LMModel(CONFIG).eval()  # float32 holds no 12^50
    model.lm_head.register_forward_hook(follow_the_odds)
    (text,) = search(model, [[2]], BeamSettings(2, 12, length_penalty, eos_token_ids=(STOP,)))
    assert text == ([1] * 12 if after == 1 else [1, STOP])


def test_the_cache_is_copied_only_when_it_is_full(model, monkeypatch):
    copies = []
    keep = TreeCache.keep
    monkeypatch.setattr(
        TreeCache,
        "keep",
        lambda self, prompts: copies.append(prompts.tolist()) or keep(self, prompts),
    )
    search(model, PROMPTS, BeamSettings(3, 3 * TreeCache.ROOM + 1, eos_token_ids=()))
    assert copies == [[0, 1, 2, 3, 4]] * 2


def chains(prompts, history):
    """Yields the prompt's index, the beam's index and the tokens, prompt included, of each beam."""
    for row, beams in enumerate(history.tolist()):
        for column, text in enumerate(beams):
            yield row, column, prompts[row] + text


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3, 10])
def test_a_beam_sees_the_keys_of_its_own_tokens_and_no_others(model, monkeypatch, beams):
    """This holds through reorderings, copies and prompts that are dropped.

    Keys of the first layer depend only on a token and its position, so they identify it.
    """
    weights, block = model.transformer, model.transformer.h[0]
    copies, checked = [], 0

    def check(self) -> None:
        nonlocal checked
        prompts = [PROMPTS[place] for place in self.places]
        history = self.history[..., :-1]  # the last tokens have not been read
        for row, column, tokens in chains(prompts, history):
            seen = self.cache.seen[row, column]
            found = self.cache.keys[0][row, : len(seen)][seen]
            x = weights.wte(torch.tensor(tokens)) + weights.wpe(torch.arange(len(tokens)))
            keys = block.attn.c_attn(block.ln_1(x)).chunk(3, dim=-1)[1]
            assert_close_to_rounding(found, keys, CONFIG.n_embd, keys.dtype)
            checked += 1

    class Watched(beam._Search):
        def _drop_finished(self):
            check(self)
            super()._drop_finished()
            check(self)

    keep = TreeCache.keep

    def watched_keep(self, prompts):
        before = self.seen.shape[2]
        keep(self, prompts)
        assert self.seen.any(dim=1).all(dim=1).any()  # some prompt needs all slots
        copies.append((before, self.seen.shape[2]))

    monkeypatch.setattr(beam, "_Search", Watched)
    monkeypatch.setattr(TreeCache, "keep", watched_keep)
    search(model, PROMPTS, BeamSettings(beams, 30, 0.8, eos_token_ids=(STOP, BLANK)))
    assert checked > 20 * beams
    assert len(copies) > 2
    assert all(after <= before for before, after in copies)
    if beams > 1:
        assert any(after < before / 1.2 for before, after in copies)


# ------------------------------------------------------------------------------------------------
# Batches
# ------------------------------------------------------------------------------------------------

# Prompts of several lengths; some occur twice, but never next to each other.
MANY = [*PROMPTS, [3], [9, 9, 1, 4], *PROMPTS[::2], [0, 5, 21], PROMPTS[1], [26, 13]]
BATCH_SETTINGS = BeamSettings(4, 14, 0.8, 4, 1.0, 0, (STOP, BLANK))


def search_in_batches(model, settings, size):
    batches = (MANY[begin : begin + size] for begin in range(0, len(MANY), size))
    return [text for batch in batches for text in search(model, batch, settings)]


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("size", [3, 8, len(MANY)])
def test_the_batch_size_changes_no_text(model, beams, size, monkeypatch):
    settings = dataclasses.replace(BATCH_SETTINGS, beam=beams)
    alone = search_in_batches(model, settings, 1)
    # Most prompts have a text that no other has, so a mix-up of rows would be found.
    assert len({*map(tuple, alone)}) > len({*map(tuple, MANY)}) / 2
    assert all(alone[MANY.index(prompt)] == text for prompt, text in zip(MANY, alone, strict=True))
    assert search_in_batches(model, settings, size) == alone

    # If all rows got the first row's logits, the comparison would fail.
    read = beam._Search._read_prompts
    monkeypatch.setattr(
        beam._Search, "_read_prompts", lambda self: read(self)[:1].expand(len(self.ids), -1, -1)
    )
    assert search_in_batches(model, settings, 1) == alone
    assert search_in_batches(model, settings, size) != alone


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 8, len(MANY)])
@pytest.mark.parametrize("settings", [BATCH_SETTINGS, BeamSettings(5, 9, 1.0, 2, 1.3, 3, (STOP,))])
def test_the_batch_size_does_not_change_how_ties_are_broken(settings, size):
    """Logits are small integers and are computed exactly, so tokens with equal logits tie."""
    model = GPT2LMModel(CONFIG).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.ln_f.bias[0] = 1
        model.transformer.wte.weight[:, 0] = torch.arange(CONFIG.vocab_size) % 3
    logits = model(torch.tensor([[4, 2]]))[0, -1]
    assert [(logits == value).sum() for value in (0, 1, 2)] == [10, 10, 10]
    alone = search_in_batches(model, settings, 1)
    assert all(text == alone[0] for text in alone)
    assert search_in_batches(model, settings, size) == alone


# ------------------------------------------------------------------------------------------------
# Parts of a step
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [10, 63, 64, 65, 128, 1000, 1024])
@pytest.mark.parametrize("beams", [1, 4])
def test_best_candidates(vocabulary, beams):
    torch.manual_seed(vocabulary)
    logits = 3 * torch.randn(3, beams, vocabulary) + 40
    logits[0, :, 3:7] = float("-inf")
    sums = -4 * torch.rand(3, beams)
    if beams > 1:
        sums[1, 2] = float("-inf")
        logits[2, 0] = float("-inf")
    every = sums[..., None] + logits.log_softmax(dim=2).nan_to_num(nan=-math.inf, neginf=-math.inf)
    expected, index = every.flatten(1).topk(10)
    found, rows, tokens = best_candidates(logits, sums, 10)
    finite = expected.isfinite()
    assert_close_to_rounding(found, expected, terms=4, magnitude=50.0)  # of logits around 40
    assert finite.sum() >= 26
    assert torch.equal(rows[finite], (index // vocabulary)[finite])
    assert torch.equal(tokens[finite], (index % vocabulary)[finite])
    assert 0 <= tokens.min() <= tokens.max() < vocabulary


def test_candidates_with_equal_sums_are_distinct():
    found, rows, tokens = best_candidates(torch.zeros(1, 2, 200), torch.zeros(1, 2), 9)
    assert_close_to_rounding(found, torch.full((1, 9), -math.log(200)), 200)
    assert len(set(zip(rows[0].tolist(), tokens[0].tolist(), strict=True))) == 9


def test_repetition_penalty():
    logits = torch.tensor([[[2.0, -2.0, 3.0, -3.0, 0.0]]])
    history = torch.tensor([[[1, 0, 1, 4]]])
    penalize(logits, history, torch.tensor([3]), BeamSettings(repetition_penalty=2))
    assert logits.tolist() == [[[1, -4, 3, -3, 0]]]


@pytest.mark.parametrize(("length", "suppressed"), [(0, True), (2, True), (3, False)])
def test_no_end_token_before_min_length(length, suppressed):
    logits = torch.zeros(1, 1, 5)
    history = torch.zeros(1, 1, length, dtype=torch.int64)
    penalize(logits, history, torch.tensor([1, 3]), BeamSettings(min_length=3))
    assert logits.isneginf().nonzero()[:, 2].tolist() == ([1, 3] if suppressed else [])


@pytest.mark.parametrize(
    ("size", "text", "suppressed"),
    [
        (1, [], []),
        (1, [2, 0, 2], [0, 2]),
        (2, [1], []),
        (2, [1, 2, 1, 3, 1], [2, 3]),
        (2, [1, 1], [1]),
        (3, [1, 2], []),
        (3, [1, 2, 0, 4, 1, 2], [0]),
        (3, [1, 2, 0, 4, 2, 1], []),
        (0, [1, 1, 1], []),
    ],
)
def test_no_ngram_occurs_twice(size, text, suppressed):
    logits = torch.randn(1, 2, 5)
    others = [4, 3, 2, 1, 0, 1, 3][: len(text)]
    history = torch.tensor([[text, others]], dtype=torch.int64)
    before = logits.clone()
    penalize(logits, history, torch.tensor([4]), BeamSettings(no_repeat_ngram_size=size))
    assert logits[0, 0].isneginf().nonzero().flatten().tolist() == suppressed
    changed = logits != before
    assert bool(logits[changed].isneginf().all())


# ------------------------------------------------------------------------------------------------
# Precisions, devices, errors
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_precisions(model, dtype, monkeypatch):
    """Log-probabilities are computed and summed in float32 or wider."""
    added = []

    def watched(logits, sums, count):
        added.append((logits.dtype, sums.dtype))
        return best_candidates(logits, sums, count)

    settings = BeamSettings(4, 15, 0.8, 3, eos_token_ids=(STOP, BLANK))
    exact = search(model, PROMPTS, settings)
    other = GPT2LMModel(CONFIG).to(dtype)
    other.load_state_dict(model.state_dict())
    monkeypatch.setattr(beam, "best_candidates", watched)
    texts = search(other, PROMPTS, settings)
    wide = torch.promote_types(dtype, torch.float32)
    assert set(added) == {(wide, wide)}
    if dtype is not torch.bfloat16:
        assert texts == exact
    assert [text[0] for text in texts] == [text[0] for text in exact]


@pytest.mark.gpu
@pytest.mark.parametrize("beams", [1, 10])
def test_on_a_gpu(model, beams):
    settings = BeamSettings(beams, 25, 0.8, 3, 1.2, 2, (STOP, BLANK))
    there = GPT2LMModel(CONFIG).double().cuda()
    there.load_state_dict(model.state_dict())
    assert search(there, PROMPTS, settings) == search(model, PROMPTS, settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam": 0}, "beam must be at least 1"),
        ({"eval_len": 0}, "eval_len must be at least 1"),
        ({"min_length": -1}, "min_length must be at least 0"),
        ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size must be at least 0, not -2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be finite"),
        ({"length_penalty": math.nan}, r"length_penalty must lie in \[-50, 50\], not nan"),
        ({"length_penalty": 1000}, r"length_penalty must lie in \[-50, 50\], not 1000"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        BeamSettings(**settings)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "at least one token"),
        ([[1], []], {}, "at least one token"),
        ([[1, 30]], {}, "prompts have token 30, outside the vocabulary of 30"),
        ([[1, -1]], {}, "prompts have token -1, outside the vocabulary of 30"),
        ([[1]], {"eos_token_ids": (50256,)}, "end token is 50256, outside the vocabulary"),
        ([[1] * 31], {}, "31 tokens and 11 generated ones are more than.* 40 positions"),
        ([[1], [1] * 31], {}, "31 tokens and 11 generated ones"),
        ([[1]], {"beam": 31}, "beam 31 is more than the 30 tokens"),
    ],
)
def test_inputs_that_cannot_be_searched(model, prompts, settings, message):
    settings = BeamSettings(**{"eval_len": 11, "eos_token_ids": (STOP,), **settings})
    with pytest.raises(ValueError, match=message):
        search(model, prompts, settings)


def test_a_text_may_fill_all_positions_and_there_may_be_as_many_beams_as_tokens(model):
    settings = BeamSettings(CONFIG.vocab_size, 11, min_length=1, eos_token_ids=())
    assert len(search(model, [[1] * 30], settings)[0]) == 11


@pytest.mark.parametrize("eval_len", [1, 5])
def test_scores_that_are_not_finite_are_refused(eval_len):
    model = random_model(0, 20)
    with torch.no_grad():
        model.transformer.ln_f.weight[3] = math.inf
    with pytest.raises(ValueError, match="scores are not finite"):
        search(model, [[1, 2]], BeamSettings(2, eval_len, eos_token_ids=(3,)))
