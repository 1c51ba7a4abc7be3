#!/usr/bin/env bash
# DeBERTa-v2-xxlarge with LoRA on QQP; seed 0.
# The paper's Table 2: 92.9±.1 (accuracy; median of 5 seeds).
exec python "$(dirname "$0")/recipe.py" deberta_v2_xxlarge_qqp "$@"
