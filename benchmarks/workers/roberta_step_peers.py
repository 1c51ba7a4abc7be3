"""A LoRA step of PEFT on upstream's RoBERTa, in the environment of requirements-peers.txt."""

from peer_encoder import run_steps

from transformers import RobertaConfig

if __name__ == "__main__":
    run_steps(RobertaConfig, targets=["query", "value"], head=["classifier"])
