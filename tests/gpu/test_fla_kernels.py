# SPDX-License-Identifier: Apache-2.0
"""The FLA backend against the float64 token reference, on the GPU.

Slow decay and random entry states, so that a state that is dropped or leaks shows; segments of
one token, of a chunk, and of a chunk and one token. Heads are those of Qwen3-Next.
"""

import itertools

import pytest
import torch

pytest.importorskip("fla", reason="needs fla-core (and Triton), which is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from megatron.linear_cp.ops import fla_capabilities, fla_rule, triton_wy
from megatron.linear_cp.segments import Segments
from megatron.linear_cp.testing.parity import assert_all_close, make_rule_inputs
from megatron.linear_cp.testing.reference import gated_delta_rule_reference

DEVICE = torch.device("cuda")
SCALE = 0.25
RAGGED = (1, 64, 65, 130, 1, 40)
BF16_GATES = dict.fromkeys(("o", "A_b", "b", "c", "dS_in", "dq", "dk", "dv", "dg"), 5e-3) | {
    "dbeta": 1e-2
}
NAMES = ("q", "k", "v", "g", "beta")

try:
    fla_capabilities.require("rule")
    FAULT = None
except fla_capabilities.FlaUnavailableError as error:
    FAULT = str(error)
needs_rule = pytest.mark.skipif(FAULT is not None, reason=f"{FAULT}")


def segments_of(lengths: tuple[int, ...]) -> Segments:
    return Segments([0, *itertools.accumulate(lengths)])


def rule_gradients(
    x: dict[str, torch.Tensor],
    segments: Segments,
    initial_state: torch.Tensor,
    do: torch.Tensor,
    final_state_grad: torch.Tensor,
    keep_residual: bool = True,
) -> dict[str, torch.Tensor]:
    """Everything the backend computes, under the names of the gates; with a residual, ahead."""
    fwd = fla_rule.prepare_forward(*(x[name] for name in NAMES), SCALE, segments)
    a, b = fla_rule.summarize(fwd)
    if keep_residual:
        fla_rule.forward_ahead(fwd)
    o, residual = fla_rule.forward(fwd, initial_state)
    bwd = fla_rule.prepare_backward(
        *(x[name] for name in NAMES),
        SCALE,
        segments,
        residual if keep_residual else (),
        initial_state,
        do,
    )
    c = fla_rule.backward_summarize(bwd)
    if keep_residual:
        fla_rule.backward_ahead(bwd)
    grads = fla_rule.backward(bwd, final_state_grad)
    for name, grad in zip(NAMES, grads, strict=True):
        assert grad.dtype == x[name].dtype and grad.shape == x[name].shape
    assert a.dtype == b.dtype == c.dtype == torch.float32
    return {
        "o": o,
        "A_b": a @ initial_state + b,
        "b": b,
        "c": c,
        "dS_in": a.mT @ final_state_grad + c,
        **{f"d{name}": grad for name, grad in zip(NAMES, grads, strict=True)},
    }


def reference_gradients(
    x: dict[str, torch.Tensor],
    segments: Segments,
    initial_state: torch.Tensor,
    do: torch.Tensor,
    final_state_grad: torch.Tensor,
) -> dict[str, torch.Tensor]:
    bounds = segments.boundaries.tolist()
    leaves = {name: value.double().requires_grad_() for name, value in x.items()}
    entry = initial_state.double().requires_grad_()
    o, final = gated_delta_rule_reference(
        **leaves, cu_seqlens=bounds, scale=SCALE, initial_state=entry, return_final_state=True
    )
    from_outputs = (o * do.double()).sum()
    (c,) = torch.autograd.grad(from_outputs, entry, retain_graph=True)
    (from_outputs + (final * final_state_grad.double()).sum()).backward()
    with torch.no_grad():
        plain = {name: value.detach() for name, value in leaves.items()}
        b = gated_delta_rule_reference(
            **plain, cu_seqlens=bounds, scale=SCALE, return_final_state=True
        )[1]
    assert entry.grad is not None
    gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    return {"o": o, "A_b": final, "b": b, "c": c, "dS_in": entry.grad, **gradients}


def make_case(
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    heads: tuple[int, int],
    dims: tuple[int, int],
    seed: int = 0,
    **options: float,
) -> tuple[dict[str, torch.Tensor], Segments, torch.Tensor, torch.Tensor, torch.Tensor]:
    segments = segments_of(lengths)
    x = make_rule_inputs(
        segments.num_tokens,
        num_key_heads=heads[0],
        num_value_heads=heads[1],
        key_dim=dims[0],
        value_dim=dims[1],
        num_segments=len(lengths),
        dtype=dtype,
        seed=seed,
        device=DEVICE,
        **options,
    )
    state = x.pop("initial_state")
    generator = torch.Generator().manual_seed(seed + 1)
    do = torch.randn(x["v"].shape, generator=generator).to(DEVICE, dtype)
    dstate = torch.randn(state.shape, generator=generator).to(DEVICE)
    return x, segments, state, do, dstate


@needs_rule
@pytest.mark.parametrize("heads", [(16, 32), (32, 32)], ids=["grouped", "equal"])
@pytest.mark.parametrize("keep_residual", [True, False])
def test_bf16_against_token_reference(heads: tuple[int, int], keep_residual: bool) -> None:
    case = make_case(RAGGED, torch.bfloat16, heads, (128, 128))
    assert_all_close(
        rule_gradients(*case, keep_residual=keep_residual), reference_gradients(*case), BF16_GATES
    )


@needs_rule
def test_bf16_with_sizes_that_fill_no_tile() -> None:
    case = make_case(RAGGED, torch.bfloat16, (2, 4), (96, 48))
    assert_all_close(rule_gradients(*case), reference_gradients(*case), BF16_GATES)


# Float32 kernels take long to compile: one shape, of the size whose gradients FLA's own kernels
# get wrong on Hopper with Triton 3.4 to 3.7.0.
@needs_rule
def test_fp32_against_token_reference() -> None:
    case = make_case(RAGGED, torch.float32, (2, 4), (64, 64))
    assert_all_close(rule_gradients(*case), reference_gradients(*case), 1e-4)


@needs_rule
@pytest.mark.parametrize("decay", [0.0, 0.005, 16.0], ids=["none", "slow", "strong"])
def test_fp32_decay_and_large_beta(decay: float) -> None:
    case = make_case((200, 1, 90), torch.float32, (2, 4), (64, 64), decay=decay, max_beta=2.0)
    assert_all_close(rule_gradients(*case), reference_gradients(*case), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_inverse_with_nearly_parallel_keys_and_beta_2(dtype: torch.dtype) -> None:
    """The triangle to invert is large and close to full; powers of it would overflow."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens, key_heads, heads = 128, 2, 4
    keys = normal(1, 1, key_heads, 128) + 0.05 * normal(1, tokens, key_heads, 128)
    k = torch.nn.functional.normalize(keys, dim=-1).to(DEVICE, dtype)
    v = normal(1, tokens, heads, 64).to(DEVICE, dtype)
    g = torch.zeros(1, tokens, heads, device=DEVICE)
    beta = torch.full_like(g, 2.0)
    tables = {
        "cu_seqlens": torch.tensor([0, 100, tokens], dtype=torch.int32, device=DEVICE),
        "chunk_indices": torch.tensor([[0, 0], [0, 1], [1, 0]], dtype=torch.int32, device=DEVICE),
    }
    unit = (tables, False, "tf32x3")
    wy, _, u = triton_wy.wy_representation(k, v, g, beta, *unit)
    expected = torch.zeros(wy.shape, dtype=torch.float64, device=DEVICE)
    expected_u = torch.zeros_like(u, dtype=torch.float64)
    for first, last in ((0, 64), (64, 100), (100, 128)):
        for head in range(heads):
            key = k[0, first:last, head // 2].double()
            lower = (2 * key @ key.T).tril(-1)
            identity = torch.eye(last - first, dtype=torch.float64, device=DEVICE)
            inverse = torch.linalg.inv(identity + lower)
            expected[0, first:last, head, : last - first] = inverse
            expected_u[0, first:last, head] = 2 * inverse @ v[0, first:last, head].double()
    gates = {"A": 1e-4, "u": 1e-4} if dtype == torch.float32 else {"A": 2.5e-3, "u": 1e-2}
    assert_all_close({"A": wy, "u": u}, {"A": expected, "u": expected_u}, gates)


@needs_rule
def test_fp32_beta_and_decay_with_bf16_inputs() -> None:
    x, *rest = make_case(RAGGED, torch.bfloat16, (16, 32), (128, 128))
    x["beta"] = x["beta"].float() + 1e-4
    x["g"] = x["g"].double()
    assert_all_close(rule_gradients(x, *rest), reference_gradients(x, *rest), BF16_GATES)


@needs_rule
def test_summaries_compose_across_a_cut() -> None:
    """Two halves joined by (A, b) and by (A, c) give what the whole sequence gives."""
    case = make_case((384,), torch.bfloat16, (16, 32), (128, 128))
    x, _, state, do, dstate = case
    expected = reference_gradients(*case)

    cut = segments_of((150, 234))
    fwd = fla_rule.prepare_forward(*(x[n] for n in NAMES), SCALE, cut)
    a, b = fla_rule.summarize(fwd)
    entry = torch.cat([state, a[:1] @ state + b[:1]])
    o, residual = fla_rule.forward(fwd, entry)
    bwd = fla_rule.prepare_backward(*(x[n] for n in NAMES), SCALE, cut, residual, entry, do)
    c = fla_rule.backward_summarize(bwd)
    exits = torch.cat([a[1:].mT @ dstate + c[1:], dstate])
    grads = fla_rule.backward(bwd, exits)
    actual = {"o": o, **{f"d{n}": grad for n, grad in zip(NAMES, grads, strict=True)}}
    assert_all_close(actual, {name: expected[name] for name in actual}, BF16_GATES)


@needs_rule
def test_no_entry_state_and_no_final_gradient_mean_zero() -> None:
    x, segments, state, do, dstate = make_case(RAGGED, torch.bfloat16, (16, 32), (128, 128))
    zero = torch.zeros_like(state)
    with_zeros = rule_gradients(x, segments, zero, do, torch.zeros_like(dstate))
    fwd = fla_rule.prepare_forward(*(x[n] for n in NAMES), SCALE, segments)
    o, residual = fla_rule.forward(fwd, None)
    bwd = fla_rule.prepare_backward(*(x[n] for n in NAMES), SCALE, segments, residual, None, do)
    grads = dict(zip(NAMES, fla_rule.backward(bwd, None), strict=True))
    actual = {"o": o, **{f"d{n}": grad for n, grad in grads.items()}}
    assert_all_close(actual, {name: with_zeros[name] for name in actual}, 1e-6)


@needs_rule
def test_repeats_bitwise() -> None:
    case = make_case((700, 1, 323), torch.bfloat16, (16, 32), (128, 128))
    first = rule_gradients(*case)
    for _ in range(5):
        again = rule_gradients(*case)
        assert [n for n in first if not torch.equal(first[n], again[n])] == []


@needs_rule
def test_thousands_of_tiny_segments_fit_the_launch_grid() -> None:
    """2,100 segments x 32 heads is over the 65,535 programs that a grid's second side allows."""
    lengths = (8,) * 2100
    segments = segments_of(lengths)
    x = make_rule_inputs(
        segments.num_tokens,
        num_key_heads=16,
        num_value_heads=32,
        key_dim=128,
        value_dim=128,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    do = torch.ones_like(x["v"])
    fwd = fla_rule.prepare_forward(*(x[n] for n in NAMES), SCALE, segments)
    o, residual = fla_rule.forward(fwd, None)
    _, b = fla_rule.summarize(fwd)
    bwd = fla_rule.prepare_backward(*(x[n] for n in NAMES), SCALE, segments, residual, None, do)
    grads = fla_rule.backward(bwd, None)
    few = 3  # the last ones: those that a grid too large would have left unwritten
    tail = slice(-8 * few, None)
    last = {name: value[:, tail] for name, value in x.items()}
    state = torch.zeros(few, 32, 128, 128, device=DEVICE)
    expected = reference_gradients(
        last, segments_of((8,) * few), state, do[:, tail], torch.zeros_like(state)
    )
    actual = {
        "o": o[:, tail],
        "b": b[-few:],
        **{f"d{n}": grad[:, tail] for n, grad in zip(NAMES, grads, strict=True)},
    }
    assert_all_close(actual, {name: expected[name] for name in actual}, BF16_GATES)


@needs_rule
def test_no_host_sync_once_tables_and_kernels_exist() -> None:
    case = make_case(RAGGED, torch.bfloat16, (16, 32), (128, 128))

    def step() -> None:
        rule_gradients(*case)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            case[2].sum().item()  # the mode does catch a sync
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_rule
def test_empty() -> None:
    segments = Segments([0])
    x = make_rule_inputs(
        0, key_dim=128, value_dim=64, num_segments=0, dtype=torch.bfloat16, device=DEVICE
    )
    x.pop("initial_state")
    state = torch.zeros(0, 4, 128, 64, device=DEVICE)
    for name, value in rule_gradients(x, segments, state, x["v"], state).items():
        assert value.numel() == 0, name


def test_inputs_that_the_kernels_cannot_take_are_refused() -> None:
    segments = segments_of((4,))
    x = make_rule_inputs(4, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match="float64"):
        fla_rule.prepare_forward(*(x[n] for n in NAMES), SCALE, segments)
    x = make_rule_inputs(4, key_dim=288, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="256"):
        fla_rule.prepare_forward(*(x[n] for n in NAMES), SCALE, segments)
    x = make_rule_inputs(5, key_dim=128, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ValueError, match="5 tokens"):
        fla_rule.prepare_forward(*(x[n] for n in NAMES), SCALE, segments)
