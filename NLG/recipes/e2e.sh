# GPT-2 with LoRA on E2E: training, beam search, scores; ../e2e_gpt2_{md,lg}.sh run it.
# What all corpora have in common is in common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

data=$data/e2e
out=$(out_of e2e)
need_inputs e2e "$data"

train --weight_decay 0.01 --lora_dropout 0.1 --label_smooth 0.1 "$@"
# The release's length penalty; the paper's Table 11 has 0.9.
generate --length_penalty 0.8
python src/gpt2_decode.py --vocab "$vocab" --sample_file "$out/predict.jsonl" \
    --input_file "$data/test_formatted.jsonl" \
    --output_ref_file "$out/e2e_ref.txt" --output_pred_file "$out/e2e_pred.txt"
python eval/e2e/measure_scores.py "$out/e2e_ref.txt" "$out/e2e_pred.txt" -p \
    --json "$out/scores.json"
