#!/usr/bin/env bash
# RoBERTa-large with LoRA on MNLI; seed 0.
# The paper has it in Table 2, as the median of 5 seeds.
exec python "$(dirname "$0")/recipe.py" roberta_large_mnli "$@"
