# SPDX-License-Identifier: Apache-2.0
"""The two public ops on one rank: what they accept, refuse, and live beside."""

from collections.abc import Callable

import pytest
import torch

from megatron.linear_cp import ContextParallelPlan
from megatron.linear_cp.ops import causal_conv1d, gated_delta_rule
from megatron.linear_cp.testing.parity import assert_close, make_rule_inputs
from megatron.linear_cp.testing.reference import (
    causal_conv1d_reference,
    gated_delta_rule_reference,
)

NAMES = ("q", "k", "v", "g", "beta")


def rule_inputs(tokens: int = 20) -> list[torch.Tensor]:
    inputs = make_rule_inputs(tokens, dtype=torch.float64)
    return [inputs[name] for name in NAMES]


def conv_inputs(tokens: int = 20) -> list[torch.Tensor]:
    return [torch.randn(1, tokens, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)]


def test_without_a_plan_it_is_one_sequence() -> None:
    q, k, v, g, beta = rule_inputs()
    out = gated_delta_rule(q, k, v, g, beta)
    assert_close("o", out, gated_delta_rule_reference(q, k, v, g, beta), 1e-12)
    x, weight = conv_inputs()
    assert_close("y", causal_conv1d(x, weight), causal_conv1d_reference(x, weight), 1e-12)


def test_l2norm_and_scale() -> None:
    q, k, v, g, beta = rule_inputs()
    out = gated_delta_rule(3 * q, 2 * k, v, g, beta, scale=0.3, use_qk_l2norm_in_kernel=True)
    expected = gated_delta_rule_reference(3 * q, 2 * k, v, g, beta, scale=0.3, use_qk_l2norm=True)
    assert_close("o", out, expected, 1e-12)


def test_activation_names() -> None:
    x, weight = conv_inputs()
    assert torch.equal(causal_conv1d(x, weight, None, "swish"), causal_conv1d(x, weight))
    assert not torch.equal(causal_conv1d(x, weight, None, None), causal_conv1d(x, weight))


@pytest.mark.parametrize("plan", [None, ContextParallelPlan.build([0, 7, 20], None)])
def test_inference_mode_leaves_no_trace(plan: ContextParallelPlan | None) -> None:
    """Tables made under inference mode and kept would be refused by autograd later."""
    q, k, v, g, beta = rule_inputs(20)
    x, weight = conv_inputs(20)
    with torch.inference_mode():
        gated_delta_rule(q, k, v, g, beta, plan=plan)
        causal_conv1d(x, weight, plan=plan)
    for tensor in (q, x, weight):
        tensor.requires_grad_()
    gated_delta_rule(q, k, v, g, beta, plan=plan).sum().backward()
    causal_conv1d(x, weight, plan=plan).sum().backward()
    assert all(tensor.grad is not None for tensor in (q, x, weight))


def test_inside_a_compiled_function() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (causal_conv1d(x * 2, weight) + 1).sum()

    x, weight = conv_inputs()
    compiled = torch.compile(step, backend="aot_eager")
    weight.requires_grad_()
    compiled(x, weight).backward()
    expected = torch.autograd.grad(step(x, weight), weight)[0]
    assert torch.equal(weight.grad, expected)


BAD_RULE: dict[str, tuple[Callable[..., tuple], str]] = {
    "three dims": (lambda q, k, v, g, b: (q[0], k, v, g, b), "q must be"),
    "batch": (lambda q, k, v, g, b: (q.expand(2, -1, -1, -1), k, v, g, b), "q must be"),
    "dtypes": (lambda q, k, v, g, b: (q.float(), k, v, g, b), "share a dtype"),
    "integers": (lambda q, k, v, g, b: (q.long(), k.long(), v.long(), g, b), "floating point"),
    "key shape": (lambda q, k, v, g, b: (q[..., :3], k, v, g, b), "share a shape"),
    "head groups": (lambda q, k, v, g, b: (q, k, v[:, :, :3], g[..., :3], b[..., :3]), "divide"),
    "no heads": (lambda q, k, v, g, b: (q[:, :, :0], k[:, :, :0], v, g, b), "must be heads"),
    "gate heads": (lambda q, k, v, g, b: (q, k, v, g[..., :2], b), "g must have 4 heads"),
    "tokens": (lambda q, k, v, g, b: (q, k, v[:, :9], g, b), "v holds 9 tokens but rank 0 of 1"),
}


@pytest.mark.parametrize("case", BAD_RULE)
def test_bad_rule_inputs(case: str) -> None:
    change, message = BAD_RULE[case]
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(*change(*rule_inputs()))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
        ({"backend": "fla"}, "needs CUDA tensors"),
        ({"state_exchange": "ring"}, "unknown state_exchange 'ring'"),
    ],
)
def test_bad_rule_switches(keywords: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(*rule_inputs(), **keywords)


def test_known_fault_of_flas_own_op_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.linear_cp.ops import fla_exchange

    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    asked = []

    def known_fault(*arguments: object) -> str | None:
        asked.append(arguments)
        return "wrong" if arguments[3] == 64 else None

    monkeypatch.setattr(fla_exchange.fla_capabilities, "known_fault", known_fault)
    fla_exchange.refuse_known_fault(torch.device("cuda"), 128)
    with pytest.raises(fla_exchange.fla_capabilities.FlaUnavailableError, match="wrong; or state"):
        fla_exchange.refuse_known_fault(torch.device("cuda"), 64)
    assert [a[2] for a in asked] == [(9, 0), (9, 0)]


def test_bad_conv_inputs() -> None:
    x, weight = conv_inputs()
    with pytest.raises(ValueError, match="at least one tap"):
        causal_conv1d(x, weight[:, :0])
    with pytest.raises(ValueError, match=r"weight must be \[D=6"):
        causal_conv1d(x, weight[:5])
    with pytest.raises(ValueError, match="bias must be"):
        causal_conv1d(x, weight, torch.zeros(5))
    with pytest.raises(ValueError, match="unknown activation 'relu'"):
        causal_conv1d(x, weight, None, "relu")
    with pytest.raises(ValueError, match="unknown backend"):
        causal_conv1d(x, weight, backend="triton")
    with pytest.raises(ValueError, match="x holds 20 tokens"):
        causal_conv1d(x, weight, plan=ContextParallelPlan.build([0, 8], None))


def test_bad_plans() -> None:
    with pytest.raises(ValueError, match="conv_kernel_size must be at least 1, got 0"):
        ContextParallelPlan.build([0, 8], None, conv_kernel_size=0)
    with pytest.raises(ValueError, match="no negative length"):
        ContextParallelPlan.build_dense(-4, 1, None)
