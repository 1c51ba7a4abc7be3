#!/usr/bin/env bash
# Makes .venv in the project's folder and installs the project there; does nothing where that is done.
#
#   bash utils/make_environment.sh [--with-tests]
#
# PYTHON names the interpreter to make it with (default: the first of python3, python3.14 … 3.10). Then
# a .venv with another version of Python is refused.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # also if run as: sh make_environment.sh
set -euo pipefail

case $* in
'' | --with-tests) ;;
-h | --help) sed -n '/^set /q; s/^#$//p; s/^# //p' "$0" && exit ;;
*) echo "make_environment.sh: error: takes only --with-tests, but got $*" >&2 && exit 2 ;;
esac
CDPATH='' cd "$(dirname "$0")/.."

project=(-e . -e "NLU[tensorboard]" -r NLG/requirements.txt -r utils/requirements.txt)
packages=("${project[@]}")
if [ "${1:-}" = "--with-tests" ]; then
    packages+=(ipykernel mypy nbclient pytest pytest-xdist ruff -r docs/requirements.txt)
fi

die() {
    echo "make_environment.sh: error: $*" >&2
    exit 1
}

case $(uname -s) in
MINGW* | MSYS* | CYGWIN*) die "on Windows, run this in WSL: see docs/installing.md" ;;
esac

is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
}

version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_supported "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.10 to 3.14"
        echo "$PYTHON"
        return
    fi
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if is_supported "$name"; then
            echo "$name"
            return
        fi
    done
    die "needs Python 3.10 to 3.14; install one, or name it: PYTHON=/path/to/python3.11 bash $0"
}

# Which folder the commands in .venv/bin belong to: they name it.
folder_of_venv() {
    # shellcheck disable=SC1091
    (set +u && . .venv/bin/activate && echo "$VIRTUAL_ENV")
}

if [ -f .venv/bin/activate ] && ! [ "$(folder_of_venv)" -ef .venv ]; then
    die ".venv belongs to another folder, $(folder_of_venv), and would run the code there: remove it" \
        "(rm -r .venv) and run this again"
fi
if [ -x .venv/bin/python ] && ! is_supported .venv/bin/python; then
    die ".venv has $(.venv/bin/python --version), but needs Python 3.10 to 3.14: remove" \
        "it (rm -r .venv) and run this again"
fi
if [ -x .venv/bin/python ] && [ -n "${PYTHON:-}" ]; then
    python=$(find_python)
    if [ "$(version "$python")" != "$(version .venv/bin/python)" ]; then
        die ".venv has Python $(version .venv/bin/python), not $(version "$python") (PYTHON=$PYTHON):" \
            "remove it first (rm -r .venv)"
    fi
fi
if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    echo "making .venv with $("$python" --version)"
    rm -rf .venv
    if ! "$python" -m venv .venv; then
        rm -rf .venv
        die "$python cannot make a virtual environment (on Debian: apt-get install python3-venv)"
    fi
fi

# Whether both packages run from this folder: `pip install .` puts a copy in a package's place.
are_editable() {
    local records=(.venv/lib/python*/site-packages/{loralib,transformers}-*.dist-info/direct_url.json)
    [ "$(grep -ls '"editable": true' "${records[@]}" | wc -l)" -eq 2 ]
}

# What was installed last, and from which files: the same again means there is nothing to do.
files=$(cat constraints.txt setup.py NLU/setup.py {NLG,utils,docs}/requirements.txt | cksum)
state="${packages[*]} $files"
stamp=.venv/installed
if ! are_editable || ! grep -qxF -- "$state" "$stamp" 2>/dev/null; then
    echo "installing into .venv, which takes minutes where PyTorch is downloaded: ${packages[*]}"
    # On a terminal, pip shows what it downloads.
    options=(--disable-pip-version-check)
    [ -t 1 ] || options+=(--quiet)
    .venv/bin/python -m pip install "${options[@]}" \
        -c constraints.txt "${packages[@]}"
    printf '%s\n' "$state" "${project[*]} $files" >"$stamp"
fi
