# SPDX-License-Identifier: Apache-2.0
"""The Megatron module whole: projections, convolution, rule, gated norm, under every mode."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.linear_cp import TransformerConfig
from megatron.linear_cp.layout import dense_token_ranges, rank_indices, token_ranges
from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.layer import LayerShape, layer_reference
from megatron.linear_cp.testing.parity import assert_all_close
from megatron.linear_cp.testing.workers import run_distributed

CASES = json.loads((Path(__file__).parent.parent / "cases" / "packed_rows.json").read_text())
MODES = ("headwise", "chunkwise", "all_gather")
SHAPE = LayerShape(num_key_heads=4, num_value_heads=8, key_head_dim=8, value_head_dim=4)
HIDDEN = 16
# A dense micro-batch of three samples, and packed rows whose sequences cross cuts.
DENSE = {"length": 16, "batch": 3}


def make_config(
    mode: str, layout: str, cp: int, dtype: torch.dtype, **changes: Any
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        context_parallel_size=cp,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=1,
        linear_num_key_heads=SHAPE.num_key_heads,
        linear_num_value_heads=SHAPE.num_value_heads,
        linear_key_head_dim=SHAPE.key_head_dim,
        linear_value_head_dim=SHAPE.value_head_dim,
        linear_cp_mode=mode,
        linear_cp_layout=layout,
        normalization="RMSNorm",
        activation_func=F.silu,
        transformer_impl="local",
        params_dtype=dtype,
        **changes,
    )


def make_state(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Parameters by the module's names; slow decay, so that a leak cannot hide."""
    generator = torch.Generator().manual_seed(7)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    heads, value = SHAPE.num_value_heads, SHAPE.value_head_dim
    width = SHAPE.conv_dim + heads * value + 2 * heads
    state = {
        "in_proj.weight": normal(width, HIDDEN) / HIDDEN**0.5,
        "conv1d.weight": normal(SHAPE.conv_dim, 1, SHAPE.conv_kernel_size),
        "conv1d.bias": normal(SHAPE.conv_dim),
        "dt_bias": normal(heads),
        "A_log": -3.0 + 0.3 * normal(heads),
        "out_norm.weight": 1 + 0.1 * normal(value),
        "out_proj.weight": normal(HIDDEN, heads * value) / (heads * value) ** 0.5,
    }
    return {name: x.to(dtype) for name, x in state.items()}


