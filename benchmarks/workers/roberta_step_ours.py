"""A training step of this project's RoBERTa."""

from our_encoder import run_steps

from transformers import RobertaConfig, RobertaForSequenceClassification

if __name__ == "__main__":
    run_steps(RobertaConfig, RobertaForSequenceClassification)
