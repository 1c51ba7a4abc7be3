#!/usr/bin/env bash
# Runs the tests as other machines would: with older processors' instructions, other numbers of
# threads and in random order. Arguments go to pytest; ONLY=2 does the second run alone; SHUFFLED is
# the order's seed, and is shown.
#
#   bash tests/any_machine.sh [tests/loralib -x …]
set -uo pipefail
CDPATH='' cd "$(dirname "$0")/.."

# PyTorch's own instructions, oneDNN's, MKL's, threads, and more for pytest; - is what is found here.
runs=(
    "default  AVX2         COMPATIBLE  1"
    "avx2     AVX512_CORE  -           2"
    "-        -            -           4  -p shuffled"
)

export SHUFFLED="${SHUFFLED:-$RANDOM}"
failed=0
for number in "${!runs[@]}"; do
    [ "${ONLY:-$((number + 1))}" = "$((number + 1))" ] || continue
    read -r aten onednn mkl threads more <<<"${runs[$number]}"
    # Where there are more threads than cores, one that waits must not keep the others from working.
    settings=(OMP_NUM_THREADS="$threads" OMP_WAIT_POLICY=passive PYTHONPATH="tests/helpers${PYTHONPATH:+:$PYTHONPATH}")
    [ "$aten" = - ] || settings+=(ATEN_CPU_CAPABILITY="$aten")
    [ "$onednn" = - ] || settings+=(ONEDNN_MAX_CPU_ISA="$onednn")
    [ "$mkl" = - ] || settings+=(MKL_CBWR="$mkl")
    echo "== run $((number + 1)): ${settings[*]} SHUFFLED=$SHUFFLED pytest $more $*"
    # shellcheck disable=SC2086 # $more is words
    env "${settings[@]}" .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $more "$@" || failed=1
done
exit $failed
