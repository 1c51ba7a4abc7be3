"""Filling batches up with rows changes no result, and makes the row counts of products recur."""

import importlib

import pytest
import torch
from compare import assert_close_to_rounding
from encoder_options import NO_DROPOUT
from half_products import choose_processor
from multiplied_rows import MultipliedRows

from loralib.nn import row_buckets
from transformers import RobertaConfig, RobertaForMaskedLM

FAMILIES = ("roberta", "deberta")


def step(model, batch):
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss, "logits": output.logits, **gradients}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("adapted", [{}, {"apply_lora": True, "lora_r": 2, "lora_alpha": 4}])
@pytest.mark.parametrize("family", FAMILIES)
def test_added_rows_change_neither_losses_nor_gradients(
    make_classifier, batch, monkeypatch, family, adapted, recompute
):
    """In float64: nothing reads the added rows, so that only rounding may differ."""
    settings = {"num_labels": 3, "gradient_checkpointing": recompute, **adapted, **NO_DROPOUT}
    model = make_classifier(family, **settings).double().train()
    expected = step(model, batch)
    calls = []
    monkeypatch.setattr(row_buckets, "_largest_step", lambda x: calls.append(len(x)) or 64)
    tokens = int(batch["attention_mask"].sum())
    assert tokens % 2 ** (tokens.bit_length() - 4)  # the count is not a multiple, so rows are added
    ours = step(model, batch)
    assert calls == [tokens]
    assert ours.keys() == expected.keys()
    largest = max(tensor.abs().max().item() for tensor in expected.values())
    for name, tensor in expected.items():
        assert_close_to_rounding(ours[name], tensor, 1000, torch.float64, largest)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, 288), (torch.float32, 272)])
@pytest.mark.parametrize("family", FAMILIES)
def test_row_counts_of_all_layers_recur(make_classifier, monkeypatch, family, dtype, expected):
    choose_processor(monkeypatch, has_bfloat16=True, large=False)
    model = make_classifier(family, num_labels=3).eval()
    seen = []
    for tokens in (258, 271):
        ids = torch.randint(5, 30, (tokens // 10, 10))
        rest = tokens % 10
        mask = torch.ones_like(ids)
        if rest:
            ids, mask = (torch.cat([x, x[:1]]) for x in (ids, mask))
            mask[-1, rest:] = 0
        in_dtype = torch.autocast("cpu", dtype, dtype != torch.float32)
        with MultipliedRows() as rows, torch.no_grad(), in_dtype:
            model(ids, mask)
        seen.append({count for count in rows.seen if count >= 100})
    assert seen == [{expected}, {expected}]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_rows_are_added_if_hidden_states_are_returned(
    make_classifier, batch, monkeypatch, family
):
    encoder = importlib.import_module("transformers.modeling_encoder")
    monkeypatch.setattr(encoder, "with_filler_rows", None)
    del batch["labels"]
    output = make_classifier(family)(**batch, output_hidden_states=True)
    assert output.hidden_states[0].shape[:2] == batch["input_ids"].shape


def masked_lm_step(model, counts):
    """Loss, logits and gradients of rows of 20 tokens, with `counts` targets in each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 60, (len(counts), 20), generator=generator)
    behind = torch.arange(20) >= torch.tensor(counts)[:, None]
    return step(model, {"input_ids": ids, "labels": ids.masked_fill(behind, -100)})


@pytest.fixture
def masked_lm():
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    config = RobertaConfig(num_hidden_layers=1, vocab_size=60, **small, **NO_DROPOUT)
    return RobertaForMaskedLM(config).train()


def test_added_targets_change_neither_losses_nor_gradients(masked_lm, monkeypatch):
    model, counts = masked_lm.double(), [7, 10]
    expected = masked_lm_step(model, counts)
    assert expected["logits"].shape == (17, 60)
    monkeypatch.setattr(row_buckets, "_largest_step", lambda x: 64)
    ours = masked_lm_step(model, counts)
    largest = max(tensor.abs().max().item() for tensor in expected.values())
    for name, tensor in expected.items():
        assert_close_to_rounding(ours[name], tensor, 1000, torch.float64, largest)


def test_added_targets_are_finite_in_half_precision(masked_lm):
    """In float16, a norm would multiply rows of zeros by 1e-12 ** -0.5, which is infinite."""
    model = masked_lm.half()
    assert model.config.layer_norm_eps == 1e-12
    assert not model.lm_head.dense.bias.any()
    for name, tensor in masked_lm_step(model, [7, 10]).items():
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_added_tokens_are_finite_in_half_precision(make_classifier, family):
    ids = torch.randint(5, 30, (3, 15), generator=torch.Generator().manual_seed(0))
    model = make_classifier(family, num_labels=3, num_hidden_layers=2, layer_norm_eps=1e-12)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    found = step(model.half().train(), {"input_ids": ids, "labels": torch.tensor([0, 1, 2])})
    for name, tensor in found.items():
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, {288}), (torch.float32, {288, 272})]
)
def test_row_counts_of_targets_recur(masked_lm, monkeypatch, dtype, expected):
    choose_processor(monkeypatch, has_bfloat16=True, large=False)
    seen = []
    for last in (8, 20):  # 258 and 270 targets among 280 tokens
        with MultipliedRows() as rows, torch.autocast("cpu", dtype, dtype != torch.float32):
            masked_lm_step(masked_lm, [*[20] * 12, 10, last])
        seen.append({count for count in rows.seen if count > 100})
    assert seen == [expected] * 2


def test_row_counts_of_all_tokens_recur_at_the_head(masked_lm, monkeypatch):
    choose_processor(monkeypatch, has_bfloat16=True, large=False)
    seen = []
    for last in (3, 12):  # 143 and 152 tokens
        mask = (torch.arange(20) < torch.tensor([*[20] * 7, last])[:, None]).long()
        with MultipliedRows() as rows, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = masked_lm.eval()(torch.full_like(mask, 7), mask).logits
        assert logits.shape == (8, 20, 60)
        seen.append({count for count in rows.seen if count > 100})
    assert seen == [{144}, {160}]
