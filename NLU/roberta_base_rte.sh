#!/usr/bin/env bash
# RoBERTa-base with LoRA on RTE from roberta_base_mnli.sh's LoRA weights; seed 0.
# The paper's Table 2: 86.6±.7 (accuracy; median of 5 seeds).
exec python "$(dirname "$0")/recipe.py" roberta_base_rte "$@"
