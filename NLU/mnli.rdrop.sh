#!/usr/bin/env bash
# DeBERTa-v2-xxlarge with LoRA on MNLI, with R-Drop: two passes over each batch, trained to agree;
# seed 42. The paper has no figure for it.
exec python "$(dirname "$0")/recipe.py" mnli.rdrop "$@"
