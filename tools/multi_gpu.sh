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
mkdir -p "$folder"
python=${PYTHON:-.venv/bin/python}
gpus=$("$python" -W ignore -c "import torch; print(torch.cuda.device_count())")
if [ "$gpus" -lt 2 ]; then
    echo "error: $gpus GPU is visible; this needs 2 or more" >&2
    exit 1
fi
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

torchrun=("$python" -m torch.distributed.run --nproc-per-node "$gpus")
run doctor "$python" -m megatron.linear_cp doctor
run tests "$python" -m pytest tests/gpu --timeout=900 --durations=15
run demo "$python" examples/train_hybrid/train.py --output "$folder/demo_losses.png"
run functional "${torchrun[@]}" examples/functional/train.py
run dynamic_cp "${torchrun[@]}" examples/rl_dynamic_cp/train.py
run benchmark "${torchrun[@]}" tools/bench_multi_gpu.py --json "$folder/multi_gpu.json" "$@"
exit "$status"
