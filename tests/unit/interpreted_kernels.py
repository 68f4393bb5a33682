# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - imports follow what must happen before them
"""Run the FLA backend on the CPU, in Triton's interpreter, against the float64 references.

A script: ``TRITON_INTERPRET`` must be set before Triton is imported, for the whole process. What
the interpreter cannot do with FLA's own sources (tuning, a device context, loop counters with a
method, one-element arrays as numbers) is bridged here, nothing of the package.
"""

import builtins
import contextlib
import inspect
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.runtime.interpreter as interpreter
from triton.runtime.autotuner import Autotuner


def _first_configuration(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())


Autotuner.run = _first_configuration
_source = inspect.getsource(interpreter._patch_lang_tensor)
exec(_source.replace("int(self.handle.data)", "int(self.handle.data.item())"), vars(interpreter))

import fla.ops.common.chunk_delta_h
import fla.utils

_guard = vars(inspect.getmodule(fla.utils.input_guard))
_guard["custom_device_ctx"] = lambda index: contextlib.nullcontext()


class _Counter(int):
    def to(self, dtype: Any) -> "_Counter":
        return self


def _range(*bounds: Any) -> Iterator[int]:
    plain = [int(b.handle.data.item()) if hasattr(b, "handle") else int(b) for b in bounds]
    return map(_Counter, builtins.range(*plain))


fla.ops.common.chunk_delta_h.range = _range

from megatron.linear_cp.ops import fla_conv, fla_kernels, fla_rule
from megatron.linear_cp.segments import Segments
from megatron.linear_cp.testing.parity import assert_all_close, make_rule_inputs
from megatron.linear_cp.testing.reference import (
    causal_conv1d_reference,
    gated_delta_rule_reference,
)

NAMES = ("q", "k", "v", "g", "beta")
SCALE = 0.3


def check_rule(
    lengths: tuple[int, ...], heads: tuple[int, int], dims: tuple[int, int], decay: float
) -> None:
    segments = Segments([0, *itertools.accumulate(lengths)])
    bounds = segments.boundaries.tolist()
    x = make_rule_inputs(
        segments.num_tokens,
        num_key_heads=heads[0],
        num_value_heads=heads[1],
        key_dim=dims[0],
        value_dim=dims[1],
        num_segments=len(lengths),
        dtype=torch.float32,
        decay=decay,
        max_beta=2.0,
    )
    state = x.pop("initial_state")
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(x["v"].shape, generator=generator)
    dstate = torch.randn(state.shape, generator=generator)

    leaves = {name: value.double().requires_grad_() for name, value in x.items()}
    entry = state.double().requires_grad_()
    o, final = gated_delta_rule_reference(
        **leaves, cu_seqlens=bounds, scale=SCALE, initial_state=entry, return_final_state=True
    )
    (c,) = torch.autograd.grad((o * do.double()).sum(), entry, retain_graph=True)
    ((o * do.double()).sum() + (final * dstate.double()).sum()).backward()
    expected = {"o": o, "S_out": final, "c": c, "dS_in": entry.grad}
    expected |= {f"d{name}": leaf.grad for name, leaf in leaves.items()}

    fwd = fla_rule.prepare_forward(*(x[n] for n in NAMES), SCALE, segments)
    a, b = fla_rule.summarize(fwd)
    out, residual = fla_rule.forward(fwd, state)
    for kept in (residual, ()):
        bwd = fla_rule.prepare_backward(*(x[n] for n in NAMES), SCALE, segments, kept, state, do)
        adjoint = fla_rule.backward_summarize(bwd)
        grads = fla_rule.backward(bwd, dstate)
        actual = {"o": out, "S_out": a @ state + b, "c": adjoint, "dS_in": a.mT @ dstate + adjoint}
        actual |= {f"d{name}": grad for name, grad in zip(NAMES, grads, strict=True)}
        assert_all_close(actual, expected, 1e-5)


def check_conv(
    lengths: tuple[int, ...], dim: int, width: int, bias: bool, activation: str | None
) -> None:
    segments = Segments([0, *itertools.accumulate(lengths)])
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    inputs = (
        normal(1, segments.num_tokens, dim + 8)[..., :dim],
        normal(len(lengths), width - 1, dim),
        normal(dim, width),
        normal(dim) if bias else None,
    )
    dy = normal(1, segments.num_tokens, dim)
    leaves = [None if t is None else t.double().requires_grad_() for t in inputs]
    x, halo, weight, offset = leaves
    assert x is not None and weight is not None
    y = causal_conv1d_reference(
        x, weight, offset, activation, cu_seqlens=segments.boundaries.tolist(), halo=halo
    )
    y.backward(dy.double())
    names = ("x", "halo", "weight", "bias")
    expected = {"y": y} | {
        f"d{n}": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for n, leaf in zip(names, leaves, strict=True)
        if leaf is not None
    }
    grads = fla_conv.backward(dy, *inputs, activation, segments)
    actual = {"y": fla_conv.forward(*inputs, activation, segments)} | {
        f"d{n}": grad for n, grad in zip(names, grads, strict=True) if grad is not None
    }
    assert_all_close(actual, expected, 1e-5)


CASES = {
    "rule-equal-heads": lambda: check_rule((70, 1, 64), (1, 1), (16, 16), 0.05),
    "rule-grouped-heads": lambda: check_rule((5, 1, 65), (1, 2), (24, 40), 0.05),
    "rule-strong-decay": lambda: check_rule((40,), (1, 1), (16, 16), 16.0),
    "rule-many-launches": lambda: (
        setattr(fla_kernels, "_MAX_GRID", 4),
        check_rule((5, 1, 9, 3, 7), (1, 2), (16, 16), 0.05),
    ),
    "conv-silu-bias": lambda: check_conv((40, 1, 2, 30), 24, 4, True, "silu"),
    "conv-plain": lambda: check_conv((1, 1, 5), 16, 2, True, None),
    "conv-wider-than-segments": lambda: check_conv((1, 1, 1, 2, 6), 16, 7, False, "silu"),
    "conv-width-1": lambda: check_conv((7,), 16, 1, True, "silu"),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        CASES[name]()
        print("ok", name, flush=True)
