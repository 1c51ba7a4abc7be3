"""PyTorch's dynamic quantization works on the models."""

import pytest
import torch

import transformers

SHAPE = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 12,
}
IDS = torch.tensor([[0, 5, 6, 2]])


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize("family", ["Roberta", "DebertaV2"])
def test_a_quantized_model_gives_nearly_the_same_outputs(family, head):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE, initializer_range=0.2)
    model = getattr(transformers, f"{family}For{head}")(config).eval()
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
    with torch.no_grad():
        expected, found = model(input_ids=IDS)[0], quantized(input_ids=IDS)[0]
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()
