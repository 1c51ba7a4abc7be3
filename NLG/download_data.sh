#!/usr/bin/env bash
# Fetches GPT-2's vocabulary into vocab, and E2E, WebNLG 2017 and DART into data; or only what is named:
#
#   bash download_data.sh [vocab] [e2e] [webnlg] [dart]
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # also if run as: sh download_data.sh
set -euo pipefail

case ${1:-} in
-h | --help) sed -n '/^set /q; s/^#$//p; s/^# //p' "$0" && exit ;;
esac
CDPATH='' cd "$(dirname "$0")"

if [ $# -eq 0 ]; then
    set -- vocab e2e webnlg dart
fi
exec python src/download.py "$@"
