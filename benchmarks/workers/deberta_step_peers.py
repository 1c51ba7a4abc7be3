"""Times a LoRA step of PEFT on upstream's DeBERTa-v2, in requirements-peers.txt's environment."""

from peer_encoder import run_steps

from transformers import DebertaV2Config

if __name__ == "__main__":
    run_steps(DebertaV2Config, targets=["query_proj", "value_proj"], head=["pooler", "classifier"])
