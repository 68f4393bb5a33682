# SPDX-License-Identifier: Apache-2.0
"""The torch kernels of the gated delta rule against the token-by-token float64 reference."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.linear_cp.ops import torch_chunks, torch_rule
from megatron.linear_cp.segments import (
    WANTS_BOTH,
    WANTS_NOTHING,
    WANTS_OFFSET,
    HostTable,
    Segments,
)
from megatron.linear_cp.testing.parity import assert_all_close, make_rule_inputs
from megatron.linear_cp.testing.reference import gated_delta_rule_reference

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 5e-3,
    torch.float16: 5e-3,
}
RAGGED = (7, 130, 64, 1, 65, 3)


def boundaries(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def random_like(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)


def run(
    inputs: dict[str, Tensor],
    lengths: Sequence[int],
    scale: float,
    do: Tensor,
    final_state_grad: Tensor | None,
) -> dict[str, Tensor]:
    """Every function of the backend once; the final state and dS_in by way of ``(A, b, c)``."""
    segments = Segments(boundaries(lengths))
    initial = inputs.get("initial_state")
    q, k, v, g, beta = (inputs[name] for name in ("q", "k", "v", "g", "beta"))
    fwd = torch_rule.prepare_forward(q, k, v, g, beta, scale, segments)
    transition, offset = torch_rule.summarize(fwd)
    o, residual = torch_rule.forward(fwd, initial)
    bwd = torch_rule.prepare_backward(q, k, v, g, beta, scale, segments, residual, initial, do)
    entry_grad = torch_rule.backward_summarize(bwd)
    grads = torch_rule.backward(bwd, final_state_grad)
    results = {"o": o, "A": transition, "b": offset, "c": entry_grad}
    return results | dict(zip(("dq", "dk", "dv", "dg", "dbeta"), grads, strict=True))


def check(
    inputs: dict[str, Tensor],
    lengths: Sequence[int],
    tolerance: float | None = None,
    scale: float = 0.3,
) -> None:
    """Outputs, final states and every gradient against the reference, dtypes included."""
    leaves: dict[str, Any] = {n: x.double().requires_grad_() for n, x in inputs.items()}
    o, state = gated_delta_rule_reference(
        **leaves, cu_seqlens=boundaries(lengths), scale=scale, return_final_state=True
    )
    do = random_like(inputs["v"], 1)
    dstate = random_like(inputs["initial_state"], 2)
    grads = torch.autograd.grad(
        [o, state],
        list(leaves.values()),
        [do.double(), dstate.double()],
        allow_unused=True,  # no token, no use of q, k, g and beta
        materialize_grads=True,
    )
    expected = {"o": o, "state": state}
    expected |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}

    actual = run(inputs, lengths, scale, do, dstate)
    transition, offset, entry = actual.pop("A"), actual.pop("b"), actual.pop("c")
    for name in ("q", "k", "v", "g", "beta"):
        assert actual[f"d{name}"].dtype == inputs[name].dtype, name
    assert actual["o"].dtype == inputs["v"].dtype
    wide = torch.float64 if inputs["q"].dtype == torch.float64 else torch.float32
    assert transition.dtype == offset.dtype == entry.dtype == wide
    actual["state"] = transition @ inputs["initial_state"].to(wide) + offset
    actual["dinitial_state"] = transition.mT @ dstate.to(wide) + entry
    assert_all_close(actual, expected, tolerance or TOLERANCE[inputs["q"].dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "dims"),
    [((1, 1), (16, 16)), ((2, 4), (24, 10)), ((1, 3), (8, 32)), ((1, 4), (17, 5))],
)
def test_ragged_segments(dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    inputs = make_rule_inputs(
        sum(RAGGED),
        num_key_heads=heads[0],
        num_value_heads=heads[1],
        key_dim=dims[0],
        value_dim=dims[1],
        num_segments=len(RAGGED),
        dtype=dtype,
    )
    check(inputs, RAGGED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("lengths", [(1,), (2,), (5,), (63,), (64,), (65,), (128,), (300,)])
def test_one_segment(lengths: tuple[int], dtype: torch.dtype) -> None:
    check(make_rule_inputs(lengths[0], num_segments=1, dtype=dtype), lengths)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_no_segment(dtype: torch.dtype) -> None:
    check(make_rule_inputs(0, num_segments=0, dtype=dtype), ())


def test_many_short_segments() -> None:
    lengths = (8,) * 2100
    inputs = make_rule_inputs(
        sum(lengths),
        num_key_heads=1,
        num_value_heads=2,
        key_dim=8,
        value_dim=8,
        num_segments=len(lengths),
        dtype=torch.float32,
    )
    check(inputs, lengths)


def test_mixed_dtypes() -> None:
    """The dtypes of a layer in bfloat16: beta from a float32 sigmoid, g in float32."""
    inputs = make_rule_inputs(sum(RAGGED), num_segments=len(RAGGED), dtype=torch.bfloat16)
    check(inputs | {"beta": inputs["beta"].float()}, RAGGED, TOLERANCE[torch.bfloat16])


def ragged(dtype: torch.dtype, decay: float = 0.05, max_beta: float = 1.0) -> dict[str, Tensor]:
    return make_rule_inputs(
        sum(RAGGED),
        num_segments=len(RAGGED),
        dtype=dtype,
        decay=decay,
        max_beta=max_beta,
        seed=3,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
class TestHardInputs:
    """Inputs on which an unstable formulation loses digits or overflows."""

    def test_no_decay(self, dtype: torch.dtype) -> None:
        check(ragged(dtype, decay=0.0), RAGGED)

    def test_strong_decay(self, dtype: torch.dtype) -> None:
        """dg is exp(-50) of the terms that cancel; the masked half of D would be exp(+3200)."""
        inputs = ragged(dtype)
        check(inputs | {"g": torch.full_like(inputs["g"], -50.0)}, RAGGED)

    def test_medium_decay(self, dtype: torch.dtype) -> None:
        check(ragged(dtype, decay=6.0), RAGGED)

    def test_rare_resets_keep_slow_decays_exact(self, dtype: torch.dtype) -> None:
        inputs = ragged(dtype)
        inputs["g"][:, ::5] = -400.0
        check(inputs, RAGGED, 1e-6 if dtype == torch.float32 else None)

    @pytest.mark.parametrize("max_beta", [1.0, 2.0])
    def test_nearly_parallel_keys(self, dtype: torch.dtype, max_beta: float) -> None:
        inputs = ragged(dtype, max_beta=max_beta, decay=0.001)
        near = inputs["k"][:, :1] + 1e-3 * inputs["k"]
        check(inputs | {"k": torch.nn.functional.normalize(near, dim=-1)}, RAGGED)

    def test_beta_up_to_two(self, dtype: torch.dtype) -> None:
        check(ragged(dtype, max_beta=2.0), RAGGED)

    def test_beta_zero(self, dtype: torch.dtype) -> None:
        """dbeta must not be computed by a division by beta."""
        inputs = ragged(dtype)
        inputs["beta"][:, ::3] = 0.0
        check(inputs, RAGGED)

    def test_without_state_and_gradients_of_it(self, dtype: torch.dtype) -> None:
        inputs = ragged(dtype)
        do = random_like(inputs["v"], 1)
        zeros = torch.zeros_like(inputs["initial_state"])
        given_zeros = run(inputs | {"initial_state": zeros}, RAGGED, 0.3, do, zeros)
        del inputs["initial_state"]
        for name, value in run(inputs, RAGGED, 0.3, do, None).items():
            assert torch.equal(value, given_zeros[name]), name


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_property(data: st.DataObject) -> None:
    lengths = data.draw(
        st.lists(st.one_of(st.integers(1, 9), st.integers(1, 140)), min_size=1, max_size=6)
    )
    heads = data.draw(st.integers(1, 3))
    inputs = make_rule_inputs(
        sum(lengths),
        num_key_heads=heads,
        num_value_heads=heads * data.draw(st.integers(1, 4)),
        key_dim=data.draw(st.integers(1, 20)),
        value_dim=data.draw(st.integers(1, 20)),
        num_segments=len(lengths),
        decay=data.draw(st.sampled_from([0.0, 0.05, 1.0, 20.0])),
        max_beta=data.draw(st.sampled_from([1.0, 2.0])),
        seed=data.draw(st.integers(0, 1000)),
    )
    check(inputs, lengths)


def test_cut_sequence_chains_through_summaries() -> None:
    """Cutting a sequence anywhere changes nothing once entry states follow from (A, b)."""
    inputs = make_rule_inputs(200, dtype=torch.float64)
    do = random_like(inputs["v"], 1)
    whole = run(inputs, (200,), 0.3, do, None)
    first = run(inputs, (70, 130), 0.3, do, None)
    entry = torch.stack([torch.zeros_like(first["b"][0]), first["b"][0]])
    chained = run(inputs | {"initial_state": entry}, (70, 130), 0.3, do, None)
    final_grad = torch.stack([chained["c"][1], torch.zeros_like(entry[0])])
    chained = run(inputs | {"initial_state": entry}, (70, 130), 0.3, do, final_grad)
    names = ("o", "dq", "dk", "dv", "dg", "dbeta")
    assert_all_close({n: chained[n] for n in names}, {n: whole[n] for n in names}, 1e-12)


def test_segments_do_not_leak() -> None:
    inputs = ragged(torch.float32)
    do = random_like(inputs["v"], 1)
    before = run(inputs, RAGGED, 0.3, do, None)
    start, end = boundaries(RAGGED)[1:3]  # the segment that is longest
    changed = {name: x.clone() for name, x in inputs.items()}
    for name in ("q", "k", "v", "g", "beta"):
        changed[name][:, end - 5 : end] *= 1.5
    after = run(changed, RAGGED, 0.3, do, None)
    others = torch.ones(sum(RAGGED), dtype=torch.bool)
    others[start:end] = False
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(before[name][:, others], after[name][:, others]), name
        assert not torch.equal(before[name][:, start:end], after[name][:, start:end]), name


def test_inputs_stay_untouched() -> None:
    """In-order tokens are used as views, so a stray in-place operation would reach the caller."""
    inputs = make_rule_inputs(128, num_segments=1, dtype=torch.float32)
    copies = {name: x.clone() for name, x in inputs.items()}
    do = random_like(inputs["v"], 1)
    do_copy = do.clone()
    run(inputs, (128,), 0.3, do, inputs["initial_state"])
    for name, x in inputs.items():
        assert torch.equal(x, copies[name]), name
    assert torch.equal(do, do_copy)


def test_strided_inputs() -> None:
    """q, k and v are often slices of one projection."""
    packed = torch.randn(1, 100, 4, 3 * 16, dtype=torch.float64)
    inputs = make_rule_inputs(100, num_key_heads=4, num_segments=1, dtype=torch.float64)
    inputs["v"] = packed[..., 32:]
    inputs["q"], inputs["k"] = (
        packed[..., i : i + 16].copy_(inputs[name]) for i, name in ((0, "q"), (16, "k"))
    )
    check(inputs, (100,))


def test_autocast_does_not_reach_the_recurrence() -> None:
    inputs = ragged(torch.float32)
    do = random_like(inputs["v"], 1)
    plain = run(inputs, RAGGED, 0.3, do, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = run(inputs, RAGGED, 0.3, do, None)
    for name, value in plain.items():
        assert torch.equal(value, under_autocast[name]), name


class ForbidReads(TorchDispatchMode):
    """Fails on every operator that brings a value to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        if name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def test_no_value_is_read_on_the_host() -> None:
    inputs = ragged(torch.float32)
    do = random_like(inputs["v"], 1)
    with ForbidReads():
        run(inputs, RAGGED, 0.3, do, inputs["initial_state"])


