#!/usr/bin/env bash
# RoBERTa-base with LoRA on STS-B from roberta_base_mnli.sh's LoRA weights; seed 0.
# The paper's Table 2: 91.5±.2/91.3±.2 (Pearson/Spearman; median of 5 seeds).
exec python "$(dirname "$0")/recipe.py" roberta_base_stsb "$@"
