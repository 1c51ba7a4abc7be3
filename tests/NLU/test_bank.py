"""Each adapter of a bank gives its own model's logits, in mixed batches too.

Models are in float64, so that logits are equal up to their last digits.
"""

import copy
import importlib
import threading
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from compare import assert_close_to_rounding, rounding
from covering import covering
from encoder_options import ENCODER_TERMS

import loralib as lora
from loralib.adapters.adapter import Adapter
from loralib.adapters.fingerprint import fingerprint
from loralib.errors import CheckpointError
from loralib.nn import packing
from loralib.nn.fast_paths import fast_paths_off
from loralib.nn.packing import PackedRows
from loralib.nn.routing import Routing
from transformers.adaptation_settings import LORA_TARGETS

pytestmark = pytest.mark.slow

DEBERTA = importlib.import_module("transformers.models.deberta_v2.attention_deberta_v2")
FAMILIES = ("roberta", "deberta")
ALL = tuple(LORA_TARGETS)


@dataclass(frozen=True)
class Trained:
    """How an adapter was trained."""

    seed: int
    rank: int
    alpha: float
    labels: int
    targets: tuple[str, ...] = ("query", "value")
    positions: bool = False  # whether LoRA reaches positions, if DeBERTa shares projections


TRAINED = {
    "a": Trained(1, rank=2, alpha=6, labels=2),
    "b": Trained(2, rank=5, alpha=3, labels=4, targets=("query", "key"), positions=True),
    "c": Trained(3, rank=1, alpha=2, labels=3, targets=ALL),
    "d": Trained(4, rank=3, alpha=4, labels=1, targets=("key", "intermediate"), positions=True),
    "e": Trained(5, rank=4, alpha=5, labels=3, targets=("attention_output", "output")),
}
# The adapters of a batch's rows.
MIXES = ["a", "aaa", "ba", "bacb", "abcde", "eedaae", "dcccbad"]
LENGTHS = (9, 3, 1, 12, 7, 2, 5)
# Other configurations of DeBERTa.
VARIANTS = {
    "own projections of distances": {"share_att_key": False},
    "c2p alone": {"pos_att_type": "c2p", "conv_kernel_size": 0},
    "p2c alone": {"pos_att_type": "p2c", "norm_rel_ebd": "none"},
    "no distances": {"relative_attention": False, "position_biased_input": True},
}


class Task:
    """A base and the adapters that were trained on it.

    Args:
        make: the fixture `make_classifier`.
        family: "roberta" or "deberta".
        dtype: of all models.
        settings: of the base.
    """

    def __init__(self, make, family, dtype=torch.float64, **settings):
        settings = {"pad_token_id": 1, **settings}
        self.make = lambda **given: make(family, **settings, **given).to(dtype)
        self.family, self.base = family, self.make(num_labels=3)

    def lora(self, trained):
        """A model with this LoRA, the base's weights, and newly initialized LoRA weights."""
        switches = {"apply_lora": True, "lora_r": trained.rank, "lora_alpha": trained.alpha}
        if self.family == "deberta":
            switches["lora_positions"] = trained.positions
        model = self.make(num_labels=trained.labels, lora_targets=list(trained.targets), **switches)
        own, base = model.state_dict(), self.base.state_dict()
        model.load_state_dict(
            {**own, **{n: t for n, t in base.items() if n.startswith(self.family)}}
        )
        return model

    def adapter(self, name):
        trained = TRAINED[name]
        model, generator = self.lora(trained), torch.Generator().manual_seed(trained.seed)
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name or not parameter_name.startswith(self.family):
                parameter.data.normal_(std=0.3, generator=generator)
        return replace(model.adapter(), source=f"{name}.safetensors")

    def model(self, name):
        """A model that was built for one adapter, which is loaded into it."""
        model = self.lora(TRAINED[name])
        model.load_adapters([self.adapter(name)])
        return model

    def bank(self, names="abcde"):
        bank = lora.AdapterBank(self.base)
        for name in names:
            bank.add(name, self.adapter(name))
        return bank


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def task(make_classifier, family):
    return Task(make_classifier, family)


PATHS = ("rows", "padded", "holes", "left")


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """The path of attention, or padding that not every path takes: "holes" and "left"."""
    cheap = request.param != "rows"
    monkeypatch.setattr(DEBERTA, "padding_is_cheap", lambda *_: cheap)
    monkeypatch.setattr(packing, "padding_is_cheap", lambda *_: cheap)
    return request.param


