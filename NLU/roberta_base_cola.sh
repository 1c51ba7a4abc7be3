#!/usr/bin/env bash
# RoBERTa-base with LoRA on CoLA; seed 0.
# The paper's Table 2: 63.4±1.2 (Matthews correlation; median of 5 seeds).
exec python "$(dirname "$0")/recipe.py" roberta_base_cola "$@"
