#!/usr/bin/env bash
# Makes an environment with upstream's libraries, in which of this project is loralib alone, and runs
# the tests of this folder there; arguments go to pytest.
#
#   bash tests/interop/run.sh
#   bash tests/interop/run.sh tests/interop/test_numbers.py -k dora
#
# INTEROP_ENV names the environment's folder (default: .venv-interop), PYTHON the interpreter.
set -euo pipefail
CDPATH='' cd "$(dirname "$0")/../.."

environment=${INTEROP_ENV:-.venv-interop}
if [ ! -x "$environment/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$environment"
fi
stamp=$environment/installed
state=$(cat setup.py tests/interop/requirements.txt | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$PWD $state" ]; then
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
        -r tests/interop/requirements.txt -e .
    echo "$PWD $state" >"$stamp"
fi
if [ $# = 0 ]; then
    set -- tests/interop
fi
exec "$environment/bin/python" -m pytest -c tests/interop/pytest.ini "$@"
