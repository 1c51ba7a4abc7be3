"""A head that a user wrote for 4.4.2 on one of this package's backbones."""

import make_plain_fixture as maker
import pytest
import torch
from torch import nn

from transformers import (
    DebertaV2Model,
    DebertaV2PreTrainedModel,
    RobertaModel,
    RobertaPreTrainedModel,
)
from transformers.file_utils import ModelOutput
from transformers.models.deberta_v2.modeling_deberta_v2 import ContextPooler, StableDropout
from transformers.models.roberta.modeling_roberta import RobertaClassificationHead


class Scorer:
    """A score for each row: the mean over its tokens, projected. In the style of 4.4.2's heads."""

    def __init__(self, config):
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.backbone(config))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.score = nn.Linear(config.hidden_size, 1)
        self.init_weights()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        inputs_embeds=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        return_dict = return_dict if return_dict is not None else self.config.use_return_dict
        outputs = self.base_model(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
        )
        mask = attention_mask[..., None]
        scores = self.score(self.dropout((outputs[0] * mask).sum(1) / mask.sum(1)))
        if not return_dict:
            return (scores, *outputs[self.others :])
        return ModelOutput(scores=scores, attentions=outputs.attentions)


class RobertaScorer(Scorer, RobertaPreTrainedModel):
    others = 2  # states follow the pooler's place, whether there is a pooler or not

    def backbone(self, config):
        return RobertaModel(config, add_pooling_layer=False)


class DebertaScorer(Scorer, DebertaV2PreTrainedModel):
    others, backbone = 1, DebertaV2Model


@pytest.mark.parametrize("scorer", [RobertaScorer, DebertaScorer])
def test_a_custom_head_is_built_trained_saved_and_loaded(scorer, tmp_path, caplog):
    family = "roberta" if scorer is RobertaScorer else "deberta"
    base = maker.build(family, "backbone")
    base.save_pretrained(tmp_path / "base")
    model, info = scorer.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert info["missing_keys"] == ["score.bias", "score.weight"]
    assert "no head weights: they are newly initialized" in caplog.text
    given = maker.draw_inputs(family, "left")
    scores = model(**given).scores
    model.train()(**given).scores.sum().backward()
    assert model.get_input_embeddings().weight.grad.any()
    states = maker.build(family, "backbone")(**given).last_hidden_state
    mean = states.sum(1) / given["attention_mask"].sum(1, keepdim=True)
    torch.testing.assert_close(scores, model.score(mean))
    shown = model.eval()(**given, output_hidden_states=True, return_dict=False)
    assert (len(shown), len(shown[1])) == (2, 3)
    assert len(model(**given, output_attentions=True).attentions) == 2
    model.save_pretrained(tmp_path / "tuned")
    again = scorer.from_pretrained(tmp_path / "tuned")
    assert torch.equal(again(**given).scores, scores)


class RobertaWithUpstreamsHead(RobertaPreTrainedModel):
    """Upstream's head is given the states of all tokens, and takes the first."""

    def __init__(self, config):
        super().__init__(config)
        self.roberta = RobertaModel(config, add_pooling_layer=False)
        self.classifier = RobertaClassificationHead(config)
        self.init_weights()

    def forward(self, input_ids=None, **given):
        return self.classifier(self.roberta(input_ids, **given)[0])


class DebertaWithUpstreamsHead(DebertaV2PreTrainedModel):
    """Upstream's pooler is given the states of all tokens, and takes the first."""

    def __init__(self, config):
        super().__init__(config)
        self.deberta = DebertaV2Model(config)
        self.pooler = ContextPooler(config)
        self.dropout = StableDropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(self.pooler.output_dim, config.num_labels)
        self.init_weights()

    def forward(self, input_ids=None, **given):
        pooled = self.pooler(self.deberta(input_ids, **given)[0])
        return self.classifier(self.dropout(pooled))


@pytest.mark.parametrize("custom", [RobertaWithUpstreamsHead, DebertaWithUpstreamsHead])
def test_upstream_s_heads_take_the_states_of_all_tokens(custom):
    family = "roberta" if custom is RobertaWithUpstreamsHead else "deberta"
    usual = maker.build(family, "classifier")
    model = custom(usual.config).eval()
    model.load_state_dict(usual.state_dict())
    given = maker.draw_inputs(family, "right")
    torch.testing.assert_close(model(**given), usual(**given).logits)
