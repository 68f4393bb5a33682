# SPDX-License-Identifier: Apache-2.0
"""Bad input: one clear error, the same on every rank, before anything is sent. Nobody hangs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.linear_cp import TransformerConfig, register_linear_cp_mode
from megatron.linear_cp.comm import count_traffic
from megatron.linear_cp.modes import linear_cp_mode_runs
from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.workers import run_distributed

RANKS = 4
HIDDEN = 16


def make_module(mode: str = "chunkwise", layout: str = "zigzag", key_heads: int = 4) -> Any:
    from megatron.linear_cp.gated_delta_net import GatedDeltaNet
    from megatron.linear_cp.layer_specs import get_gated_delta_net_module_spec

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        # The constructor's CP size is 1: what a micro-batch brings must be checked when it comes.
        context_parallel_size=1,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=1,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=2 * key_heads,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        linear_cp_mode=mode,
        linear_cp_layout=layout,
        normalization="RMSNorm",
        activation_func=F.silu,
        transformer_impl="local",
        perform_initialization=False,
    )
    groups = SimpleNamespace(tp=dist.new_subgroups(1)[0], cp=dist.group.WORLD)
    spec = get_gated_delta_net_module_spec(config)
    module = GatedDeltaNet(config, spec.submodules, layer_number=1, pg_collection=groups)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    return module


def packed(cu: Any, **changes: Any) -> PackedSeqParams:
    boundaries = torch.tensor(cu)
    return PackedSeqParams(
        **{"qkv_format": "thd", "cu_seqlens_q": boundaries, "cu_seqlens_kv": boundaries} | changes
    )


def call(case: str) -> str:
    """Make one bad call; return the error and how many collectives came before it."""
    world = dist.group.WORLD
    assert world is not None
    settings: dict[str, Any] = {}
    tokens, batch, keywords = 8, 1, {}
    width = HIDDEN
    params: Any = packed([0, 16, 32])
    match case:
        case "heads do not fit the micro-batch's CP size":
            settings = {"mode": "headwise", "key_heads": 2}
        case "mode declared without executor":
            register_linear_cp_mode("wrapped")
            settings = {"mode": "wrapped"}
        case "cp_group without local_cp_size":
            params = packed([0, 16, 32], cp_group=world)
        case "local_cp_size without cp_group":
            params = packed([0, 16, 32], local_cp_size=2)
        case "local_cp_size and cp_group disagree":
            params = packed([0, 16, 32], cp_group=world, local_cp_size=2)
        case "zigzag length does not divide":
            params = packed([0, 12, 32])
        case "contiguous total does not divide":
            settings, params = {"layout": "contiguous"}, packed([0, 12, 30])
        case "decreasing":
            params = packed([0, 16, 8])
        case "not from zero":
            params = packed([8, 32])
        case "floating":
            params = packed([0.0, 32.0])
        case "buffer longer than the boundaries":
            params = packed([0, 16])
        case "boundaries missing":
            params = packed([0, 32], cu_seqlens_q=None, cu_seqlens_kv=None)
        case "q and kv differ":
            params = packed([0, 16, 32], cu_seqlens_kv=torch.tensor([0, 32]))
        case "padded and real differ in number":
            params = packed([0, 3, 9], cu_seqlens_q_padded=torch.tensor([0, 32]))
            params.cu_seqlens_kv_padded = params.cu_seqlens_q_padded
        case "real longer than padded":
            params = packed([0, 20, 32], cu_seqlens_q_padded=torch.tensor([0, 16, 32]))
            params.cu_seqlens_kv_padded = params.cu_seqlens_q_padded
        case "boundaries on the meta device":
            params = packed([0, 32])
            params.cu_seqlens_kv = params.cu_seqlens_kv.to("meta")
        case "sparse boundaries":
            params = packed([0, 32])
            params.cu_seqlens_q = params.cu_seqlens_q.to_sparse()
        case "params of another type":
            params = vars(packed([0, 16, 32]))
        case "another hidden size":
            # Its sequences are short enough to be moved before in_proj looks at them.
            width = HIDDEN + 1
        case "packed with a batch of two":
            batch = 2
        case "dense length does not divide":
            params, tokens = None, 3
        case "per-call mode":
            keywords = {"linear_cp_mode": "headwise"}
        case "inference":
            keywords = {"inference_context": object()}
        case _:
            raise AssertionError(case)
    with cpu_cuda():
        module = make_module(**settings)
        hidden = torch.ones(tokens, batch, width)
        with count_traffic() as traffic:
            try:
                module(hidden, None, packed_seq_params=params, **keywords)
            except ValueError as error:
                return f"{traffic.collectives} collectives: {error}"
    return "no error"


REFUSALS = {
    "heads do not fit the micro-batch's CP size": (
        "2 key heads do not divide by TP*CP = 4 (TP=1, CP=4); chunkwise or all_gather would fit"
    ),
    "mode declared without executor": "must call register_linear_cp_mode('wrapped', executor)",
    "cp_group without local_cp_size": "cp_group has 4 ranks but local_cp_size is missing",
    "local_cp_size without cp_group": "local_cp_size is 2 but cp_group is missing",
    "local_cp_size and cp_group disagree": "local_cp_size is 2 but cp_group has 4 ranks",
    "zigzag length does not divide": (
        "sequence 0 of length 12, sequence 1 of length 20 does not divide by 2 * cp_size = 8"
    ),
    "contiguous total does not divide": (
        "the total of 30 tokens does not divide by the context-parallel size 4"
    ),
    "decreasing": "must not be decreasing, got 16 then 8 at sequence 1",
    "not from zero": "must start at 0, got 8",
    "floating": "must hold integers, got dtype float32",
    "buffer longer than the boundaries": (
        "boundaries end at 16 but the packed buffer holds 8 tokens on each of 4 ranks = 32"
    ),
    "boundaries missing": "packed (thd) input without boundaries",
    "q and kv differ": "q and kv boundaries differ: 3 and 2 of them",
    "padded and real differ in number": (
        "cu_seqlens_q has 2 sequences but cu_seqlens_q_padded has 1"
    ),
    "real longer than padded": (
        "sequence 0 has 20 tokens but cu_seqlens_q_padded gives it room for 16"
    ),
    "boundaries on the meta device": "boundaries in packed_seq_params are on the meta device",
    "sparse boundaries": "boundaries in packed_seq_params are of torch.sparse_coo",
    "params of another type": "packed_seq_params is a dict; it must be a megatron.core",
    "another hidden size": "hidden_states must be [s, b, 16], got [8, 1, 17]",
    "packed with a batch of two": "must have a batch of 1, got 2",
    "dense length does not divide": "sequence 0 of length 12 does not divide by 2 * cp_size = 8",
    "per-call mode": "linear_cp_mode='headwise' was passed to forward",
    "inference": "has no inference",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_alike_on_every_rank_before_anything_is_sent(case: str) -> None:
    errors = run_distributed(call, RANKS, case, timeout=60)
    assert len(set(errors)) == 1, errors
    assert errors[0].startswith("0 collectives: "), errors[0]
    assert REFUSALS[case] in errors[0]


def run_plainly() -> tuple[bool, int]:
    """A mode without executor at CP 1 equals a built-in one."""
    register_linear_cp_mode("wrapped")
    with cpu_cuda():
        hidden = torch.randn(16, 1, HIDDEN, generator=torch.Generator().manual_seed(0))
        outputs = []
        for mode in ("wrapped", "chunkwise"):
            params = packed([0, 16], local_cp_size=1)
            outputs.append(make_module(mode=mode)(hidden, None, packed_seq_params=params)[0])
    return torch.equal(*outputs), linear_cp_mode_runs()["wrapped", 1]


def test_mode_without_executor_runs_plainly_at_cp_one() -> None:
    assert run_distributed(run_plainly, 2) == [(True, 1)] * 2


def run_supplied() -> tuple[bool, bool]:
    """A framework's executor runs, and only for its mode."""
    from megatron.linear_cp.modes.chunkwise import chunkwise

    seen: list[int] = []

    def executor(inputs: Any, plan: Any) -> torch.Tensor:
        seen.append(plan.cp_size)
        return chunkwise(inputs, plan)

    register_linear_cp_mode("wrapped", executor)
    with pytest.raises(ValueError, match="registered already"):
        register_linear_cp_mode("wrapped", executor)
    with cpu_cuda():
        hidden = torch.randn(8, 1, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))
        outputs = [make_module(mode=mode)(hidden, None)[0] for mode in ("wrapped", "chunkwise")]
    return torch.equal(*outputs), seen == [dist.get_world_size()]


