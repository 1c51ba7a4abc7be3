#!/usr/bin/env bash
# Brings the corpora into the format that gpt2_ft.py and gpt2_beam.py read: for each split,
# data/CORPUS/SPLIT_formatted.jsonl (texts) and data/CORPUS/SPLIT.jsonl (token ids).
#
#   bash create_datasets.sh                      every corpus that is there
#   bash create_datasets.sh e2e [webnlg] [dart]  those that are named
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # also if run as: sh create_datasets.sh
set -euo pipefail

case ${1:-} in
-h | --help) sed -n '/^set /q; s/^#$//p; s/^# //p' "$0" && exit ;;
esac
CDPATH='' cd "$(dirname "$0")"

die() {
    echo "create_datasets.sh: error: $*" >&2
    exit 1
}

# convert CORPUS FOLDER SPLIT SOURCE: one split, unless its source is missing.
convert() {
    local corpus=$1 folder=$2 split=$3 source=$2/$4
    if [ ! -f "$source" ]; then
        echo "$source does not exist, skipped"
        return
    fi
    echo "$source -> $folder/$split.jsonl"
    python "src/format_converting_$corpus.py" "$source" "$folder/${split}_formatted.jsonl"
    python src/gpt2_encode.py --vocab vocab --input "$folder/${split}_formatted.jsonl" \
        --output "$folder/$split.jsonl" --add_bos --add_eos
    made=$((made + 1))
}

create() {
    case $1 in
    e2e)
        convert e2e data/e2e train train.txt
        convert e2e data/e2e valid valid.txt
        convert e2e data/e2e test test.txt
        ;;
    webnlg)
        convert webnlg data/webnlg_challenge_2017 train train.json
        convert webnlg data/webnlg_challenge_2017 valid dev.json
        convert webnlg data/webnlg_challenge_2017 test test.json
        ;;
    dart)
        convert dart data/dart train dart-v1.1.1-full-train.json
        convert dart data/dart valid dart-v1.1.1-full-dev.json
        convert dart data/dart test dart-v1.1.1-full-test.json
        ;;
    *)
        die "unknown corpus '$1' (known: e2e, webnlg, dart)"
        ;;
    esac
}

made=0
if [ $# -eq 0 ]; then
    for corpus in e2e webnlg dart; do
        create "$corpus"
    done
    [ "$made" -gt 0 ] || die "data holds none of the corpora; bash download_data.sh fetches them"
fi
for corpus in "$@"; do
    before=$made
    create "$corpus"
    [ "$made" -gt "$before" ] ||
        die "the data of $corpus is missing; bash download_data.sh $corpus fetches it"
done
