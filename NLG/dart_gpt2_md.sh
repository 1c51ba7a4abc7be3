#!/usr/bin/env bash
# GPT-2 medium with LoRA on DART, from encoded data to scores. Flags go to the training,
# such as --bf16 or --resume; NPROC=4 uses 4 GPUs (or processes); SEED=111 makes another run.
exec bash "$(dirname "$0")/recipes/dart.sh" md "$@"
