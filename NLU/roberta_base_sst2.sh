#!/usr/bin/env bash
# RoBERTa-base with LoRA on SST-2; seed 0.
# The paper's Table 2: 95.1±.2 (accuracy; median of 5 seeds).
exec python "$(dirname "$0")/recipe.py" roberta_base_sst2 "$@"
