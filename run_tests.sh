#!/usr/bin/env bash
# Sets up what is still missing, then lints the code, checks loralib's types and runs the tests.
#
#   bash run_tests.sh                      everything
#   bash run_tests.sh --fast               three minutes: no processes that talk, no fuzzing, nothing slow
#   bash run_tests.sh tests/loralib -x     arguments go to pytest, after --fast as well
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # also if run as: sh run_tests.sh
set -euo pipefail

case ${1:-} in
-h | --help) sed -n '/^set /q; s/^#$//p; s/^# //p' "$0" && exit ;;
esac
CDPATH='' cd "$(dirname "$0")"

# Two workers per core, because many tests wait for processes of their own; the fast ones do not.
# At most eight cores are counted: a container may see more than it may use.
cores=$(getconf _NPROCESSORS_ONLN)
cores=$((cores < 8 ? cores : 8))
settings=(-n $((2 * cores)))
if [ "${1:-}" = --fast ]; then
    shift
    settings=(-n "$cores" -m "not (slow or distributed or fuzz)")
fi
# Tests start Python hundreds of times, which must not compile the project anew each time.
unset PYTHONDONTWRITEBYTECODE
bash utils/make_environment.sh --with-tests
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/python -m pytest "${settings[@]}" --dist loadfile --no-loadscope-reorder "$@"