@pytest.mark.parametrize("seed", range(4))
def test_what_is_not_wanted_is_not_computed(seed: int) -> None:
    """Wanted rows are bitwise those of the whole; steps outside them are not run."""
    inputs, segments = ragged(torch.float32), Segments(boundaries(RAGGED))
    q, k, v, g, beta = (inputs[name] for name in ("q", "k", "v", "g", "beta"))
    fwd = torch_rule.prepare_forward(q, k, v, g, beta, 0.3, segments)
    _, residual = torch_rule.forward(fwd, inputs["initial_state"])
    bwd = torch_rule.prepare_backward(
        q, k, v, g, beta, 0.3, segments, residual, inputs["initial_state"], random_like(v, 1)
    )
    whole = (*torch_rule.summarize(fwd), torch_rule.backward_summarize(bwd))
    wants = HostTable(torch.randint(3, (len(RAGGED),), generator=torch.manual_seed(seed)).numpy())
    some = (*torch_rule.summarize(fwd, wants), torch_rule.backward_summarize(bwd, wants))
    levels = (WANTS_BOTH, WANTS_OFFSET, WANTS_OFFSET)
    for expected, actual, level in zip(whole, some, levels, strict=True):
        wanted = torch.from_numpy(wants.array >= level)
        assert torch.equal(actual[wanted], expected[wanted])


