#!/usr/bin/env bash
# RoBERTa-large with Houlsby adapters of size 8 on MNLI, the model itself frozen; seed 0.
# A baseline of the paper's Table 2.
exec python "$(dirname "$0")/recipe.py" adapter_houlsby_roberta_large_mnli "$@"
