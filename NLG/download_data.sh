#!/usr/bin/env bash
# Fetches GPT-2's vocabulary into vocab, and E2E, WebNLG 2017 and DART into data, or what is named:
#
#   bash download_data.sh [vocab] [e2e] [webnlg] [dart]
set -euo pipefail
cd "$(dirname "$0")"

if [ $# -eq 0 ]; then
    set -- vocab e2e webnlg dart
fi
exec python src/download.py "$@"
