# GPT-2 with LoRA on WebNLG: training, beam search, scores; ../webnlg_gpt2_{md,lg}.sh run it.
# What all corpora have in common is in common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

data=$data/webnlg_challenge_2017
out=$(out_of webnlg)
need_inputs webnlg "$data"

train --weight_decay 0.01 --lora_dropout 0.1 --label_smooth 0.1 "$@"
generate --length_penalty 0.8
# seen, unseen: the categories that the training data has, and the others.
score webnlg all seen unseen
