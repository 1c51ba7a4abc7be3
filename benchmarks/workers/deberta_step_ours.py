"""A training step of this project's DeBERTa-v2."""

from our_encoder import run_steps

from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

if __name__ == "__main__":
    run_steps(DebertaV2Config, DebertaV2ForSequenceClassification)
