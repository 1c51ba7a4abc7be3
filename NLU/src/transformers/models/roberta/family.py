"""RoBERTa: what the Auto classes and adapters need to know of it."""

from loralib.adapters.families import Family

from ..registry import carry

ROBERTA = carry(
    Family(
        name="roberta",
        title="RoBERTa",
        backbone="roberta.",
        layers="roberta.encoder.layer.",
        logits="classifier.out_proj",
        tokenizer_files=("vocab.json", "merges.txt"),
    ),
    package=__package__,
    config="configuration_roberta.RobertaConfig",
    tokenizer="tokenization_roberta.RobertaTokenizer",
    tokenizer_fast="tokenization_roberta_fast.RobertaTokenizerFast",
    base="modeling_roberta.RobertaPreTrainedModel",
    backbone="modeling_roberta.RobertaModel",
    masked_lm="modeling_roberta.RobertaForMaskedLM",
    sequence_classification="modeling_roberta.RobertaForSequenceClassification",
)
