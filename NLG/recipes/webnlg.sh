# GPT-2 with LoRA on WebNLG: training, beam search, scores; ../webnlg_gpt2_{md,lg}.sh run it.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

data=$data/webnlg_challenge_2017
out=$(out_of webnlg)
need_inputs webnlg "$data"

launch src/gpt2_ft.py --platform local \
    --train_data "$data/train.jsonl" --valid_data "$data/valid.jsonl" \
    --train_batch_size 8 --grad_acc 1 --valid_batch_size 4 --seq_len 512 \
    --model_card gpt2.$card --init_checkpoint "$base" \
    --clip 0.0 --lr 0.0002 --weight_decay 0.01 --correct_bias --adam_beta2 0.999 \
    --scheduler linear --warmup_step 500 --max_epoch 5 --save_interval 1000 \
    --lora_dim 4 --lora_alpha 32 --lora_dropout 0.1 --label_smooth 0.1 \
    --work_dir "$out" --random_seed "$SEED" --resume "$@"

launch src/gpt2_beam.py --platform local \
    --data "$data/test.jsonl" --batch_size 16 --seq_len 512 --eval_len 64 \
    --model_card gpt2.$card --init_checkpoint "$(last_checkpoint "$out")" \
    --lora_dim 4 --lora_alpha 32 --beam 10 --length_penalty 0.8 --no_repeat_ngram_size 4 \
    --repetition_penalty 1.0 --eos_token_id 628 --work_dir "$out" --output_file predict.jsonl

# all: every category; seen, unseen: those that the training data has, and the others.
for filter in all seen unseen; do
    python src/gpt2_decode.py --vocab "$vocab" --sample_file "$out/predict.jsonl" \
        --input_file "$data/test_formatted.jsonl" \
        --ref_type webnlg --ref_num 6 --filter $filter --tokenize --lower \
        --output_ref_file "$out/references_$filter" --output_pred_file "$out/hypothesis_$filter"
    python eval/GenerationEval/eval.py -R "$out/references_$filter/reference" \
        -H "$out/hypothesis_$filter" -nr 6 -m bleu,meteor,ter,chrf++ \
        --json "$out/scores.json" --label $filter
done
