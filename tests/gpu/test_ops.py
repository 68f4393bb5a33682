# SPDX-License-Identifier: Apache-2.0
"""The ops through autograd on one GPU: outputs and every gradient against float64, by dtype."""

import pytest
import torch

pytest.importorskip("fla", reason="needs fla-core (and Triton), which is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from megatron.linear_cp import ContextParallelPlan
from megatron.linear_cp.ops import causal_conv1d, gated_delta_rule
from megatron.linear_cp.testing.layer import (
    LayerShape,
    layer_reference,
    make_layer_inputs,
    run_mode,
)
from megatron.linear_cp.testing.parity import assert_all_close, make_rule_inputs
from megatron.linear_cp.testing.reference import (
    causal_conv1d_reference,
    gated_delta_rule_reference,
)

ROW = [0, 1, 65, 195, 200, 640]
# The contract: fp32 1e-4, bf16 5e-3 and twice that for beta.
GATES = {torch.float32: 1e-4, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("dtype", GATES, ids=["fp32", "bf16"])
def test_kernel(dtype: torch.dtype) -> None:
    plan = ContextParallelPlan.build(ROW, None)
    x = make_rule_inputs(
        ROW[-1], num_key_heads=4, num_value_heads=8, key_dim=128, value_dim=128, dtype=dtype
    )
    x |= {
        "x": torch.randn(1, ROW[-1], 640).to(dtype),
        "weight": torch.randn(640, 4).to(dtype),
        "bias": torch.randn(640).to(dtype),
    }
    grads = {"o": torch.randn_like(x["v"]), "y": torch.randn_like(x["x"])}
    wide = {name: t.double().requires_grad_() for name, t in x.items()}
    ours = {name: t.cuda().requires_grad_() for name, t in x.items()}
    rule, conv = ("q", "k", "v", "g", "beta"), ("x", "weight", "bias")
    o = gated_delta_rule(*(ours[n] for n in rule), plan=plan)
    y = causal_conv1d(*(ours[n] for n in conv), plan=plan)
    torch.autograd.backward((o, y), (grads["o"].cuda(), grads["y"].cuda()))
    o_wide = gated_delta_rule_reference(*(wide[n] for n in rule), cu_seqlens=ROW)
    y_wide = causal_conv1d_reference(*(wide[n] for n in conv), cu_seqlens=ROW)
    torch.autograd.backward((o_wide, y_wide), (grads["o"].double(), grads["y"].double()))
    actual = {"o": o, "y": y} | {f"d{n}": t.grad for n, t in ours.items()}
    expected = {"o": o_wide, "y": y_wide} | {f"d{n}": t.grad for n, t in wide.items()}
    gates = dict.fromkeys(expected, GATES[dtype])
    gates["dbeta"] = 2 * gates["dbeta"]
    assert_all_close({n: t.cpu() for n, t in actual.items()}, expected, gates)


@pytest.mark.parametrize("dtype", GATES, ids=["fp32", "bf16"])
def test_fused_kernels_of_the_layer(dtype: torch.dtype) -> None:
    """Convolution with unit norm, gates and rule; bf16 rounds q, k and v between them."""
    shape = LayerShape(4, 8, 128, 128)
    tensors = make_layer_inputs(shape, ROW[-1], dtype)
    expected = layer_reference(tensors, shape, ROW)
    on_gpu = {name: t.cuda() for name, t in tensors.items()}
    actual = run_mode("chunkwise", ContextParallelPlan.build(ROW, None), on_gpu, shape)
    gate = GATES[dtype] if dtype == torch.float32 else 1e-2
    assert_all_close({n: t.cpu() for n, t in actual.items()}, expected, gate)
