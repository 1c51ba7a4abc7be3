"""Registers RoBERTa, with what the Auto classes and adapters need to know about it."""

from loralib.adapters.families import Family, Head

from ..registry import register_family

ROBERTA = register_family(
    Family(
        name="roberta",
        title="RoBERTa",
        backbone="roberta.",
        layers="roberta.encoder.layer.",
        heads={
            "sequence_classification": Head(("classifier",), "classifier.out_proj", labeled=True),
            "token_classification": Head(("classifier",), "classifier", labeled=True),
            "question_answering": Head(("qa_outputs",), "qa_outputs"),
            "multiple_choice": Head(("classifier", "roberta.pooler"), "classifier"),
            "masked_lm": Head(("lm_head",)),
            "causal_lm": Head(("lm_head",)),
        },
        tied={
            "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        may_untie=True,  # tie_word_embeddings
        tokenizer_files=("vocab.json", "merges.txt"),
    ),
    package=__package__,
    config="configuration_roberta.RobertaConfig",
    tokenizer="tokenization_roberta.RobertaTokenizer",
    tokenizer_fast="tokenization_roberta_fast.RobertaTokenizerFast",
    base="modeling_roberta.RobertaPreTrainedModel",
    backbone="modeling_roberta.RobertaModel",
    masked_lm="modeling_roberta.RobertaForMaskedLM",
    causal_lm="modeling_roberta.RobertaForCausalLM",
    sequence_classification="modeling_roberta.RobertaForSequenceClassification",
    token_classification="modeling_roberta.RobertaForTokenClassification",
    question_answering="modeling_roberta.RobertaForQuestionAnswering",
    multiple_choice="modeling_roberta.RobertaForMultipleChoice",
)
