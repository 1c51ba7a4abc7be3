#!/usr/bin/env bash
# RoBERTa-large with Pfeiffer adapters of size 16 on MNLI, the model itself frozen; seed 0.
# A baseline of the paper's Table 2.
exec python "$(dirname "$0")/recipe.py" adapter_pfeiffer_roberta_large_mnli "$@"
