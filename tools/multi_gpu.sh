#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that wants several GPUs of one host, over NCCL: checks first, then times, then the table.
#
#   tools/multi_gpu.sh [folder for logs and figures] [more flags of bench_multi_gpu.py]
#
# Takes all GPUs that are visible. Exit status 1 if anything failed; what comes after it runs anyway.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
folder=${1:-out}
shift || true
if [[ $folder == -* ]]; then
    echo "error: the first argument is a folder, then come flags; got $folder" >&2
    exit 1
fi
python=${PYTHON:-.venv/bin/python}
if ! gpus=$("$python" -W ignore -c "import torch; print(torch.cuda.device_count())"); then
    echo "error: $python cannot import torch; make venv, or PYTHON=/path/to/python" >&2
    exit 1
fi
if ((gpus < 2)); then
    echo "error: $gpus GPUs are visible; this needs 2 or more" >&2
    exit 1
fi
mkdir -p "$folder" || exit 1
# The CP sizes of one training run are powers of two.
dynamic=2
while ((2 * dynamic <= gpus)); do ((dynamic *= 2)); done
status=0

run() {
    local name=$1
    shift
    echo "== $name"
    if ! "$@" 2>&1 | tee "$folder/$name.txt"; then
        echo "== $name failed" >&2
        status=1
    fi
}

torchrun=("$python" -m torch.distributed.run --nproc-per-node)
run doctor "$python" -m megatron.linear_cp doctor
run tests "$python" -m pytest tests/gpu --timeout=900 --durations=15
run demo "$python" examples/train_hybrid/train.py --output "$folder/demo_losses.png"
run functional "${torchrun[@]}" "$gpus" examples/functional/train.py
run dynamic_cp "${torchrun[@]}" "$dynamic" examples/rl_dynamic_cp/train.py
run benchmark "${torchrun[@]}" "$gpus" tools/bench_multi_gpu.py --json "$folder/multi_gpu.json" "$@"
exit "$status"