def make_batch(rows, path="padded"):
    """Rows of different lengths, padded to more than the longest."""
    mask = (torch.arange(14) < torch.tensor(LENGTHS[:rows])[:, None]).long()
    if path == "holes":
        mask[:, 2] = 0
        mask[0, 5:7] = 0
    if path == "left":
        mask = mask.flip(1)
    ids = torch.randint(5, 60, mask.shape, generator=torch.Generator().manual_seed(rows))
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}


def close(ours, theirs):
    assert_close_to_rounding(ours, theirs, ENCODER_TERMS, theirs.dtype)


def close_in_half(ours, theirs, tolerance):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, check_dtype=False)


def close_to_rows(mixed, rows, close=close):
    assert mixed.shape == (len(rows), max(len(row) for row in rows))
    for ours, theirs in zip(mixed, rows, strict=True):
        close(ours[: len(theirs)], theirs)
        assert (ours[len(theirs) :] == float("-inf")).all()


def row_by_row(bank, model, names, batch):
    """Each row's logits, from a forward of the whole batch with the adapter that it names."""
    logits = {}
    for name in set(names):
        with bank.use(name):
            logits[name] = model(**batch).logits
    return [logits[name][row] for row, name in enumerate(names)]


def mixed_logits(bank, model, names, batch):
    with bank.use(list(names)):
        return model(**batch).logits


# ---- one adapter ----


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "family", "path"), covering(TRAINED, FAMILIES, PATHS), indirect=["family", "path"]
)
def test_one_adapter_gives_its_own_model_s_logits(task, name, path):
    """On DeBERTa, whether LoRA reaches positions or not."""
    bank, batch = task.bank(name), make_batch(4, path)
    with bank.use(name):
        ours = task.base(**batch).logits
    close(ours, task.model(name)(**batch).logits)
    assert ours.shape == (4, TRAINED[name].labels)


@torch.no_grad()
@pytest.mark.parametrize("target", ALL)
def test_every_target_alone_gives_its_own_model_s_logits(task, target, monkeypatch):
    """Without a head, only its deltas make the logits differ from the base's."""
    trained = Trained(6, rank=3, alpha=9, labels=3, targets=(target,))
    monkeypatch.setitem(TRAINED, "one", trained)
    adapter, batch = task.adapter("one"), make_batch(4)
    lora_tensors = {n: t for n, t in adapter.tensors.items() if "lora_" in n}
    bank = lora.AdapterBank(task.base)
    bank.add("one", Adapter(lora_tensors, adapter.metadata))
    with bank.use("one"):
        ours = task.base(**batch).logits
    model = task.model("one")
    head = {n: t for n, t in task.base.state_dict().items() if not n.startswith(task.family)}
    model.load_state_dict(head, strict=False)
    close(ours, model(**batch).logits)
    assert (ours - task.base(**batch).logits).abs().max() > 1e-2
    assert bank.labels("one") == ()


def test_heads_are_whole_modules(task):
    loaded = task.bank("a")._adapters["a"]
    expected = {"classifier"} if task.family == "roberta" else {"classifier", "pooler"}
    assert loaded.heads.keys() == expected
    assert not any(p.requires_grad for head in loaded.heads.values() for p in head.parameters())


# ---- mixed batches ----


@torch.no_grad()
@pytest.mark.parametrize(
    ("names", "family", "path"), covering(MIXES, FAMILIES, PATHS), indirect=["family", "path"]
)
def test_a_mixed_batch_gives_each_row_the_logits_of_its_adapter(task, names, path):
    bank, batch = task.bank(), make_batch(len(names), path)
    expected = row_by_row(bank, task.base, names, batch)
    close_to_rows(mixed_logits(bank, task.base, names, batch), expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("names", "variant", "path"),
    covering(["ba", "abcde", "dcccbad"], VARIANTS, PATHS),
    indirect=["path"],
)
def test_mixed_batches_in_all_configurations_of_deberta(make_classifier, variant, names, path):
    task = Task(make_classifier, "deberta", **VARIANTS[variant])
    bank, batch = task.bank(), make_batch(len(names), path)
    expected = row_by_row(bank, task.base, names, batch)
    close_to_rows(mixed_logits(bank, task.base, names, batch), expected)


