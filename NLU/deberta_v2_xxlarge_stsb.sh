#!/usr/bin/env bash
# DeBERTa-v2-xxlarge with LoRA on STS-B from deberta_v2_xxlarge_mnli.sh's LoRA weights; seed 0.
# The paper's Table 2: 93.0±.2/92.9±.3 (Pearson/Spearman; median of 5 seeds).
exec python "$(dirname "$0")/recipe.py" deberta_v2_xxlarge_stsb "$@"