def test_a_framework_supplies_its_executor() -> None:
    assert run_distributed(run_supplied, 2) == [(True, True)] * 2


def run_other_format(with_params: bool) -> torch.Tensor:
    """A params object that is not thd: dense input, but its group counts."""
    hidden = torch.randn(16, 3, HIDDEN, generator=torch.Generator().manual_seed(0))
    rank = dist.get_rank()
    pair = dist.new_subgroups(2)[0]
    with cpu_cuda():
        module = make_module()
        if not with_params:
            return module(hidden, None, packed_seq_params=PackedSeqParams(local_cp_size=1))[
                0
            ].detach()
        mine = hidden.chunk(4)
        member = rank % 2
        local = torch.cat([mine[member], mine[3 - member]])
        params = PackedSeqParams(
            qkv_format="sbhd", cp_group=pair, local_cp_size=2, cu_seqlens_q=torch.tensor([0, 5])
        )
        return module(local, None, packed_seq_params=params)[0].detach()


def test_params_that_are_not_thd_are_dense_and_bring_their_group() -> None:
    parts = run_distributed(run_other_format, RANKS, True)
    whole = run_distributed(run_other_format, RANKS, False)[0]
    for pair in (parts[:2], parts[2:]):
        (a, d), (b, c) = (x.chunk(2) for x in pair)
        torch.testing.assert_close(torch.cat([a, b, c, d]), whole)


def rebuild_late() -> list[bool]:
    """A bridge that re-packs after the loader: the plan follows the final object."""
    with cpu_cuda():
        module = make_module()
        hidden = torch.randn(8, 1, HIDDEN, generator=torch.Generator().manual_seed(0))
        first = packed([0, 16])
        before = module(hidden, None, packed_seq_params=first)[0]
        changed = packed([0, 8, 16])
        changed.__dict__.update({k: v for k, v in vars(first).items() if k.startswith("_linear")})
        after = module(hidden, None, packed_seq_params=changed)[0]
        fresh = module(hidden, None, packed_seq_params=packed([0, 8, 16]))[0]
    return [torch.equal(after, fresh), torch.equal(before, after)]


def test_plan_follows_params_rebuilt_late() -> None:
    assert run_distributed(rebuild_late, 2) == [[True, False]] * 2