@pytest.mark.parametrize("variant", [{}, *VARIANTS.values()], ids=["shared", *VARIANTS])
def test_gradients_of_a_mixed_batch_are_the_plain_paths(make_classifier, variant):
    """Each segment projects the distances with its own adapter."""
    task = Task(make_classifier, "deberta", **variant)
    bank, batch, found = task.bank(), make_batch(5), []
    embeddings = task.base.base_model.embeddings.word_embeddings.weight
    for is_off in (True, False):
        with fast_paths_off(is_off), bank.use(list("bacbd")):
            states = task.base.base_model(**batch).last_hidden_state
        (grad,) = torch.autograd.grad(states.square().sum(), embeddings)
        found.append((states, grad))
    for theirs, ours in zip(*found, strict=True):
        close(ours, theirs)


@torch.no_grad()
def test_mixed_batches_in_bfloat16(make_classifier, family, path):
    names = "eedaae"
    task = Task(make_classifier, family, torch.float32)
    bank, batch = task.bank(), make_batch(len(names), path)
    exact = row_by_row(bank, task.base, names, batch)
    close_to_rows(mixed_logits(bank, task.base, names, batch), exact)
    with torch.autocast("cpu", torch.bfloat16):
        expected = row_by_row(bank, task.base, names, batch)
        mixed = mixed_logits(bank, task.base, names, batch)
    close_to_rows(mixed, expected, partial(close_in_half, tolerance=0.1))
    close_to_rows(mixed, exact, partial(close_in_half, tolerance=0.25))


@torch.no_grad()
def test_hidden_states_of_mixed_batches(task, path):
    names = "dcccbad"
    bank, batch = task.bank(), make_batch(len(names), path)
    with bank.use(list(names)):
        mixed = task.base(**batch, output_hidden_states=True)
    for row, name in enumerate(names):
        with bank.use(name):
            single = task.base(**batch, output_hidden_states=True)
        for ours, theirs in zip(mixed.hidden_states, single.hidden_states, strict=True):
            close(ours[row], theirs[row])
    close_to_rows(mixed.logits, row_by_row(bank, task.base, names, batch))


