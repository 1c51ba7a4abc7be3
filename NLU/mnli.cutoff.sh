#!/usr/bin/env bash
# DeBERTa-v2-xxlarge with LoRA on MNLI, with Cutoff: as R-Drop, a tenth of the tokens hidden from
# the second pass; seed 42. The paper has no figure for it.
exec python "$(dirname "$0")/recipe.py" mnli.cutoff "$@"