def make_tokens(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and output gradients ``[tokens, hidden]`` in global order."""
    generator = torch.Generator().manual_seed(tokens)
    both = torch.randn(2, tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    return both[0], both[1]


def run_module(mode: str, layout: str, dtype: torch.dtype, row: list[int] | None) -> dict[str, Any]:
    """Forward and backward of this rank's tokens; packed if ``row``, else the dense batch."""
    from megatron.linear_cp.gated_delta_net import GatedDeltaNet
    from megatron.linear_cp.layer_specs import get_gated_delta_net_module_spec

    group = dist.group.WORLD
    assert group is not None
    config = make_config(mode, layout, group.size(), dtype)
    # The weights are loaded whole: any group of one rank serves as TP.
    groups = SimpleNamespace(tp=dist.new_subgroups(1)[0], cp=group)
    with cpu_cuda():
        spec = get_gated_delta_net_module_spec(config)
        config.perform_initialization = False
        module = GatedDeltaNet(
            config, spec.submodules, layer_number=1, conv_bias=True, pg_collection=groups
        )
        module.load_state_dict(make_state(dtype), strict=True)
        if row is None:
            total, batch = DENSE["length"] * DENSE["batch"], DENSE["batch"]
            ranges = dense_token_ranges(DENSE["length"], batch, group.size(), layout)
            params = None
        else:
            total, batch = row[-1], 1
            ranges = token_ranges(row, group.size(), layout)
            cu = torch.tensor(row, dtype=torch.int32)
            params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
        index = torch.from_numpy(rank_indices(ranges, group.rank()))
        hidden, grad = (
            x[index].view(batch, -1, HIDDEN).transpose(0, 1) for x in make_tokens(total, dtype)
        )
        hidden = hidden.contiguous().requires_grad_()
        out, bias = module(hidden, None, packed_seq_params=params)
        assert bias is None
        out.backward(grad)
    flat = {
        "out": out.detach().transpose(0, 1).flatten(0, 1),
        "dhidden": hidden.grad.transpose(0, 1).flatten(0, 1),
    }
    return flat | {f"d{n}": p.grad for n, p in module.named_parameters()} | {"index": index}


@cache
def reference(row: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The module in float64 over whole sequences; the rule token by token."""
    state = {n: x.double().requires_grad_() for n, x in make_state(dtype).items()}
    hidden, grad = (x.double() for x in make_tokens(row[-1], dtype))
    hidden.requires_grad_()
    heads, value = SHAPE.num_value_heads, SHAPE.value_head_dim
    projected = (hidden @ state["in_proj.weight"].T)[None]
    qkv, gate, beta, alpha = projected.split([SHAPE.conv_dim, heads * value, heads, heads], -1)

    core = {
        "qkv": qkv,
        "beta": beta,
        "alpha": alpha,
        "conv_weight": state["conv1d.weight"].squeeze(1),
        "conv_bias": state["conv1d.bias"],
        "A_log": state["A_log"],
        "dt_bias": state["dt_bias"],
    }
    # layer_reference differentiates the core itself: run it once for the output, and once more
    # with the gradient that the norm and projection give.
    probe = {n: x.detach() for n, x in core.items()}
    probe["grad_out"] = torch.zeros(1, row[-1], heads, value, dtype=torch.float64)
    rule_out = layer_reference(probe, SHAPE, row)["out"].requires_grad_()
    normed = F.rms_norm(rule_out, (value,), state["out_norm.weight"], eps=1e-5)
    gated = normed * F.silu(gate.unflatten(-1, (heads, value)))
    out = gated.flatten(2)[0] @ state["out_proj.weight"].T
    out.backward(grad, retain_graph=True)
    grads = layer_reference(probe | {"grad_out": rule_out.grad}, SHAPE, row)
    torch.autograd.backward(list(core.values()), [grads[f"d{n}"] for n in core])
    return {"out": out.detach(), "dhidden": hidden.grad} | {
        f"d{n}": x.grad for n, x in state.items()
    }


def whole(parts: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Tokens in global order; parameter gradients add up over context-parallel ranks."""
    merged = {}
    index = torch.cat([part["index"] for part in parts])
    for name in parts[0]:
        if name in ("out", "dhidden"):
            rows = torch.cat([part[name] for part in parts])
            merged[name] = torch.empty_like(rows).index_copy_(0, index, rows)
        elif name != "index":
            merged[name] = torch.stack([part[name] for part in parts]).sum(0)
    return merged


GATES = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", GATES, ids=["fp64", "fp32"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_packed(cp: int, layout: str, mode: str, dtype: torch.dtype) -> None:
    rows = [case["cu_seqlens"] for case in CASES[layout] if case["cp"] == max(cp, 2)]
    row = max((r for r in rows if r[-1] <= 384), key=len)
    parts = run_distributed(run_module, cp, mode, layout, dtype, row)
    assert_all_close(whole(parts), reference(tuple(row), dtype), GATES[dtype])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp", [1, 2])
def test_dense_batch_of_three(cp: int, layout: str, mode: str) -> None:
    row = tuple(DENSE["length"] * i for i in range(DENSE["batch"] + 1))
    parts = run_distributed(run_module, cp, mode, layout, torch.float64, None)
    assert_all_close(whole(parts), reference(row, torch.float64), 1e-12)


def shard_state(state: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """A tensor-parallel rank's part: every section of the fused projections is cut by itself."""
    heads, value = SHAPE.num_value_heads, SHAPE.value_head_dim
    qk = SHAPE.num_key_heads * SHAPE.key_head_dim
    conv = [qk, qk, heads * value]
    sections = {
        "in_proj.weight": [*conv, heads * value, heads, heads],
        "conv1d.weight": conv,
        "conv1d.bias": conv,
        "A_log": [heads],
        "dt_bias": [heads],
    }
    mine = dict(state)
    for name, widths in sections.items():
        parts = state[name].split(widths)
        mine[name] = torch.cat([part.chunk(size)[rank] for part in parts])
    mine["out_proj.weight"] = state["out_proj.weight"].chunk(size, dim=1)[rank]
    return mine


def run_tensor_parallel(mode: str, sequence_parallel: bool, row: list[int]) -> dict[str, Any]:
    """TP 2 x CP 2: this rank's gradients and the part of the whole model's that they are."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron.linear_cp.gated_delta_net import GatedDeltaNet
    from megatron.linear_cp.layer_specs import get_gated_delta_net_module_spec

    dtype = torch.float64
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    config = make_config(
        mode,
        "zigzag",
        2,
        dtype,
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        perform_initialization=False,
    )
    with cpu_cuda():
        spec = get_gated_delta_net_module_spec(config)
        module = GatedDeltaNet(
            config, spec.submodules, layer_number=1, conv_bias=True, pg_collection=groups
        )
        module.load_state_dict(shard_state(make_state(dtype), groups.tp.rank(), 2), strict=True)
        ranges = token_ranges(row, 2, "zigzag")
        index = torch.from_numpy(rank_indices(ranges, groups.cp.rank()))
        hidden, grad = (x[index].unsqueeze(1) for x in make_tokens(row[-1], dtype))
        if sequence_parallel:
            hidden, grad = (x.chunk(2)[groups.tp.rank()] for x in (hidden, grad))
        hidden = hidden.clone().requires_grad_()
        cu = torch.tensor(row, dtype=torch.int32)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
        out, _ = module(hidden, None, packed_seq_params=params)
        out.backward(grad)
    grads = {name: p.grad for name, p in module.named_parameters()}
    for name, gradient in grads.items():
        dist.all_reduce(gradient, group=groups.cp)
        if sequence_parallel and name == "out_norm.weight":
            # What Megatron-Core does at the end of a step for weights marked sequence_parallel.
            dist.all_reduce(gradient, group=groups.tp)
    expected = reference(tuple(row), dtype)
    wanted = shard_state(
        {n.removeprefix("d"): g for n, g in expected.items() if n not in ("out", "dhidden")},
        groups.tp.rank(),
        2,
    )
    tokens = {"out": expected["out"][index], "dhidden": expected["dhidden"][index]}
    if sequence_parallel:
        tokens = {name: x.chunk(2)[groups.tp.rank()] for name, x in tokens.items()}
    actual = {"out": out.detach().squeeze(1), "dhidden": hidden.grad.squeeze(1)}
    assert_all_close(actual | grads, tokens | wanted, 1e-12)
    return {"checked": len(grads)}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_tensor_parallel_times_context_parallel(mode: str, sequence_parallel: bool) -> None:
    results = run_distributed(run_tensor_parallel, 4, mode, sequence_parallel, [0, 16, 40, 64])
    assert [result["checked"] for result in results] == [7] * 4
