#!/usr/bin/env bash
# Fetches what METEOR, ROUGE-L and CIDEr need besides Java; the other scores need nothing more.
#
#   cd eval && bash download_evalscript.sh
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # also if run as: sh download_evalscript.sh
set -euo pipefail

case ${1:-} in
'') ;;
-h | --help) sed -n '/^set /q; s/^#$//p; s/^# //p' "$0" && exit ;;
*) echo "download_evalscript.sh: error: takes no arguments, but got $1" >&2 && exit 2 ;;
esac
CDPATH='' cd "$(dirname "$0")"

python -m pip install -c ../../constraints.txt -r ../requirements-java.txt
java -version > /dev/null 2>&1 ||
    echo "There is no Java runtime yet: conda install -c conda-forge openjdk" \
        "(or apt install default-jre-headless)" >&2
