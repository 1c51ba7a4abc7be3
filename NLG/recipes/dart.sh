# GPT-2 with LoRA on DART: training, beam search, scores; ../dart_gpt2_{md,lg}.sh run it.
# What all corpora have in common is in common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

data=$data/dart
out=$(out_of dart)
need_inputs dart "$data"

train --weight_decay 0.0 --lora_dropout 0.0 --label_smooth 0.0 "$@"
generate --length_penalty 0.8
score dart all
