"""Registers DeBERTa-v2, with what the Auto classes and adapters need to know about it."""

from loralib.adapters.families import Family, Head

from ..registry import register_family

DEBERTA_V2 = register_family(
    Family(
        name="deberta-v2",
        title="DeBERTa-v2",
        backbone="deberta.",
        layers="deberta.encoder.layer.",
        heads={
            "sequence_classification": Head(("classifier", "pooler"), "classifier", labeled=True),
            "token_classification": Head(("classifier",), "classifier", labeled=True),
            "question_answering": Head(("qa_outputs",), "qa_outputs"),
            "masked_lm": Head(("cls",)),
        },
        shared_with_positions=("attention.self.query_proj", "attention.self.key_proj"),
        # In the release's first files, A and B were layers beside the projections, not in them.
        old_names={
            r"\.(query|value)_lora_a\.weight$": r".\1_proj.lora_A",
            r"\.(query|value)_lora_b\.weight$": r".\1_proj.lora_B",
        },
        tied={
            "cls.predictions.decoder.weight": "deberta.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        may_untie=True,  # tie_word_embeddings
        tokenizer_files=("spm.model",),
    ),
    package=__package__,
    config="configuration_deberta_v2.DebertaV2Config",
    tokenizer="tokenization_deberta_v2.DebertaV2Tokenizer",
    tokenizer_fast="tokenization_deberta_v2_fast.DebertaV2TokenizerFast",
    base="modeling_deberta_v2.DebertaV2PreTrainedModel",
    backbone="modeling_deberta_v2.DebertaV2Model",
    masked_lm="modeling_deberta_v2.DebertaV2ForMaskedLM",
    sequence_classification="modeling_deberta_v2.DebertaV2ForSequenceClassification",
    token_classification="modeling_deberta_v2.DebertaV2ForTokenClassification",
    question_answering="modeling_deberta_v2.DebertaV2ForQuestionAnswering",
)
