# SPDX-License-Identifier: Apache-2.0
"""The Megatron module with given weights: one rank's run, the fp64 reference, the parts joined.

The same functions serve gloo ranks on CPU, where the stand-in for CUDA is switched on, and GPUs.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron.linear_cp import TransformerConfig
from megatron.linear_cp.layout import dense_token_ranges, rank_indices, token_ranges
from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.layer import LayerShape, layer_reference

TOKEN_TENSORS = ("out", "dhidden")
_SMALL = LayerShape(num_key_heads=4, num_value_heads=8, key_head_dim=8, value_head_dim=4)


@dataclass(frozen=True)
class ModuleCase:
    """What to run.

    Attributes:
        mode, layout, state_exchange: of the config.
        dtype: of weights and activations.
        row: boundaries of packed input, or None for ``dense``.
        dense: ``(length, batch)``.
        shape: heads; the convolution has a bias.
        hidden: hidden size.
        device: ``"cpu"`` or ``"cuda"``.
        config: further fields of the config.
    """

    mode: str = "chunkwise"
    layout: str = "zigzag"
    state_exchange: str = "scan"
    dtype: torch.dtype = torch.float64
    row: tuple[int, ...] | None = None
    dense: tuple[int, int] = (16, 3)
    shape: LayerShape = _SMALL
    hidden: int = 16
    device: str = "cpu"
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Of the sequences, packed or dense."""
        if self.row is not None:
            return tuple(self.row)
        length, batch = self.dense
        return tuple(length * i for i in range(batch + 1))

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """The stand-in for CUDA on CPU, nothing on a GPU."""
        return cpu_cuda() if self.device == "cpu" else contextlib.nullcontext()


def make_config(case: ModuleCase, context_parallel_size: int, **changes: Any) -> TransformerConfig:
    """The config of one layer."""
    return TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=2,
        context_parallel_size=context_parallel_size,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=1,
        linear_num_key_heads=case.shape.num_key_heads,
        linear_num_value_heads=case.shape.num_value_heads,
        linear_key_head_dim=case.shape.key_head_dim,
        linear_value_head_dim=case.shape.value_head_dim,
        linear_conv_kernel_dim=case.shape.conv_kernel_size,
        linear_cp_mode=case.mode,
        linear_cp_layout=case.layout,
        linear_cp_state_exchange=case.state_exchange,
        normalization="RMSNorm",
        activation_func=F.silu,
        transformer_impl="local",
        params_dtype=case.dtype,
        bf16=case.dtype == torch.bfloat16,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        **{**case.config, **changes},
    )


def make_state(case: ModuleCase) -> dict[str, Tensor]:
    """Parameters by the module's names; slow decay, so that a leak cannot hide."""
    generator = torch.Generator().manual_seed(7)
    shape, hidden = case.shape, case.hidden

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    heads, value = shape.num_value_heads, shape.value_head_dim
    width = shape.conv_dim + heads * value + 2 * heads
    state = {
        "in_proj.weight": normal(width, hidden) / hidden**0.5,
        "conv1d.weight": normal(shape.conv_dim, 1, shape.conv_kernel_size),
        "conv1d.bias": normal(shape.conv_dim),
        "dt_bias": normal(heads),
        "A_log": -3.0 + 0.3 * normal(heads),
        "out_norm.weight": 1 + 0.1 * normal(value),
        "out_proj.weight": normal(hidden, heads * value) / (heads * value) ** 0.5,
    }
    return {name: x.to(case.dtype) for name, x in state.items()}


def shard_state(
    state: Mapping[str, Tensor], shape: LayerShape, rank: int, size: int
) -> dict[str, Tensor]:
    """A tensor-parallel rank's part: every section of the fused projections is cut by itself."""
    heads, value = shape.num_value_heads, shape.value_head_dim
    qk = shape.num_key_heads * shape.key_head_dim
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


def make_tokens(case: ModuleCase) -> tuple[Tensor, Tensor]:
    """Hidden states and output gradients ``[tokens, hidden]`` in global order."""
    tokens = case.boundaries[-1]
    generator = torch.Generator().manual_seed(tokens)
    both = torch.randn(2, tokens, case.hidden, generator=generator, dtype=torch.float64)
    hidden, grad = both.to(case.dtype)
    return hidden, grad


def build_module(case: ModuleCase, config: TransformerConfig, groups: Any) -> torch.nn.Module:
    """The module with this tensor-parallel rank's weights."""
    from megatron.linear_cp.gated_delta_net import GatedDeltaNet
    from megatron.linear_cp.layer_specs import get_gated_delta_net_module_spec

    spec = get_gated_delta_net_module_spec(config)
    module = GatedDeltaNet(
        config, spec.submodules, layer_number=1, conv_bias=True, pg_collection=groups
    )
    state = shard_state(make_state(case), case.shape, groups.tp.rank(), groups.tp.size())
    module.load_state_dict(state, strict=True)
    return module.to(case.device)


def context_parallel_groups() -> Any:
    """All ranks as one CP group, and TP groups of one rank (the weights are loaded whole)."""
    return SimpleNamespace(tp=dist.new_subgroups(1)[0], cp=dist.group.WORLD)


