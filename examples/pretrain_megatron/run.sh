#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train a small GDN hybrid for a few steps: run.sh [processes] [more flags of Megatron or of ours]
#
#   examples/pretrain_megatron/run.sh 2 --context-parallel-size 2 --linear-cp-mode chunkwise
set -euo pipefail

processes=${1:-1}
shift || true

model=(
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 128
    --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 16
    --experimental-attention-variant gated_delta_net --linear-attention-freq 4
    --linear-num-key-heads 2 --linear-num-value-heads 4
    --linear-key-head-dim 128 --linear-value-head-dim 128
    --normalization RMSNorm --swiglu --disable-bias-linear --qk-layernorm
    --position-embedding-type rope --rotary-percent 0.5 --no-rope-fusion
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --transformer-impl local
)
data=(
    --seq-length 512 --max-position-embeddings 512
    --tokenizer-type NullTokenizer --vocab-size 255
    --dataloader-type single --num-workers 0
)
training=(
    --micro-batch-size 1 --global-batch-size 4 --calculate-per-token-loss
    --train-iters 10 --lr 3e-3 --lr-decay-style constant --min-lr 0 --weight-decay 0
    --log-interval 1 --eval-interval 1000 --eval-iters 1
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --distributed-timeout-minutes 5
)

export CUDA_DEVICE_MAX_CONNECTIONS=1  # Megatron asks for it under TP and CP
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec torchrun --nproc-per-node "$processes" "$here/pretrain.py" \
    "${model[@]}" "${data[@]}" "${training[@]}" "$@"
