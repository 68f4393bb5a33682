#!/usr/bin/env bash
# Make .venv: find a suitable Python, install requirements/lock.txt by hash, then this package,
# editable. Running it again costs milliseconds while lock, pyproject.toml and Python stay the same.
#
#   tools/bootstrap.sh                 make or bring up to date .venv
#   tools/bootstrap.sh --find-python   only print the Python it would use
#
# PYTHON=/path/to/python is tried first.
set -euo pipefail

lock=requirements/lock.txt
# Everything an installation follows from.
sources=("$lock" pyproject.toml setup.py megatron/linear_cp/version.py tools/bootstrap.sh)
venv=.venv
python=$venv/bin/python
stamp=$venv/.megatron-linear-cp-stamp
unfinished=$venv/.megatron-linear-cp-unfinished

say() { printf 'bootstrap: %s\n' "$*" >&2; }

# ---- Finding a Python. Builtins only up to select_python, so that a bare PATH is no obstacle.

# A candidate is run, not only found: version managers leave launchers behind that start nothing.
probe_code='
import sys, sysconfig
if sys.version_info[:2] not in ((3, 12), (3, 13)):
    sys.exit("is Python %d.%d, not 3.12 or 3.13" % sys.version_info[:2])
if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("is not the standard CPython build that the wheels are made for")
for name in ("venv", "ensurepip", "ssl", "ctypes"):
    try:
        __import__(name)
    except ImportError as error:
        sys.exit("cannot import %s (%s)" % (name, error))
# In an activated virtual environment, the installation behind it is meant.
print("%d.%d" % sys.version_info[:2], getattr(sys, "_base_executable", sys.executable))
'
seen=:
tried=()
best=
best_version=

