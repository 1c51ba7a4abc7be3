#!/usr/bin/env bash
# DeBERTa-v2-xxlarge with LoRA on SST-2; seed 0.
# The paper's Table 2: 96.9±.2 (accuracy; median of 5 seeds).
exec python "$(dirname "$0")/recipe.py" deberta_v2_xxlarge_sst2 "$@"