def chunks_run(wants: Sequence[int] | None, level: int) -> int:
    inputs, segments = ragged(torch.float32), Segments(boundaries(RAGGED))
    rows = (inputs[name] for name in ("q", "k", "v", "g", "beta"))
    chunks = torch_rule.prepare_forward(*rows, 0.3, segments)
    table = None if wants is None else HostTable(wants)
    blocks = torch_chunks.narrowed(chunks, table, level)
    covered = [chunk for block in blocks for a, b, _ in block.pieces for chunk in range(a, b)]
    assert all(block.start <= a < b <= block.stop for block in blocks for a, b, _ in block.pieces)
    assert sorted(set(covered)) == sorted(covered)
    return len(covered)


def test_narrowed_to_the_chunks_of_what_is_wanted() -> None:
    """RAGGED has segments of 1, 3, 1, 1, 2 and 1 chunks; in step order 1, 4, 0, 2, 3, 5."""
    assert chunks_run(None, WANTS_BOTH) == 9
    assert chunks_run([WANTS_BOTH] * 6, WANTS_BOTH) == 9
    assert chunks_run([WANTS_OFFSET] * 6, WANTS_BOTH) == 0
    assert chunks_run([WANTS_NOTHING] * 6, WANTS_OFFSET) == 0
    longest = [WANTS_NOTHING, WANTS_OFFSET, *[WANTS_NOTHING] * 4]
    assert chunks_run(longest, WANTS_OFFSET) == 3
    # Those between the first and the last in step order are run as well.
    assert chunks_run([0, WANTS_BOTH, 0, WANTS_BOTH, 0, 0], WANTS_BOTH) == 3 + 2 + 1 + 1 + 1
    assert chunks_run([0, 0, 0, WANTS_BOTH, 0, WANTS_BOTH], WANTS_BOTH) == 2