def local_inputs(case: ModuleCase, groups: Any) -> tuple[Tensor, Tensor, Tensor, Any]:
    """This rank's global token indices, hidden states and output gradient, and its params."""
    size, rank = groups.cp.size(), groups.cp.rank()
    params = None
    if case.row is None:
        length, batch = case.dense
        ranges = dense_token_ranges(length, batch, size, case.layout)
    else:
        batch = 1
        ranges = token_ranges(list(case.row), size, case.layout)
        cu = torch.tensor(case.row, dtype=torch.int32, device=case.device)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    index = torch.from_numpy(rank_indices(ranges, rank))
    hidden, grad = (
        x[index].view(batch, -1, case.hidden).transpose(0, 1).contiguous().to(case.device)
        for x in make_tokens(case)
    )
    return index, hidden, grad, params


def run_module(case: ModuleCase) -> dict[str, Tensor]:
    """Forward and backward of this rank's tokens, every rank in one CP group.

    Returns:
        ``out`` and ``dhidden [T, hidden]``, the gradient ``d<name>`` of every parameter, and
        ``index [T]``, the global positions of the rows.
    """
    groups = context_parallel_groups()
    config = make_config(case, groups.cp.size())
    with case.on_device():
        module = build_module(case, config, groups)
        index, hidden, grad, params = local_inputs(case, groups)
        out, dhidden = forward_backward(module, hidden, grad, params)
    flat = {"out": out.transpose(0, 1).flatten(0, 1), "dhidden": dhidden.transpose(0, 1)}
    flat["dhidden"] = flat["dhidden"].flatten(0, 1)
    return flat | gradients(module) | {"index": index}


def forward_backward(
    module: torch.nn.Module, hidden: Tensor, grad: Tensor, params: Any
) -> tuple[Tensor, Tensor]:
    """Output and gradient of the input; parameters accumulate theirs."""
    hidden = hidden.detach().requires_grad_()
    out, bias = module(hidden, None, packed_seq_params=params)
    assert bias is None
    out.backward(grad)
    assert hidden.grad is not None
    return out.detach(), hidden.grad


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    """``d<name>`` of every parameter; none may be missing."""
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            raise AssertionError(f"no gradient reached {name}")
        found[f"d{name}"] = parameter.grad
    return found


def assemble_module(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tokens in global order; parameter gradients added up over context-parallel ranks."""
    merged = {}
    index = torch.cat([part["index"] for part in parts])
    for name in parts[0]:
        if name in TOKEN_TENSORS:
            rows = torch.cat([part[name] for part in parts])
            merged[name] = torch.empty_like(rows).index_copy_(0, index, rows)
        elif name != "index":
            merged[name] = torch.stack([part[name] for part in parts]).sum(0)
    return merged


def module_reference(case: ModuleCase) -> dict[str, Tensor]:
    """Output and every gradient in float64 over whole sequences; the rule token by token."""
    state = {n: x.double().requires_grad_() for n, x in make_state(case).items()}
    hidden, grad = (x.double() for x in make_tokens(case))
    hidden.requires_grad_()
    shape, row = case.shape, case.boundaries
    heads, value = shape.num_value_heads, shape.value_head_dim
    projected = (hidden @ state["in_proj.weight"].T)[None]
    qkv, gate, beta, alpha = projected.split([shape.conv_dim, heads * value, heads, heads], -1)
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
    rule_out = layer_reference(probe, shape, row)["out"].requires_grad_()
    normed = F.rms_norm(rule_out, (value,), state["out_norm.weight"], eps=1e-5)
    gated = normed * F.silu(gate.unflatten(-1, (heads, value)))
    out = gated.flatten(2)[0] @ state["out_proj.weight"].T
    out.backward(grad, retain_graph=True)
    assert rule_out.grad is not None
    grads = layer_reference(probe | {"grad_out": rule_out.grad}, shape, row)
    torch.autograd.backward(list(core.values()), [grads[f"d{n}"] for n in core])
    assert hidden.grad is not None
    found = {"out": out.detach(), "dhidden": hidden.grad}
    for name, leaf in state.items():
        assert leaf.grad is not None
        found[f"d{name}"] = leaf.grad
    return found


def run_tensor_parallel(
    case: ModuleCase, sequence_parallel: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """TP 2 and CP over the other ranks: this rank's results, and what they should be."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    cp = dist.get_world_size() // 2
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=cp)
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    rank = groups.tp.rank()
    config = make_config(
        case, cp, tensor_model_parallel_size=2, sequence_parallel=sequence_parallel
    )

    def mine(x: Tensor) -> Tensor:
        return x.chunk(2)[rank] if sequence_parallel else x

    with case.on_device():
        module = build_module(case, config, groups)
        index, hidden, grad, params = local_inputs(case, groups)
        out, dhidden = forward_backward(module, mine(hidden), mine(grad), params)
    grads = gradients(module)
    for name, gradient in grads.items():
        dist.all_reduce(gradient, group=groups.cp)
        if sequence_parallel and name == "dout_norm.weight":
            # What Megatron-Core does at the end of a step for weights marked sequence_parallel.
            dist.all_reduce(gradient, group=groups.tp)
    expected = module_reference(case)
    weights = {n.removeprefix("d"): g for n, g in expected.items() if n not in TOKEN_TENSORS}
    sharded = shard_state(weights, case.shape, rank, 2)
    tokens = {name: mine(expected[name][index]) for name in TOKEN_TENSORS}
    actual = {"out": out.squeeze(1), "dhidden": dhidden.squeeze(1)}
    return actual | grads, tokens | {f"d{name}": x for name, x in sharded.items()}
