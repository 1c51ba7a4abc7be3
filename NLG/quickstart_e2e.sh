#!/usr/bin/env bash
# From nothing to a scored GPT-2 adapter, offline except for the installation: makes a small base,
# adapts it to data-to-text with LoRA, decodes by beam search, and scores the texts of base and adapter.
#
# The data is E2E's, where it is: valid.txt and test.txt in the folder that E2E names (default:
# data/e2e), and GPT-2's vocabulary in the folder that VOCAB names (default: vocab); download_data.sh
# fetches both into these. Where neither is named and one lacks its files, it is a small corpus that
# the project makes; where one is named, both have to hold their files. All that is made is in
# quickstart_output/, which is deleted first.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # also if run as: sh quickstart_e2e.sh
set -euo pipefail

case ${1:-} in
'') ;;
-h | --help) sed -n '/^set /q; s/^#$//p; s/^# //p' "$0" && exit ;;
*) echo "quickstart_e2e.sh: error: takes no arguments, but got $1" >&2 && exit 2 ;;
esac
CDPATH='' cd "$(dirname "$0")"

bash ../utils/make_environment.sh
source ../.venv/bin/activate
export HF_HUB_OFFLINE=1
# On a busy machine, several threads take a model this small ten times as long as one.
export OMP_NUM_THREADS=1
# PyTorch's launcher says at each start that another name for it is to be used.
export PYTHONWARNINGS=ignore::FutureWarning:__main__

out=quickstart_output

step() {
    printf '\n=== %s\n' "$*"
}

# lacking FOLDER FILE…: the files that the folder lacks.
lacking() {
    local folder=$1 file
    shift
    for file in "$@"; do
        [ -f "$folder/$file" ] || printf ' %s' "$folder/$file"
    done
}

# encode NAME SOURCE: from lines "meaning||text" to token ids.
encode() {
    python src/format_converting_e2e.py "$2" "$out/$1_formatted.jsonl"
    python src/gpt2_encode.py --vocab "$vocab" --input "$out/$1_formatted.jsonl" \
        --output "$out/$1.jsonl" --add_bos --add_eos
}

# generate NAME MODEL_FLAGS…: texts for the test's meanings, and their scores.
generate() {
    local name=$1
    shift
    python src/gpt2_beam.py --platform local --data "$out/test.jsonl" --batch_size 16 \
        --model_card gpt2.xs --beam 10 --length_penalty 0.8 --no_repeat_ngram_size 4 \
        --eos_token_id 628 --seq_len 512 --eval_len 64 \
        --work_dir "$out" --output_file "predict_$name.jsonl" "$@"
    python src/gpt2_decode.py --vocab "$vocab" --sample_file "$out/predict_$name.jsonl" \
        --input_file "$out/test_formatted.jsonl" \
        --output_ref_file "$out/ref.txt" --output_pred_file "$out/pred_$name.txt"
}

vocab=${VOCAB:-vocab} data=${E2E:-data/e2e}
# The validation data is small enough to train on in minutes.
train=$data/valid.txt
absent="$(lacking "$data" valid.txt test.txt)$(lacking "$vocab" encoder.json vocab.bpe)"
if [ -n "$absent" ]; then
    if [ -n "${VOCAB:-}${E2E:-}" ]; then
        echo "quickstart_e2e.sh: error: no such files:$absent (relative to $PWD);" \
            "where E2E or VOCAB is set, both are needed" >&2
        exit 1
    fi
    data=$out/corpus vocab=$out/corpus/vocab train=$out/corpus/train.txt
fi

rm -rf "$out"
mkdir -p "$out"

step "1. The data"
if [ "$data" = "$out/corpus" ]; then
    python ../examples/make_small_e2e.py --output_dir "$data"
fi
echo "$train, $data/test.txt, $vocab"
encode train "$train"
head -n 1000 "$data/test.txt" > "$out/test.txt"
encode test "$out/test.txt"
# The base learns the other direction, from texts to meanings: words, but not the task.
awk -F'[|][|]' '{ print $2 "||" $1 }' "$train" > "$out/reversed.txt"
encode reversed "$out/reversed.txt"

step "2. The base: a small GPT-2, trained on texts followed by their meanings"
python src/gpt2_ft.py --platform local \
    --train_data "$out/reversed.jsonl" --valid_data "$out/test.jsonl" \
    --model_card gpt2.xs --obj jlm --train_batch_size 16 --max_step 400 \
    --lr 3e-3 --correct_bias --warmup_step 40 --log_interval 10 --eval_interval 500 \
    --work_dir "$out/base" --random_seed 1

step "3. LoRA, by the release's launch line"
python -m torch.distributed.launch --nproc_per_node=1 src/gpt2_ft.py --platform local \
    --train_data "$out/train.jsonl" --valid_data "$out/test.jsonl" \
    --model_card gpt2.xs --init_checkpoint "$out/base/model.400.pt" \
    --lora_dim 8 --lora_alpha 32 --lora_dropout 0.1 --label_smooth 0.1 \
    --train_batch_size 8 --max_epoch 2 --lr 1e-2 --correct_bias --adam_beta2 0.999 \
    --scheduler linear --warmup_step 100 --log_interval 20 --eval_interval 250 \
    --save_lora_only --work_dir "$out/lora" --random_seed 110
lora=$(ls -t "$out"/lora/model.*.pt | head -n 1)

step "4. Beam search: the base alone, and the base with $lora"
generate base --init_checkpoint "$out/base/model.400.pt"
generate lora --init_checkpoint "$out/base/model.400.pt" --lora_path "$lora"

step "5. Scores"
head -n 3 "$out/pred_lora.txt"
for name in base lora; do
    printf '\n%s\n' "$name"
    python eval/e2e/measure_scores.py "$out/ref.txt" "$out/pred_$name.txt" -p \
        --json "$out/scores.json" --label "$name"
done
printf '\nNext: source %q/bin/activate, and docs/gpt2.md for pairs of your own.\n' "$VIRTUAL_ENV"
