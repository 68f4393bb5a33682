#!/usr/bin/env bash
# Resolve requirements/stack-0.18.in and the extras of pyproject.toml into requirements/lock.txt.
# LOCK_ARGS is passed on, for example LOCK_ARGS="--upgrade" or LOCK_ARGS="--upgrade-package numpy".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

lock=requirements/lock.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Local wheel folders, caps and private indexes must shape neither the versions nor the hashes.
export PIP_CONFIG_FILE=/dev/null
unset PIP_FIND_LINKS PIP_CONSTRAINT PIP_EXTRA_INDEX_URL PIP_INDEX_URL PIP_NO_INDEX

echo "lock: making a scratch environment with pip-tools"
"$(tools/bootstrap.sh --find-python)" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -q pip-tools==7.6.2 'setuptools>=77,<82'

echo "lock: resolving (minutes: every file of every package is asked for its hash)"
[[ ! -f $lock ]] || cp "$lock" "$work/lock.txt"
# The options go by hand: no header with a command line, nothing that names a registry.
# shellcheck disable=SC2086  # LOCK_ARGS is a list of words
"$work/venv/bin/python" -m piptools compile --quiet \
    --extra demo --extra test --extra dev --extra docs \
    --generate-hashes --allow-unsafe --strip-extras --no-build-isolation \
    --no-header --no-emit-options --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
    ${LOCK_ARGS:-} --output-file "$work/lock.txt" pyproject.toml requirements/stack-0.18.in

{
    echo "# Made by 'make lock' from pyproject.toml (extras demo, test, dev, docs) and stack-0.18.in."
    echo "# For Linux x86-64 with Python 3.12 or 3.13; install with"
    echo "#   pip install --require-hashes -r requirements/lock.txt"
    sed "s#$work/##g" "$work/lock.txt"
} >"$work/final.txt"
mv "$work/final.txt" "$lock"
echo "lock: wrote $lock, $(grep -c '==' "$lock") packages"
