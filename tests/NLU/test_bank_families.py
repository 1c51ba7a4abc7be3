"""A bank checks that an adapter's base is its model, in families it does not know by name too."""

import pytest
import torch
from compare import assert_close_to_rounding
from encoder_options import ENCODER_TERMS

from loralib import AdapterBank
from loralib.adapters.families import in_known_backbone
from loralib.adapters.formats import read_adapter, write_adapter
from loralib.errors import CheckpointError
from transformers import RobertaConfig, RobertaModel, RobertaPreTrainedModel

SHAPE = {
    **{"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{
        "intermediate_size": 12,
        "max_position_embeddings": 12,
        "type_vocab_size": 1,
        "num_labels": 1,
    },
}
LORA = {"apply_lora": True, "lora_r": 2, "lora_alpha": 4}


class OwnForRegression(RobertaPreTrainedModel):
    base_model_prefix = "own"

    def __init__(self, config):
        super().__init__(config)
        self.own = RobertaModel(config, add_pooling_layer=False)
        self.score = torch.nn.Linear(config.hidden_size, 1)
        self.init_weights()

    def forward(self, input_ids):
        return self.score(self.own(input_ids).last_hidden_state[:, 0])


CLASSES = [OwnForRegression, RobertaModel]


@pytest.mark.parametrize("model_class", CLASSES)
def test_an_adapter_of_another_base_is_refused_in_an_unknown_family(tmp_path, model_class, caplog):
    for number in range(2):
        torch.manual_seed(number)
        model_class(RobertaConfig(**SHAPE)).save_pretrained(tmp_path / str(number))
    trained = model_class.from_pretrained(tmp_path / "0", **LORA)
    for name, parameter in trained.named_parameters():
        if "lora_" in name or name.startswith("score"):
            parameter.data.normal_()
    assert not any(in_known_backbone(name) for name in trained.state_dict())
    adapter = trained.adapter()
    lora = {name for name in adapter.tensors if "lora_" in name or name.startswith("score")}
    write_adapter(tmp_path / "own.safetensors", adapter)
    adapter = read_adapter(tmp_path / "own.safetensors")
    assert adapter.tensors.keys() == lora

    base, other = (model_class.from_pretrained(tmp_path / number) for number in "01")
    with pytest.raises(CheckpointError, match=r"own\.safetensors: was trained on another base"):
        AdapterBank(other).add("own", adapter)
    bank = AdapterBank(base)
    bank.add("own", adapter)
    ids = torch.tensor([[0, 5, 6, 2], [0, 7, 8, 2]])
    with torch.no_grad(), bank.use("own"):
        ours, theirs = base(ids), trained.eval()(ids)
    assert_close_to_rounding(ours[0], theirs[0], ENCODER_TERMS)
    assert not caplog.records