def test_nothing_is_kept_where_it_would_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept or recomputed, the gradients are the same, bit by bit."""
    inputs = ragged(torch.float32)
    segments = Segments(boundaries(RAGGED))
    q, k, v, g, beta = (inputs[name] for name in ("q", "k", "v", "g", "beta"))
    do, initial = random_like(v, 1), inputs["initial_state"]
    results = []
    for limit in (torch_rule.KEEP_BYTES, 0):
        monkeypatch.setattr(torch_rule, "KEEP_BYTES", limit)
        fwd = torch_rule.prepare_forward(q, k, v, g, beta, 0.3, segments)
        o, residual = torch_rule.forward(fwd, initial)
        assert bool(residual) == (limit > 0)
        kept = sum(x.numel() * x.element_size() for x in residual)
        assert kept <= limit
        bwd = torch_rule.prepare_backward(q, k, v, g, beta, 0.3, segments, residual, initial, do)
        c = torch_rule.backward_summarize(bwd)
        results.append((o, c, *torch_rule.backward(bwd, None)))
    for kept_result, recomputed in zip(*results, strict=True):
        assert torch.equal(kept_result, recomputed)
    # The limit counts what is really kept.
    monkeypatch.setattr(torch_rule, "KEEP_BYTES", 2**40)
    fwd = torch_rule.prepare_forward(q, k, v, g, beta, 0.3, segments)
    _, residual = torch_rule.forward(fwd, initial)
    kept = sum(x.numel() * x.element_size() for x in residual)
    monkeypatch.setattr(torch_rule, "KEEP_BYTES", kept - 1)
    assert torch_rule.forward(fwd, initial)[1] == ()
    monkeypatch.setattr(torch_rule, "KEEP_BYTES", kept)
    assert torch_rule.forward(fwd, initial)[1] != ()
