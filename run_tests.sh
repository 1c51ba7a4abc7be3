#!/usr/bin/env bash
# Sets up what is still missing, then lints the code, checks loralib's types and runs the tests.
#
#   bash run_tests.sh                      everything
#   bash run_tests.sh tests/loralib -x     arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")"

bash utils/make_environment.sh --with-tests
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# Two processes: many tests wait for processes of their own.
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