@torch.no_grad()
def test_a_mixed_batch_with_as_many_tokens_as_rows(task):
    bank, ids = task.bank("ab"), torch.tensor([[2], [7], [9]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = row_by_row(bank, task.base, "abb", batch)
    close_to_rows(mixed_logits(bank, task.base, "abb", batch), expected)


@torch.no_grad()
def test_a_mixed_batch_with_as_many_tokens_as_distances(make_classifier):
    """The 2 · 3 - 1 distances are not mistaken for tokens."""
    task = Task(make_classifier, "deberta")
    bank, ids = task.bank("ab"), torch.tensor([[2, 7, 9], [2, 8, 1]])
    batch = {"input_ids": ids, "attention_mask": (ids != 1).long()}
    expected = row_by_row(bank, task.base, "ab", batch)
    close_to_rows(mixed_logits(bank, task.base, "ab", batch), expected)


@torch.no_grad()
def test_these_checks_notice_swapped_segments(task, monkeypatch):
    bank, batch, names = task.bank(), make_batch(4), "aabb"
    expected, parts = row_by_row(bank, task.base, names, batch), Routing.parts
    monkeypatch.setattr(Routing, "parts", lambda *given: parts(*given)[::-1])
    with pytest.raises(AssertionError):
        close_to_rows(mixed_logits(bank, task.base, names, batch), expected)


@torch.no_grad()
def test_these_checks_notice_another_adapter_s_distances(make_classifier, monkeypatch):
    task = Task(make_classifier, "deberta")
    bank, batch, names = task.bank(), make_batch(4), "aabb"
    expected, each = row_by_row(bank, task.base, names, batch), DEBERTA.for_each_segment
    monkeypatch.setattr(DEBERTA, "for_each_segment", lambda *given: each(*given)[::-1])
    with pytest.raises(AssertionError):
        close_to_rows(mixed_logits(bank, task.base, names, batch), expected)


def test_an_adapter_has_to_record_whether_it_reaches_positions(make_classifier):
    task = Task(make_classifier, "deberta")
    adapter = task.adapter("a")
    unrecorded = replace(adapter, metadata=replace(adapter.metadata, positions=None))
    with pytest.raises(CheckpointError, match=r"^a.safetensors: .*lora_positions"):
        lora.AdapterBank(task.base).add("a", unrecorded)
    # Without shared projections, there is nothing to record.
    lora.AdapterBank(Task(make_classifier, "deberta", share_att_key=False).base).add(
        "a", unrecorded
    )


@torch.no_grad()
def test_a_mixed_batch_multiplies_by_the_base_once(make_classifier):
    """The projection of distances, too: only the deltas are computed per adapter."""
    task = Task(make_classifier, "deberta")
    bank, batch, calls = task.bank(), make_batch(5), []
    for module in task.base.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, *_: calls.append(module))

    def count(names):
        calls.clear()
        with bank.use(names):
            task.base(**batch)
        return len(calls)

    assert count(list("abcde")) == count("a") > 10


# ---- packed rows ----


def test_a_part_of_packed_rows_is_these_rows_packed():
    mask = make_batch(5, "holes")["attention_mask"]
    rows = PackedRows(mask)
    assert rows.segments == (slice(0, 5),)
    for run in (slice(0, 2), slice(2, 3), slice(1, 5)):
        part, alone = rows.part(run), PackedRows(mask[run])
        assert (part.lengths, part.shape, part.segments) == (
            alone.lengths,
            alone.shape,
            alone.segments,
        )
        assert torch.equal(part.index, alone.index)
        assert torch.equal(part.first, alone.first)
    assert rows.lengths == mask.sum(1).tolist()


def test_segments_of_packed_rows(task):
    bank, mask = task.bank("ab"), make_batch(4)["attention_mask"]
    with bank.use(["a", "a", "b", "a"]):
        rows = PackedRows(mask)
        assert rows.segments == (slice(0, 4),)
        assert rows.routed().segments == (slice(0, 2), slice(2, 3), slice(3, 4))
    for names in ("a", ["a"] * 4):
        with bank.use(names):
            assert rows.routed().segments == (slice(0, 4),)
    wrong = pytest.raises(ValueError, match=r"^the batch has 4 rows, but adapters are given for 3$")
    with wrong, bank.use(["a", "b", "a"]):
        rows.routed()


# ---- the base, and what is refused ----


@torch.no_grad()
def test_the_base_stays_as_it_is(task):
    model, batch = task.base, make_batch(4)
    before, state = model(**batch).logits, copy.deepcopy(model.state_dict())
    bank = task.bank()
    for names in ("a", list("abcd")):
        with bank.use(names):
            assert model(**batch).logits.shape[1] == (2 if names == "a" else 4)
        assert torch.equal(model(**batch).logits, before)
    wrong = pytest.raises(ValueError, match="the batch has 4 rows, but adapters are given for 2")
    with wrong, bank.use(["a", "b"]):
        model(**batch)
    assert torch.equal(model(**batch).logits, before)
    bank.close()
    assert torch.equal(model(**batch).logits, before)
    assert not any(module._forward_hooks for module in model.modules())
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


@torch.no_grad()
def test_threads_use_different_adapters_at_once(task):
    bank, batch = task.bank("abd"), make_batch(3)
    jobs = ["a", ["b", "a", "d"], ["d", "d", "b"]]

    def compute(names):
        with torch.no_grad(), bank.use(names):
            return task.base(**batch).logits

    expected, barrier, wrong = [compute(names) for names in jobs], threading.Barrier(3), []

    def work(number):
        for _ in range(10):
            barrier.wait(timeout=30)
            found, right = compute(jobs[number]), expected[number]
            if not torch.allclose(found, right, rtol=0, atol=rounding(right, ENCODER_TERMS)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not barrier.broken
    assert not wrong


def test_an_adapter_of_another_base_or_family_is_refused(task, make_classifier):
    bank = task.bank("a")
    other = Task(make_classifier, FAMILIES[task.family == "roberta"])
    with pytest.raises(CheckpointError, match=r"^a\.safetensors: the model has no (de|ro)berta\."):
        bank.add("other", other.adapter("a"))
    wide = Task(make_classifier, task.family, hidden_size=40)
    with pytest.raises(CheckpointError, match=r"\(40, 40\).*\(32, 32\): a base of another size"):
        bank.add("wide", wide.adapter("a"))
    adapter, own = task.adapter("a"), fingerprint(task.base.state_dict())
    known = replace(adapter, metadata=replace(adapter.metadata, base_fingerprint="feed" * 4))
    with pytest.raises(CheckpointError, match=f"fingerprint feedfeedfeedfeed.*{own}"):
        bank.add("other", known)
    assert bank.names == ("a",)


def test_an_adapter_that_was_trained_with_another_is_refused(make_classifier, family):
    task = Task(make_classifier, family)
    bank = lora.AdapterBank(task.base)
    model = make_classifier(family, apply_lora=True, lora_r=2, lora_alpha=4, apply_bitfit=True)
    with pytest.raises(CheckpointError, match=r"trained with apply_bitfit as well; merge it"):
        bank.add("both", model.adapter())
    assert not any(module._forward_hooks for module in task.base.modules())
