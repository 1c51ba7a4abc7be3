#!/usr/bin/env bash
# DeBERTa-v2-xxlarge with LoRA on CoLA; seed 0.
# The paper's Table 2: 72.4±1.1 (Matthews correlation; median of 5 seeds).
exec python "$(dirname "$0")/recipe.py" deberta_v2_xxlarge_cola "$@"
