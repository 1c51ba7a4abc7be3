#!/usr/bin/env bash
# Fetches GPT-2 small, medium and large into pretrained_checkpoints (5.3 GB); or only those named:
#
#   bash download_pretrained_checkpoints.sh [gpt2] [gpt2-medium] [gpt2-large]
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # also if run as: sh download_pretrained_checkpoints.sh
set -euo pipefail

case ${1:-} in
-h | --help) sed -n '/^set /q; s/^#$//p; s/^# //p' "$0" && exit ;;
esac
CDPATH='' cd "$(dirname "$0")"

if [ $# -eq 0 ]; then
    set -- gpt2 gpt2-medium gpt2-large
fi
exec python src/download.py "$@"
