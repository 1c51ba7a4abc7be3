# What the recipes share; they source it. Arguments: CARD (md or lg), then flags for the training.
# Besides NPROC, SEED and MASTER_PORT, two variables say where (absolute paths, or from NLG/):
#   RUN_DIR    the run's folder, instead of one in trained_models
#   TRIAL_DIR  for trials: a folder with base.pt (a gpt2.xs), vocab and data, used
#              instead of the published ones
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."

card=${1:-}
shift || true
for flag in "$@"; do
    case $flag in --help | -h) ;; *) continue ;; esac
    echo "Trains, decodes and scores; flags go to the training: python NLG/src/gpt2_ft.py --help."
    echo "--estimate only says what the training would take."
    echo "Variables: NPROC (processes), SEED, RUN_DIR (folder to write to), MASTER_PORT, and for a" \
        "trial TRIAL_DIR (folder with base.pt, a gpt2.xs, vocab and data). Paths are relative to NLG/."
    exit 0
done
case $card in
md) name=gpt2-medium folder=GPT2_M ;;
lg) name=gpt2-large folder=GPT2_L ;;
*) echo "recipes: error: no recipe for a gpt2.$card (known: md, lg)" >&2 && exit 2 ;;
esac
script=$(basename "$0" .sh)_gpt2_$card.sh  # which runs the recipe

NPROC=${NPROC:-1}
SEED=${SEED:-110}
base=pretrained_checkpoints/$name-pytorch_model.bin vocab=vocab data=data
if [ -n "${TRIAL_DIR:-}" ]; then
    card=xs base=$TRIAL_DIR/base.pt vocab=$TRIAL_DIR/vocab data=$TRIAL_DIR/data
fi

# What would leave the decoding without its model.
for flag in "$@"; do
    case $flag in
    --work_dir | --work_dir=*) instead="RUN_DIR says where to write" ;;
    --save_lora_only) instead="the decoding takes the complete model" ;;
    *) continue ;;
    esac
    echo "$script: error: ${flag%%=*} is not for recipes: $instead" >&2
    exit 2
done

# need_torch: ends the recipe where python lacks PyTorch, as where no environment is active.
need_torch() {
    if ! python -c 'import importlib.util, sys
sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; then
        echo "$script: error: $(command -v python || echo python) has no torch: activate the" \
            "environment first, as by \`source .venv/bin/activate\` (docs/installing.md makes it)" >&2
        exit 1
    fi
}

# A wrong flag or value, or a file that is not there.
if [ $# -gt 0 ]; then
    need_torch
    PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} python recipes/check_flags.py "$script" "$@"
fi
# A number of processes, or a word of PyTorch's launcher for one.
case $NPROC in
auto | cpu | gpu | xpu)
    if ! count=$(python -c 'import sys
from torch.distributed.run import determine_local_world_size
print(determine_local_world_size(sys.argv[1]))' "$NPROC" 2>/dev/null); then
        echo "$script: error: NPROC=$NPROC: this machine has none" >&2
        exit 1
    fi
    NPROC=$count
    ;;
esac
if ! [[ $NPROC =~ ^[[:space:]]*[+]?0*([1-9][0-9]*)[[:space:]]*$ ]]; then
    echo "$script: error: NPROC=$NPROC: must be a number of processes, at least 1" >&2
    exit 1
fi
NPROC=${BASH_REMATCH[1]}

# With --estimate, the training says what it would take, in one process, and nothing else is run.
estimate=
case " $* " in *" --estimate "*) estimate=1 ;; esac

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
        echo "$script: error: $1 does not exist; make it with: cd $(printf %q "$PWD") && $2" >&2
        exit 1
    fi
}

# need_inputs CORPUS FOLDER: the base, the vocabulary and the encoded data.
need_inputs() {
    if [ -n "$estimate" ]; then return; fi
    need "$base" "bash download_pretrained_checkpoints.sh $name"
    need "$vocab/encoder.json" "bash download_data.sh vocab"
    for split in train valid test test_formatted; do
        need "$2/$split.jsonl" "bash download_data.sh $1 && bash create_datasets.sh $1"
    done
    need_torch
}

# launch SCRIPT FLAGS…: runs a script on NPROC processes. A single one needs no launcher, whose own
# lines would surround an error; it is told what a launcher would tell it. Variables such as
# PET_NNODES are a launcher's flags: it may not be a single one then.
launch() {
    if [ -n "$estimate" ]; then
        exec python "$1" --estimate_devices "$NPROC" "${@:2}"
    fi
    if [ "$NPROC" = 1 ] && [ -z "${!PET_*}" ]; then
        RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 python "$@"
        return
    fi
    python -m torch.distributed.launch --nproc_per_node="$NPROC" \
        --master_port "${MASTER_PORT:-29500}" "$@"
}

# last_checkpoint FOLDER: the model.<step>.pt of the latest step.
last_checkpoint() {
    local step
    step=$(ls -- "$1" | sed -n 's/^model\.\([0-9]*\)\.pt$/\1/p' | sort -n | tail -n 1)
    if [ -n "$step" ]; then echo "$1/model.$step.pt"; fi
}

# train FLAGS…: what all corpora have in common; FLAGS are the corpus's and the caller's. A run
# that was killed resumes, a finished one is left as it is.
train() {
    local resume=
    if [ -e "$out/resume.pt" ]; then resume=--resume; fi
    launch src/gpt2_ft.py --platform local \
        --train_data "$data/train.jsonl" --valid_data "$data/valid.jsonl" \
        --train_batch_size 8 --grad_acc 1 --valid_batch_size 4 --seq_len 512 \
        --model_card gpt2.$card --init_checkpoint "$base" \
        --clip 0.0 --lr 0.0002 --correct_bias --adam_beta2 0.999 \
        --scheduler linear --warmup_step 500 --max_epoch 5 --save_interval 1000 \
        --lora_dim 4 --lora_alpha 32 \
        --work_dir "$out" --random_seed "$SEED" $resume "$@"
    if [ -z "$(last_checkpoint "$out")" ]; then
        echo "$script: error: $out holds a finished run, but its model.<step>.pt is gone: put it" \
            "back, or remove the folder to train again" >&2
        exit 1
    fi
}

# generate FLAGS…: texts for the test's contexts, into predict.jsonl. The model says its rank and
# alpha, which may be others than the recipe's.
generate() {
    launch src/gpt2_beam.py --platform local \
        --data "$data/test.jsonl" --batch_size 16 --seq_len 512 --eval_len 64 \
        --model_card gpt2.$card --init_checkpoint "$(last_checkpoint "$out")" \
        --beam 10 --no_repeat_ngram_size 4 --repetition_penalty 1.0 --eos_token_id 628 --work_dir "$out" \
        --output_file predict.jsonl "$@"
}

# score CORPUS FILTER…: WebNLG's or DART's scores, on all rows or those of some categories.
score() {
    local corpus=$1 filter
    shift
    for filter in "$@"; do
        python src/gpt2_decode.py --vocab "$vocab" --sample_file "$out/predict.jsonl" \
            --input_file "$data/test_formatted.jsonl" \
            --ref_type "$corpus" --ref_num 6 --filter "$filter" --tokenize --lower \
            --output_ref_file "$out/references_$filter" \
            --output_pred_file "$out/hypothesis_$filter"
        python eval/GenerationEval/eval.py -R "$out/references_$filter/reference" \
            -H "$out/hypothesis_$filter" -nr 6 -m bleu,meteor,ter,chrf++ \
            --json "$out/scores.json" --label "$filter"
    done
}
