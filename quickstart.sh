#!/usr/bin/env bash
# From nothing to an adapted RoBERTa, offline except for the installation: makes .venv, makes a
# small corpus and a small GLUE task, pretrains a small base, adapts it with LoRA, extracts the LoRA
# weights, evaluates base + LoRA file in a new process, trains the same base in two other ways to
# compare, and prints a summary. All of it is in quickstart_output/, which is deleted first.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # also if run as: sh quickstart.sh
set -euo pipefail

case ${1:-} in
'') ;;
-h | --help) sed -n '/^set /q; s/^#$//p; s/^# //p' "$0" && exit ;;
*) echo "quickstart.sh: error: takes no arguments, but got $1" >&2 && exit 2 ;;
esac
CDPATH='' cd "$(dirname "$0")"

bash utils/make_environment.sh
source .venv/bin/activate
export HF_HUB_OFFLINE=1
# A model this small is not faster on several threads, and much slower on a busy machine.
export OMP_NUM_THREADS=1
# PyTorch's launcher says at each start that another name for it is to be used.
export PYTHONWARNINGS=ignore::FutureWarning:__main__

out=quickstart_output
rm -rf "$out"

step() {
    printf '\n=== %s\n' "$*"
}

step "1. A corpus and a task"
python examples/make_small_data.py --output_dir "$out/data"

step "2. The base: a small RoBERTa, trained on the corpus by masked-language modelling"
python examples/language-modeling/run_mlm.py --train_file "$out/data/corpus.txt" \
    --output_dir "$out/base" --do_train \
    --hidden_size 128 --num_hidden_layers 2 --num_attention_heads 4 --intermediate_size 512 \
    --max_seq_length 62 --mlm_probability 0.2 --max_steps 800 --per_device_train_batch_size 64 \
    --learning_rate 1e-3 --warmup_ratio 0.2 --adam_beta2 0.98 --seed 0 \
    --logging_steps 50 --save_strategy no --report_to none

step "3. LoRA, by the release's launch line"
python -m torch.distributed.launch --nproc_per_node=1 \
    examples/text-classification/run_glue.py \
    --model_name_or_path "$out/base" --task_name sst2 --data_dir "$out/data" \
    --do_train --do_eval --max_seq_length 62 \
    --per_device_train_batch_size 16 --learning_rate 2e-3 --num_train_epochs 10 \
    --evaluation_strategy epoch --save_strategy epoch --save_total_limit 1 --logging_steps 20 \
    --warmup_ratio 0.06 --weight_decay 0.1 --seed 0 --report_to none \
    --apply_lora --lora_r 8 --lora_alpha 16 --output_dir "$out/sst2" --overwrite_output_dir

step "4. The LoRA weights out of the full checkpoint"
python utils/split_lora.py "$out/sst2/pytorch_model.bin" "$out/lora.bin"

step "5. Base + LoRA file, in a new process"
python examples/text-classification/run_glue.py \
    --model_name_or_path "$out/base" --task_name sst2 --data_dir "$out/data" \
    --do_eval --max_seq_length 62 --report_to none \
    --apply_lora --lora_r 8 --lora_alpha 16 --lora_path "$out/lora.bin" --output_dir "$out/reloaded"

step "6. To compare: the head alone, and all weights"
python examples/quickstart_curves.py "$out"

step "7. Summary"
python examples/quickstart_summary.py "$out"
printf '\nNext: source .venv/bin/activate, and docs/glue.md for texts of your own.\n'
