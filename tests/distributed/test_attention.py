# SPDX-License-Identifier: Apache-2.0
"""Softmax attention under CP against a plain fp64 softmax; RoPE that follows the micro-batch."""

import math
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from megatron.linear_cp.attention import CoreAttention, SelfAttention
from megatron.linear_cp.comm import count_traffic
from megatron.linear_cp.packed_seq_params import single_rank_group
from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.parity import assert_all_close
from megatron.linear_cp.testing.workers import run_distributed

HEADS, GROUPS, DIM, VALUE_DIM = 6, 2, 8, 5
GATES = {torch.float64: 1e-12, torch.float32: 1e-5}
# One sequence; uneven ones; one chunk of one token a rank; no tokens at the end and inside.
ROWS: dict[tuple[str, int], list[list[int]]] = {
    ("zigzag", 1): [[0, 7], [0, 3, 3, 20, 21, 21]],
    ("zigzag", 2): [[0, 8], [0, 4, 16, 16, 44, 44]],
    ("zigzag", 4): [[0, 8, 32, 32, 96, 96]],
    ("contiguous", 1): [[0, 3, 3, 20, 21]],
    ("contiguous", 2): [[0, 1, 1, 15, 20, 20]],
    ("contiguous", 4): [[0, 3, 3, 30, 40, 44]],
}
Tensors = dict[str, torch.Tensor]


def stored(boundaries: list[int], layout: str, cp: int, rank: int) -> list[int]:
    """Global positions that a rank stores, written down once more from the layouts' definition."""
    if layout == "contiguous" or cp == 1:
        span = boundaries[-1] // cp
        return list(range(rank * span, (rank + 1) * span))
    positions: list[int] = []
    for start, stop in pairwise(boundaries):
        chunk = (stop - start) // (2 * cp)
        for slot in (rank, 2 * cp - 1 - rank):
            positions += range(start + slot * chunk, start + (slot + 1) * chunk)
    return positions


def make_inputs(tokens: int) -> Tensors:
    """Inputs of a packed buffer and the gradient of its output, fp64, in global order."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = {
        "q": (tokens, HEADS, DIM),
        "k": (tokens, GROUPS, DIM),
        "v": (tokens, GROUPS, VALUE_DIM),
        "do": (tokens, HEADS * VALUE_DIM),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def reference(inputs: Tensors, boundaries: list[int], scale: float) -> Tensors:
    """Softmax row by row of the score matrix, sequence by sequence, gradients by autograd."""
    q, k, v = (inputs[name].clone().requires_grad_() for name in "qkv")
    outputs = []
    for start, stop in pairwise(boundaries):
        for t in range(start, stop):
            heads = []
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                scores = scale * (k[start : t + 1, group] @ q[t, head])
                heads.append(torch.softmax(scores, 0) @ v[start : t + 1, group])
            outputs.append(torch.cat(heads))
    out = torch.stack(outputs)
    grads = torch.autograd.grad(out, (q, k, v), inputs["do"])
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


@cache
def expected(boundaries: tuple[int, ...], scale: float = DIM**-0.5) -> Tensors:
    return reference(make_inputs(boundaries[-1]), list(boundaries), scale)


def packed(boundaries: list[int], **changes: Any) -> PackedSeqParams:
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
    longest = int(cu_seqlens.diff().max())
    values = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        **changes,
    }
    return PackedSeqParams(**values)


def make_core(layout: str = "zigzag", group: Any = None, **changes: Any) -> CoreAttention:
    arguments = {
        "config": SimpleNamespace(linear_cp_layout=layout, attention_dropout=0.0),
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "pg_collection": SimpleNamespace(cp=dist.group.WORLD if group is None else group),
        **changes,
    }
    return CoreAttention(**arguments)


def run_core_packed(layout: str, boundaries: list[int], dtype: torch.dtype) -> Tensors:
    """Outputs and gradients of this rank's tokens."""
    mine = stored(boundaries, layout, dist.get_world_size(), dist.get_rank())
    local = {name: x[mine].to(dtype) for name, x in make_inputs(boundaries[-1]).items()}
    q, k, v = (local[name].requires_grad_() for name in "qkv")
    core = make_core(layout)
    out = core(
        q,
        k,
        v,
        None,
        attn_mask_type=AttnMaskType.padding_causal,
        attention_bias=None,
        packed_seq_params=packed(boundaries),
    )
    grads = torch.autograd.grad(out, (q, k, v), local["do"])
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def join(parts: list[Tensors], positions: Callable[[int], list[int]], total: int) -> Tensors:
    """Put the rows of all ranks into global order."""
    joined = {}
    for name, x in parts[0].items():
        joined[name] = torch.full((total, *x.shape[1:]), math.nan, dtype=x.dtype)
        for rank, part in enumerate(parts):
            joined[name][positions(rank)] = part[name]
    return joined