try_python() {
    local candidate=$1 answer
    [[ $seen != *":$candidate:"* ]] || return 0
    seen+="$candidate:"
    if ! answer=$("$candidate" -I -c "$probe_code" 2>&1 </dev/null); then
        answer=${answer//$'\n'/ }
        ((${#answer} <= 120)) || answer=${answer:0:120}...
        tried+=("$candidate: ${answer:-starts nothing}")
        return 0
    fi
    # Warnings may come before the answer, which is the last line.
    answer=${answer##*$'\n'}
    # The tested stack is 3.12's, so a 3.12 found later still wins over a 3.13.
    if [[ -z $best || ($best_version != 3.12 && $answer == "3.12 "*) ]]; then
        best_version=${answer%% *}
        best=${answer#* }
    fi
}

select_python() {
    local directory name candidate found
    if [[ -n ${PYTHON:-} ]]; then
        if [[ $PYTHON == */* ]] || found=$(type -P "$PYTHON"); then
            try_python "${found:-$PYTHON}"
        else
            tried+=("PYTHON=$PYTHON: no such program")
        fi
        [[ -z $best ]] || return 0
        say "PYTHON=$PYTHON does not fit (${tried[-1]}); looking further"
    fi
    local -a path
    IFS=: read -r -a path <<<"${PATH:-}"
    for name in python3.12 python3.13 python3; do
        for directory in "${path[@]}"; do
            candidate=${directory:-.}/$name
            [[ -f $candidate && -x $candidate ]] && try_python "$candidate"
        done
    done
    for candidate in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[23]*/bin/python; do
        [[ -x $candidate ]] && try_python "$candidate"
    done
    if [[ $best_version != 3.12 ]] && type -P uv >/dev/null; then
        for name in 3.12 3.13; do
            if found=$(UV_PYTHON_DOWNLOADS=never uv python find --system "$name" 2>/dev/null); then
                try_python "$found"
            fi
        done
    fi
    [[ -z $best ]] || return 0

    say "no suitable Python found. megatron-linear-cp needs CPython 3.12 or 3.13 with venv."
    if ((${#tried[@]})); then
        say "tried:"
        for candidate in "${tried[@]}"; do say "  $candidate"; done
    else
        say "found no python3, python3.12 or python3.13 on PATH, under pyenv or through uv."
    fi
    say "any one of these installs one (then run this again):"
    say "  apt-get install python3.12 python3.12-venv      (Ubuntu 24.04 and newer)"
    say "  uv python install 3.12"
    say "  pyenv install 3.12"
    say "or name one yourself: PYTHON=/path/to/python3.12"
    return 1
}

# ---- The stamp: everything that .venv was made from.

# Version and installation of a Python, without its site packages (fast).
identity() { "$1" -I -S -c 'import sys; print(sys.version.split()[0], sys.base_prefix)'; }

inputs() {
    printf 'inputs %s' "$(cat "${sources[@]}" | sha256sum)"
}

# The stamp's text, ending in the line given.
stamp_text() {
    local id
    id=$(identity "$python" 2>/dev/null) || return 1
    printf '%s\n' "root $PWD" "python $id" "$1"
}

stamp_as() {
    stamp_text "$1" >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

ready() {
    local wanted asked
    [[ -f $stamp && ! -e $unfinished ]] || return 1
    wanted=$(stamp_text "$(inputs)") && [[ $wanted == "$(<"$stamp")" ]] || return 1
    # A PYTHON given by hand that works and is another one asks for another .venv.
    if [[ -n ${PYTHON:-} ]] && asked=$(identity "$PYTHON" 2>/dev/null); then
        [[ $wanted == *$'\n'"python $asked"$'\n'* || $asked != 3.1[23].* ]] || return 1
    fi
}

# ---- Installing.

# Run a long quiet command and show that it is alive.
patiently() {
    local beat status=0
    # Neither this child nor its sleep may keep the lock, or a pipe that somebody reads, open.
    (
        exec 9>&-
        while sleep 30 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
            say "  still working, ${SECONDS} s so far"
        done
    ) &
    beat=$!
    # shellcheck disable=SC2064  # the number of now
    trap "kill $beat 2>/dev/null" EXIT
    "$@" || status=$?
    kill "$beat" 2>/dev/null || true
    wait "$beat" 2>/dev/null || true
    trap - EXIT
    return "$status"
}

# Twice quiet: errors only. Once quiet still lists every local folder of a pip configuration that
# lacks a package.
pip() { "$python" -m pip --disable-pip-version-check --quiet --quiet "$@"; }

# Run a check that has nothing to say unless it fails.
checked() {
    local output
    if ! output=$("$@" 2>&1); then
        say "the new $venv does not pass: ${*:1:3}"
        printf '%s\n' "$output" >&2
        return 1
    fi
}

make_venv() {
    local keep=no id
    if [[ -e $venv && ! -e $unfinished ]] && id=$(identity "$python" 2>/dev/null) \
        && [[ $id == 3.1[23].* ]] && "$python" -I -c 'import pip' 2>/dev/null; then
        # What was finished once and did not move is brought up to date in place. Anything else may
        # hold half-written packages that pip would take for whole.
        [[ -f $stamp && $(<"$stamp") == "root $PWD"$'\n'"python $id"$'\n'* ]] && keep=yes
        if [[ -n ${PYTHON:-} && $keep == yes ]]; then
            select_python
            [[ $(identity "$best") == "$id" ]] || keep=no
        fi
    fi
    if [[ $keep == no ]]; then
        [[ -n $best ]] || select_python
        if [[ -e $venv ]]; then say "$venv is incomplete or from elsewhere: making it anew"; fi
        say "using $best (Python $best_version)"
        mkdir -p "$venv"
        : >"$unfinished"
        "$best" -m venv --clear "$venv"
    fi
    # --clear took the mark away; from here until the end an interruption means starting anew.
    : >"$unfinished"

    if [[ $keep == yes ]]; then
        say "bringing $venv up to date with $lock"
    else
        say "installing $lock: about 3 GB to download, mostly torch and CUDA; this takes minutes"
    fi
    if ! patiently pip install --require-hashes --only-binary=:all: --retries 10 -r "$lock"; then
        # pip gave up in good order: what was whole before still is, under its old stamp.
        rm -f "$unfinished"
        say "pip could not install $lock (its reason stands above)"
        return 1
    fi
    # Should a later step fail, the next run need not download again.
    stamp_as "inputs unknown"
    rm -f "$unfinished"
    say "installing megatron-linear-cp, editable"
    pip install --no-deps --no-build-isolation --no-index --editable .
    checked "$python" -m pip check
    checked "$python" -c 'import importlib.util, megatron.core, torch
assert importlib.util.find_spec("megatron.linear_cp"), "megatron.linear_cp is not importable"'

    stamp_as "$(inputs)"
    say "$venv is ready after ${SECONDS} s"
}

main() {
    if [[ ${1:-} == --find-python ]]; then
        select_python
        printf '%s\n' "$best"
        return
    fi
    if (($#)); then
        say "unknown argument '$1'; the only one is --find-python"
        return 2
    fi
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    if ready; then return; fi
    # One at a time; whoever waited looks again, since the other may have done the work.
    exec 9>.venv.lock
    if command -v flock >/dev/null && ! flock -n 9; then
        say "another run is setting up $venv; waiting for it"
        flock 9
    fi
    if ready; then return; fi
    make_venv
}

# One line, so that bash reads nothing more from a file that may change meanwhile.
main "$@"; exit
