#!/usr/bin/env bash
# DeBERTa-v2-xxlarge with LoRA on RTE from deberta_v2_xxlarge_mnli.sh's LoRA weights; seed 0.
# The paper's Table 2: 94.9±.4 (accuracy; median of 5 seeds).
exec python "$(dirname "$0")/recipe.py" deberta_v2_xxlarge_rte "$@"
