#!/usr/bin/env bash
# RoBERTa-base with LoRA on QQP; seed 0.
# The paper's Table 2: 90.8±.1 (accuracy; median of 5 seeds).
exec python "$(dirname "$0")/recipe.py" roberta_base_qqp "$@"
