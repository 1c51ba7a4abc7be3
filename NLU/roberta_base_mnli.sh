#!/usr/bin/env bash
# RoBERTa-base with LoRA on MNLI; seed 0.
# The paper's Table 2: 87.5±.3/86.9±.3 (accuracy m/mm; median of 5 seeds).
exec python "$(dirname "$0")/recipe.py" roberta_base_mnli "$@"
