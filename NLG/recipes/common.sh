# What the recipes share; they source it. Arguments: CARD (md or lg), then flags for the training.
# Besides NPROC, SEED and MASTER_PORT, two variables say where (absolute paths, or from NLG/):
#   RUN_DIR    the run's folder, instead of one in trained_models
#   TRIAL_DIR  for trials: a folder with base.pt (a gpt2.xs), vocab and data that take the place
#              of the published
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

card=$1
shift
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    echo "Trains, decodes and scores; flags go to the training: python NLG/src/gpt2_ft.py --help."
    echo "Variables: NPROC (processes), SEED, RUN_DIR (folder to write to), MASTER_PORT."
    exit 0
fi
case $card in
md) name=gpt2-medium folder=GPT2_M ;;
lg) name=gpt2-large folder=GPT2_L ;;
*) echo "recipes: error: no recipe for a gpt2.$card (known: md, lg)" >&2 && exit 2 ;;
esac

NPROC=${NPROC:-1}
SEED=${SEED:-110}
base=pretrained_checkpoints/$name-pytorch_model.bin vocab=vocab data=data
if [ -n "${TRIAL_DIR:-}" ]; then
    card=xs base=$TRIAL_DIR/base.pt vocab=$TRIAL_DIR/vocab data=$TRIAL_DIR/data
fi

# out_of CORPUS: the run's folder; other seeds than the release's have folders of their own.
out_of() {
    if [ -n "${RUN_DIR:-}" ]; then
        echo "$RUN_DIR"
    elif [ "$SEED" = 110 ]; then
        echo "trained_models/$folder/$1"
    else
        echo "trained_models/$folder/$1.$SEED"
    fi
}

# need FILE COMMAND: where the file is missing, ends the recipe with the command that makes it.
need() {
    if [ ! -e "$1" ]; then
        echo "$(basename "$0"): error: $1 is not there; make it by: $2" >&2
        exit 1
    fi
}

# need_inputs CORPUS FOLDER: the base, the vocabulary and the encoded data.
need_inputs() {
    need "$base" "bash download_pretrained_checkpoints.sh $name"
    need "$vocab/encoder.json" "bash download_data.sh vocab"
    for split in train valid test test_formatted; do
        need "$2/$split.jsonl" "bash download_data.sh $1 && bash create_datasets.sh $1"
    done
}

# launch SCRIPT FLAGS…: runs a script on NPROC processes.
launch() {
    python -m torch.distributed.launch --nproc_per_node="$NPROC" \
        --master_port "${MASTER_PORT:-29500}" "$@"
}

# last_checkpoint FOLDER: the model.<step>.pt of the latest step.
last_checkpoint() {
    ls "$1" | sed -n 's/^model\.\([0-9]*\)\.pt$/\1/p' | sort -n | tail -n 1 |
        sed "s|.*|$1/model.&.pt|"
}
