# SPDX-License-Identifier: Apache-2.0
"""The torch kernels of the causal convolution against the float64 reference."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.linear_cp.ops import torch_conv
from megatron.linear_cp.segments import Segments
from megatron.linear_cp.testing.parity import assert_all_close
from megatron.linear_cp.testing.reference import causal_conv1d_reference

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 5e-3,
    torch.float16: 5e-3,
}
RAGGED = (1, 9, 2, 30, 3, 1)


def boundaries(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def make_inputs(
    lengths: Sequence[int], dim: int, width: int, dtype: torch.dtype, bias: bool, seed: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    inputs = {
        "x": normal(1, sum(lengths), dim),
        "halo": normal(len(lengths), width - 1, dim),
        "weight": normal(dim, width),
        "dy": normal(1, sum(lengths), dim),
    }
    return inputs | ({"bias": normal(dim)} if bias else {})


def run(
    inputs: dict[str, Tensor], lengths: Sequence[int], activation: str | None
) -> dict[str, Tensor]:
    segments = Segments(boundaries(lengths))
    rest = (inputs["halo"], inputs["weight"], inputs.get("bias"), activation, segments)
    y = torch_conv.forward(inputs["x"], *rest)
    dx, dhalo, dweight, dbias = torch_conv.backward(inputs["dy"], inputs["x"], *rest)
    results = {"y": y, "dx": dx, "dhalo": dhalo, "dweight": dweight}
    assert (dbias is None) == ("bias" not in inputs)
    return results if dbias is None else results | {"dbias": dbias}


def check(inputs: dict[str, Tensor], lengths: Sequence[int], activation: str | None) -> None:
    names = [name for name in inputs if name != "dy"]
    leaves = {name: inputs[name].double().requires_grad_() for name in names}
    y = causal_conv1d_reference(**leaves, activation=activation, cu_seqlens=boundaries(lengths))
    grads = torch.autograd.grad(
        y, list(leaves.values()), inputs["dy"].double(), allow_unused=True, materialize_grads=True
    )
    expected = {"y": y} | {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
    actual = run(inputs, lengths, activation)
    for name, value in actual.items():
        assert value.dtype == inputs["x"].dtype, name
    assert_all_close(actual, expected, TOLERANCE[inputs["x"].dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4, 5])
def test_ragged_segments(
    dtype: torch.dtype, activation: str | None, bias: bool, width: int
) -> None:
    """Some segments are shorter than the window, so gradients reach their halos only."""
    check(make_inputs(RAGGED, 7, width, dtype, bias), RAGGED, activation)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lengths", [(), (1,), (2,), (33,), (1,) * 12])
def test_few_tokens_and_one_segment(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    check(make_inputs(lengths, 5, 4, dtype, bias=True), lengths, "silu")


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    dim=st.integers(1, 6),
    width=st.integers(1, 6),
    bias=st.booleans(),
    activation=st.sampled_from(["silu", None]),
    seed=st.integers(0, 1000),
)
def test_property(
    lengths: list[int], dim: int, width: int, bias: bool, activation: str | None, seed: int
) -> None:
    check(make_inputs(lengths, dim, width, torch.float64, bias, seed), lengths, activation)


def test_cut_sequence_with_its_halo_is_bitwise_the_same() -> None:
    inputs = make_inputs((40,), 6, 4, torch.float32, bias=True)
    whole = run(inputs, (40,), "silu")["y"]
    before = torch.cat([inputs["halo"], inputs["x"]], dim=1)[0]
    halos = torch.stack([before[start : start + 3] for start in (0, 1, 3, 20)])
    cut = run(inputs | {"halo": halos}, (1, 2, 17, 20), "silu")["y"]
    assert torch.equal(cut, whole)


def test_segments_do_not_leak() -> None:
    inputs = make_inputs(RAGGED, 6, 4, torch.float32, bias=True)
    before = run(inputs, RAGGED, "silu")
    start, end = boundaries(RAGGED)[3:5]
    changed = inputs | {"x": inputs["x"].clone(), "halo": inputs["halo"].clone()}
    changed["x"][:, start:end] += 1.0
    changed["halo"][3] -= 1.0
    after = run(changed, RAGGED, "silu")
    others = torch.ones(sum(RAGGED), dtype=torch.bool)
    others[start:end] = False
    for name in ("y", "dx"):
        assert torch.equal(before[name][:, others], after[name][:, others]), name
        assert not torch.equal(before[name][:, start:end], after[name][:, start:end]), name


@pytest.mark.parametrize("function", ["forward", "backward"])
def test_unknown_activation(function: str) -> None:
    inputs = make_inputs((3,), 2, 4, torch.float32, bias=False)
    arguments = [inputs["x"], inputs["halo"], inputs["weight"], None, "gelu", Segments([0, 3])]
    if function == "backward":
        arguments.insert(0, inputs["dy"])
    with pytest.raises(ValueError, match=r"'silu' or None, got 'gelu'"):
        getattr(torch_conv, function)(*arguments)