@pytest.mark.parametrize("dtype", GATES, ids=["fp64", "fp32"])
@pytest.mark.parametrize(("layout", "cp"), ROWS, ids=lambda value: str(value))
def test_core_attention_packed(layout: str, cp: int, dtype: torch.dtype) -> None:
    for boundaries in ROWS[layout, cp]:
        parts = run_distributed(run_core_packed, cp, layout, boundaries, dtype)
        actual = join(parts, partial(stored, boundaries, layout, cp), boundaries[-1])
        assert_all_close(actual, expected(tuple(boundaries)), GATES[dtype])


def run_core_dense(layout: str, seq_len: int, batch: int) -> Tensors:
    mine = stored([0, seq_len], layout, dist.get_world_size(), dist.get_rank())
    local = {
        name: x.unflatten(0, (batch, seq_len)).transpose(0, 1)[mine]
        for name, x in make_inputs(batch * seq_len).items()
    }
    q, k, v = (local[name].requires_grad_() for name in "qkv")
    mask = torch.ones(1, 1, seq_len, seq_len, dtype=torch.bool)
    out = make_core(layout)(
        q, k, v, mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    )
    assert out.shape == (len(mine), batch, HEADS * VALUE_DIM)
    grads = torch.autograd.grad(out, (q, k, v), local["do"])
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_core_attention_dense_batch(layout: str, cp: int) -> None:
    seq_len, batch = 16, 3
    parts = run_distributed(run_core_dense, cp, layout, seq_len, batch)
    actual = join(parts, partial(stored, [0, seq_len], layout, cp), seq_len)
    boundaries = tuple(range(0, batch * seq_len + 1, seq_len))
    want = {
        name: x.unflatten(0, (batch, seq_len)).transpose(0, 1)
        for name, x in expected(boundaries).items()
    }
    assert_all_close(actual, want, 1e-12)


def run_padded(lengths: list[int], stored_as: list[int]) -> bool:
    """Whether this rank's real rows are the same whatever the padding rows hold."""
    real = [
        start + offset
        for start, length in zip(stored_as[:-1], lengths, strict=True)
        for offset in range(length)
    ]
    padding = sorted(set(range(stored_as[-1])) - set(real))
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    boundaries = torch.tensor(stored_as, dtype=torch.int32)
    mine = stored(stored_as, "zigzag", dist.get_world_size(), dist.get_rank())
    rows = [i for i, position in enumerate(mine) if position in real]
    assert 0 < len(rows) < len(mine)
    outputs = []
    for filler in (0.0, 1e3):
        inputs = make_inputs(stored_as[-1])
        for x in inputs.values():
            x[padding] = filler
        params = packed(
            cu_seqlens.tolist(), cu_seqlens_q_padded=boundaries, cu_seqlens_kv_padded=boundaries
        )
        q, k, v = (inputs[name][mine] for name in "qkv")
        outputs.append(make_core()(q, k, v, packed_seq_params=params)[rows])
    return torch.equal(*outputs)


def test_padding_rows_change_no_real_row() -> None:
    """Each sequence is stored with padding at its end; the padded boundaries say where."""
    assert run_distributed(run_padded, 2, [5, 13], [0, 8, 24]) == [True, True]


def run_counted(boundaries: list[int]) -> tuple[int, int, int, int]:
    mine = stored(boundaries, "zigzag", dist.get_world_size(), dist.get_rank())
    local = {name: x[mine].requires_grad_() for name, x in make_inputs(boundaries[-1]).items()}
    core, params = make_core(), packed(boundaries)
    with count_traffic() as forward:
        out = core(local["q"], local["k"], local["v"], None, packed_seq_params=params)
    with count_traffic() as backward:
        out.sum().backward()
    return forward.collectives, forward.bytes_sent, backward.collectives, backward.bytes_sent


