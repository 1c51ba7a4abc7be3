#!/usr/bin/env bash
# Fetches GPT-2 small, medium and large into pretrained_checkpoints (5.3 GB), or those named:
#
#   bash download_pretrained_checkpoints.sh [gpt2] [gpt2-medium] [gpt2-large]
set -euo pipefail
cd "$(dirname "$0")"

if [ $# -eq 0 ]; then
    set -- gpt2 gpt2-medium gpt2-large
fi
exec python src/download.py "$@"
