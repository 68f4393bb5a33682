# SPDX-License-Identifier: Apache-2.0
"""The parity helper refuses what it must, and the reference is the recurrence it claims to be."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.linear_cp.testing.parity import (
    assert_all_close,
    assert_close,
    make_rule_inputs,
    relative_rms,
)
from megatron.linear_cp.testing.reference import gated_delta_rule_reference, l2norm_reference


def test_relative_rms() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert relative_rms(expected + torch.tensor([0.0, 0.5]), expected) == pytest.approx(0.1)
    assert relative_rms(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_rms(torch.empty(0), torch.empty(0)) == 0.0
    assert relative_rms(torch.ones(2), torch.zeros(2)) == math.inf
    for bad in (math.nan, math.inf):
        assert relative_rms(torch.tensor([bad]), torch.ones(1)) == math.inf
        assert relative_rms(torch.ones(1), torch.tensor([bad])) == math.inf


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        (None, "actual is None"),
        (torch.tensor([1.0, math.nan]), "1 of 2 values of actual are NaN or infinite"),
        (torch.tensor([1.0, math.inf]), "NaN or infinite"),
        (torch.ones(3), r"shape \(3,\), expected \(2,\)"),
        (torch.ones(2) * 1.1, r"relative RMS 1.000e-01 > 1.0e-03"),
    ],
)
def test_assert_close_fails(actual: Tensor | None, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close("x", actual, torch.ones(2), 1e-3)


def test_all_failures_are_reported_at_once() -> None:
    ones = torch.ones(2)
    actual = {"a": ones, "b": ones * 2, "c": None, "extra": ones}
    expected = {"a": ones, "b": ones, "c": ones, "missing": ones}
    with pytest.raises(AssertionError) as failure:
        assert_all_close(actual, expected, 1e-3)
    message = str(failure.value)
    for line in (
        "b: relative",
        "c: actual is None",
        "extra: missing in e",
        "missing: missing in a",
    ):
        assert line in message
    assert "\n  a:" not in message


def test_tolerance_per_name() -> None:
    ones = torch.ones(2)
    actual, expected = {"a": ones * 1.1, "b": ones}, {"a": ones, "b": ones}
    assert_all_close(actual, expected, {"a": 0.2, "b": 0.0})
    with pytest.raises(AssertionError, match="a: relative RMS"):
        assert_all_close(actual, expected, {"a": 0.01, "b": 0.0})


def test_reference_is_the_matrix_recurrence() -> None:
    """One token, one head at a time, with (I - beta k k^T) written out; empty sequences too."""
    bounds = [0, 0, 3, 3, 15, 20, 20]
    inputs: dict[str, Any] = make_rule_inputs(20, num_segments=6, key_dim=5, value_dim=3)
    inputs["k"] = inputs["k"] * 2.0
    o, final = gated_delta_rule_reference(
        **inputs, cu_seqlens=bounds, use_qk_l2norm=True, return_final_state=True
    )
    q, k = l2norm_reference(inputs["q"])[0], l2norm_reference(inputs["k"])[0]
    v, g, beta = inputs["v"][0], inputs["g"][0], inputs["beta"][0]
    for n in range(6):
        for j in range(4):
            state = inputs["initial_state"][n, j]
            for t in range(bounds[n], bounds[n + 1]):
                key = k[t, j // 2]
                keep = torch.eye(5, dtype=torch.float64) - beta[t, j] * torch.outer(key, key)
                state = g[t, j].exp() * keep @ state + beta[t, j] * torch.outer(key, v[t, j])
                torch.testing.assert_close(o[0, t, j], 5**-0.5 * state.T @ q[t, j // 2])
            torch.testing.assert_close(final[n, j], state)


def test_reference_refuses_wrong_boundaries() -> None:
    inputs: dict[str, Any] = make_rule_inputs(4)
    with pytest.raises(ValueError, match=r"from 0 to the token count 4 .* got \[0, 3\]"):
        gated_delta_rule_reference(**inputs, cu_seqlens=[0, 3])
