#!/usr/bin/env bash
# RoBERTa-base with LoRA on QNLI; seed 0.
# The paper's Table 2: 93.3±.3 (accuracy; median of 5 seeds).
exec python "$(dirname "$0")/recipe.py" roberta_base_qnli "$@"