def test_bytes_moved() -> None:
    """Forward, the local keys and values go to each peer; backward, their gradients come back."""
    for cp in (1, 4):
        moved = (cp - 1) * (32 // cp) * GROUPS * (DIM + VALUE_DIM) * 8
        collectives = int(cp > 1)
        assert (
            run_distributed(run_counted, cp, [0, 8, 32])
            == [(collectives, moved, collectives, moved)] * cp
        )


def test_softmax_scale_and_plain_heads() -> None:
    inputs = make_inputs(9)
    core = make_core(group=single_rank_group(), softmax_scale=0.7)
    out = core(inputs["q"], inputs["k"], inputs["v"], packed_seq_params=packed([0, 9]))
    assert_all_close({"out": out}, {"out": expected((0, 9), 0.7)["out"]}, 1e-12)
    # As many groups as heads: the same as each group's heads written out.
    k, v = (inputs[name].repeat_interleave(HEADS // GROUPS, 1) for name in "kv")
    assert_all_close(
        {"out": core(inputs["q"], k, v, packed_seq_params=packed([0, 9]))}, {"out": out}, 1e-12
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_dropout", 0.1),
        ("softmax_type", "learnable"),
        ("window_size", (128, 0)),
        ("qk_clip", True),
    ],
)
def test_config_that_is_not_computed(name: str, value: Any) -> None:
    config = SimpleNamespace(**{"attention_dropout": 0.0, name: value})
    with pytest.raises(ValueError, match=f"{name}=.* only, got"):
        make_core(group=object(), config=config)


def test_requests_that_are_not_computed() -> None:
    group = single_rank_group()
    with pytest.raises(ValueError, match=r"is causal, got AttnMaskType\.no_mask"):
        make_core(group=group, attn_mask_type=AttnMaskType.no_mask)
    with pytest.raises(ValueError, match="self attention, got 'cross'"):
        make_core(group=group, attention_type="cross")
    core = make_core(group=group)
    q, k, v = (torch.randn(4, 1, 2, 8) for _ in range(3))
    with pytest.raises(ValueError, match=r"is causal, got AttnMaskType\.padding:"):
        core(q, k, v, attn_mask_type=AttnMaskType.padding)
    with pytest.raises(ValueError, match="no attention_bias"):
        core(q, k, v, attention_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="no padding mask for dense input"):
        core(q, k, v, torch.ones(1), attn_mask_type=AttnMaskType.padding_causal)
    with pytest.raises(ValueError, match=r"\(4, 1, 2, 8\).* packed"):
        core(q, k, v, packed_seq_params=packed([0, 4]))
    with pytest.raises(ValueError, match="must cover all of it"):
        core(q[:, 0], k[:, 0], v[:, 0], packed_seq_params=packed([0, 5]))


# ------------------------------------------------------------------- the whole attention module


def make_attention(layout: str = "zigzag") -> SelfAttention:
    """A module with output gate, q/k norms and grouped heads; equal weights on every rank."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.attention import SelfAttentionSubmodules

    from megatron.linear_cp import TransformerConfig
    from megatron.linear_cp.norm import RMSNorm

    cp = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    model_parallel_cuda_manual_seed(7)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        context_parallel_size=cp,
        attention_dropout=0.0,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        attention_output_gate=True,
        linear_cp_layout=layout,
        params_dtype=torch.float64,
        init_method_std=0.3,
    )
    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=CoreAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=RMSNorm,
        k_layernorm=RMSNorm,
    )
    return SelfAttention(
        config,
        submodules,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        cp_comm_type="p2p",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"]),
    )


def rotary(seq_len: int, is_packed: bool, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What GPTModel hands to its layers."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rope = RotaryEmbedding(kv_channels=8, rotary_percent=0.5, cp_group=dist.group.WORLD)
    table = rope(seq_len, packed_seq=is_packed, cp_group=group).double()
    return table, table


def hidden_and_gradient(tokens: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (tokens, batch, 24)
    first, second = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return first, second


def run_attention(
    attention: SelfAttention, group: Any, params: PackedSeqParams | None, row: list[int], batch: int
) -> Tensors:
    """Output and input gradient of this rank's tokens; weight gradients summed over the group."""
    layout = attention.config.linear_cp_layout
    mine = stored(row, layout, group.size(), group.rank())
    hidden, upstream = (x[mine] for x in hidden_and_gradient(row[-1], batch))
    hidden.requires_grad_()
    longest = max(b - a for a, b in pairwise(row))
    out, _ = attention(
        hidden,
        attention_mask=None,
        rotary_pos_emb=rotary(longest, params is not None, group),
        packed_seq_params=params,
    )
    parameters = dict(attention.named_parameters())
    grads = torch.autograd.grad(out, [hidden, *parameters.values()], upstream)
    result = {"out": out.detach(), "dx": grads[0]}
    for name, grad in zip(parameters, grads[1:], strict=True):
        if group.size() > 1:
            dist.all_reduce(grad, group=group)
        result[name] = grad
    return result


def train_step(row: list[int] | None, seq_len: int, batch: int, layout: str = "zigzag") -> Tensors:
    with cpu_cuda():
        attention = make_attention(layout)
        params = None if row is None else packed(row)
        return run_attention(attention, dist.group.WORLD, params, row or [0, seq_len], batch)


@pytest.mark.parametrize(
    ("row", "seq_len", "batch"),
    [([0, 8, 24, 24, 52], 52, 1), (None, 16, 3)],
    ids=["packed", "dense"],
)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_self_attention_with_rope_equals_one_rank(
    row: list[int] | None, seq_len: int, batch: int, layout: str
) -> None:
    [want] = run_distributed(train_step, 1, row, seq_len, batch)
    parts = run_distributed(train_step, 2, row, seq_len, batch, layout)
    _assert_same_layer(parts, want, row or [0, seq_len], layout)


def _assert_same_layer(
    parts: list[Tensors], want: Tensors, row: list[int], layout: str = "zigzag"
) -> None:
    rows = [{name: part[name] for name in ("out", "dx")} for part in parts]
    actual = join(rows, partial(stored, row, layout, len(parts)), row[-1])
    weights = {name: x for name, x in parts[0].items() if name not in actual}
    assert len(weights) == 4
    assert_all_close({**actual, **weights}, want, 1e-12)


def follow_groups(row: list[int]) -> tuple[list[Tensors], bool]:
    """One module built for 4 ranks runs micro-batches at 4, 2, 1 (both spellings), and 4 again."""
    with cpu_cuda():
        attention = make_attention()
        world: Any = dist.group.WORLD
        pair, _ = dist.new_subgroups(2)
        alone, _ = dist.new_subgroups(1)
        before = (dict(vars(attention)), dict(vars(attention.pg_collection)))
        results = [
            run_attention(attention, group, packed(row, **settings), row, 1)
            for group, settings in (
                (world, {}),
                (pair, {"cp_group": pair, "local_cp_size": 2}),
                (alone, {"cp_group": alone, "local_cp_size": 1}),
                (alone, {"local_cp_size": 1}),
                (world, {"cp_group": world, "local_cp_size": 4}),
            )
        ]
        after = (dict(vars(attention)), dict(vars(attention.pg_collection)))
    return results, before == after


def test_rope_and_attention_follow_the_group_of_the_micro_batch() -> None:
    row = [0, 8, 24, 24, 56]
    [want] = run_distributed(train_step, 1, row, row[-1], 1)
    by_rank = run_distributed(follow_groups, 4, row)
    assert all(unchanged for _, unchanged in by_rank)
    for run, size in enumerate((4, 2, 1, 1, 4)):
        for first in range(0, 4, size):
            parts = [results[run] for results, _ in by_rank[first : first + size]]
            _assert_same_layer(parts, want, row)


class RecordingCore(torch.nn.Module):
    """Stands where Transformer Engine's attention does, and keeps the boundaries it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[PackedSeqParams, int]] = []

    def forward(
        self, query: torch.Tensor, *args: Any, packed_seq_params: PackedSeqParams, **kwargs: Any
    ) -> torch.Tensor:
        self.seen.append((packed_seq_params, query.shape[0]))
        return query.flatten(1)


def boundaries_of_another_core(layout: str) -> list[Any]:
    """Two layers' calls with real lengths 7 and 20 stored as 8 and 24."""
    group = dist.group.WORLD
    assert group is not None
    real, stored_as = (torch.tensor(x, dtype=torch.int32) for x in ([0, 7, 27], [0, 8, 32]))
    params = PackedSeqParams("thd", real, real, stored_as, stored_as, 20, 20)
    with cpu_cuda():
        attention = make_attention(layout)
        attention.core_attention = RecordingCore()
        hidden = torch.randn(32 // group.size(), 1, 24, dtype=torch.float64)
        for _ in range(2):
            attention(
                hidden,
                attention_mask=None,
                rotary_pos_emb=rotary(24, True, group),
                packed_seq_params=params,
            )
    (first, rows), (second, _) = attention.core_attention.seen
    assert params.cu_seqlens_q is real
    sides = (
        first.cu_seqlens_q,
        first.cu_seqlens_kv,
        first.cu_seqlens_q_padded,
        first.cu_seqlens_kv_padded,
    )
    return [
        second is first,
        rows,
        [side.tolist() for side in sides],
        (first.max_seqlen_q, first.max_seqlen_kv),
    ]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_another_core_is_told_of_every_stored_row(layout: str) -> None:
    for result in run_distributed(boundaries_of_another_core, 2, layout):
        assert result == [True, 16, [[0, 8, 32]] * 4, (24, 24)]
