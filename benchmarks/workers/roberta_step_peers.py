"""Times a LoRA step of PEFT on upstream's RoBERTa, in requirements-peers.txt's environment."""

from peer_encoder import run_steps

from transformers import RobertaConfig

if __name__ == "__main__":
    run_steps(RobertaConfig, targets=["query", "value"], head=["classifier"])
