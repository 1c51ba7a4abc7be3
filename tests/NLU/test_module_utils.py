"""Parameter counts, device and dtype of models, and upstream's functions for attention masks."""

import make_plain_fixture as maker
import pytest
import torch

FAMILIES = tuple(maker.FAMILIES)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_of_parameters(family):
    model = maker.build(family, "mlm")
    numbers = {name: p.numel() for name, p in model.named_parameters()}
    embeddings = sum(n for name, n in numbers.items() if "embeddings.weight" in name)
    assert embeddings > 32 * 48
    every = sum(numbers.values())
    assert model.num_parameters() == every
    assert model.num_parameters(exclude_embeddings=True) == every - embeddings
    model.base_model.requires_grad_(False)
    head = sum(n for name, n in numbers.items() if name.startswith(("lm_head", "cls")))
    assert model.num_parameters(only_trainable=True) == head


@pytest.mark.parametrize("family", FAMILIES)
def test_device_and_dtype_of_a_model(family):
    model = maker.build(family, "classifier")
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    moved = maker.build(family, "classifier").to("meta", torch.bfloat16)
    assert (moved.device, moved.dtype) == (torch.device("meta"), torch.bfloat16)


def test_masks_that_are_added_to_scores():
    model = maker.build("roberta", "backbone")
    hidden = -10_000 * torch.tensor([[0, 0, 1], [0, 1, 1]])
    ours = model.get_extended_attention_mask(MASK, MASK.shape, model.device)
    assert torch.equal(ours, hidden[:, None, None].float())
    pairs = torch.eye(3).expand(2, 3, 3)
    ours = model.get_extended_attention_mask(pairs, MASK.shape)
    assert torch.equal(ours, (-10_000 * (1 - pairs))[:, None])
    assert torch.equal(model.invert_attention_mask(MASK), 1e5 * hidden[:, None, None].float())
    assert model.half().get_extended_attention_mask(MASK).dtype == torch.float16
    assert torch.equal(model.invert_attention_mask(MASK), hidden[:, None, None].half())
    model.config.is_decoder = True
    later = torch.ones(3, 3).triu(1).bool()
    ours = model.get_extended_attention_mask(MASK)
    assert torch.equal(ours != 0, (hidden[:, None, None] != 0) | later)
    with pytest.raises(ValueError, match=r"\(batch, queries, keys\), not \(3,\)"):
        model.get_extended_attention_mask(MASK[0])


def test_masks_of_heads():
    model = maker.build("roberta", "backbone")
    assert model.get_head_mask(None, 3) == [None] * 3
    heads = torch.tensor([1.0, 0.0, 2.0])
    masks = model.get_head_mask(heads, 2)
    assert masks.shape == (2, 1, 3, 1, 1)
    assert torch.equal(masks.flatten(), heads.repeat(2))
    assert torch.equal(model.get_head_mask(masks, 2), masks)
    assert model.get_head_mask(heads.repeat(2, 1), 2, True).shape == (2, 1, 3, 1, 1, 1)
    with pytest.raises(ValueError, match=r"head_mask is \(3, 3\).* of 2 layers"):
        model.get_head_mask(torch.ones(3, 3), 2)
