# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - imports follow what must happen before them
"""Run the FLA backend on the CPU, in Triton's interpreter, against the float64 references.

A script: ``TRITON_INTERPRET`` must be set before Triton is imported, for the whole process. What
the interpreter cannot do with FLA's own sources (tuning, a device context, loop counters with a
method, one-element arrays as numbers) or with bfloat16 products is bridged here, nothing of the
package.
"""

import builtins
import contextlib
import inspect
import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.language
import triton.runtime.interpreter as interpreter
from triton.runtime.autotuner import Autotuner


def _first_configuration(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())


Autotuner.run = _first_configuration
_source = inspect.getsource(interpreter._patch_lang_tensor)
exec(_source.replace("int(self.handle.data)", "int(self.handle.data.item())"), vars(interpreter))

_product = interpreter.InterpreterBuilder.create_dot


def _product_of_bfloat16(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    a, b = (
        self.cast_impl(x, triton.language.float32) if x.dtype == triton.language.bfloat16 else x
        for x in (a, b)
    )
    return _product(self, a, b, *rest)


interpreter.InterpreterBuilder.create_dot = _product_of_bfloat16

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

from megatron.linear_cp.ops import fla_kernels, fla_rule, triton_wy
from megatron.linear_cp.segments import WANTS_BOTH, WANTS_OFFSET, HostTable, Segments
from megatron.linear_cp.testing.parity import assert_all_close, make_rule_inputs
from megatron.linear_cp.testing.reference import gated_delta_rule_reference

NAMES = ("q", "k", "v", "g", "beta")
SCALE = 0.3


@contextlib.contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """New tensors hold NaN until something is written."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_only_wanted(
    wants: HostTable, whole: Sequence[tuple[torch.Tensor, int]], some: Sequence[torch.Tensor]
) -> None:
    """Wanted rows are those of the whole; no other was written."""
    for (expected, level), actual in zip(whole, some, strict=True):
        wanted = torch.from_numpy(wants.array >= level)
        assert torch.equal(actual[wanted], expected[wanted])
        assert bool(actual[~wanted].isnan().all())


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
    wants = HostTable([n % 3 for n in range(len(lengths))])
    with unwritten_is_nan():
        check_only_wanted(
            wants, [(a, WANTS_BOTH), (b, WANTS_OFFSET)], fla_rule.summarize(fwd, wants)
        )
    fla_rule.forward_ahead(fwd)
    out, residual = fla_rule.forward(fwd, state)
    for kept in (residual, ()):
        bwd = fla_rule.prepare_backward(*(x[n] for n in NAMES), SCALE, segments, kept, state, do)
        adjoint = fla_rule.backward_summarize(bwd)
        with unwritten_is_nan():
            some = fla_rule.backward_summarize(bwd, wants)
        check_only_wanted(wants, [(adjoint, WANTS_OFFSET)], [some])
        if kept:
            fla_rule.backward_ahead(bwd)
        grads = fla_rule.backward(bwd, dstate)
        actual = {"o": out, "S_out": a @ state + b, "c": adjoint, "dS_in": a.mT @ dstate + adjoint}
        actual |= {f"d{name}": grad for name, grad in zip(NAMES, grads, strict=True)}
        assert_all_close(actual, expected, 1e-5)


def check_wy(dtype: torch.dtype, log2_decay: bool, tolerance: dict[str, float]) -> None:
    """Nearly parallel keys and ``beta = 2``: the triangle to invert is large and close to full."""
    lengths, (heads, group), (key_dim, value_dim) = (65, 3), (2, 2), (24, 40)
    segments = Segments([0, *itertools.accumulate(lengths)])
    total, value_heads = segments.num_tokens, heads * group
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    keys = normal(1, 1, heads, key_dim) + 0.1 * normal(1, total, heads, key_dim)
    k = torch.nn.functional.normalize(keys, dim=-1).to(dtype)
    v = normal(1, total, value_heads, value_dim).to(dtype)
    # Any decay does here; each chunk starts anew.
    g = (-0.01 * torch.arange(total).remainder(64)).expand(value_heads, total).T[None].contiguous()
    beta = torch.full_like(g, 2.0).to(dtype)
    kernels = fla_kernels.kernels()
    (part,) = fla_kernels.split_for_launch(segments, value_heads, None)
    tables = fla_kernels.shared_arguments(part, k.device, kernels)
    unit = (tables, log2_decay, fla_kernels.FLOAT32_PRECISION)
    wy, w, u = triton_wy.wy_representation(k, v, g, beta, *unit)
    again = triton_wy.w_and_u(k, v, g, beta, wy, *unit)

    decay = g.double() * (math.log(2) if log2_decay else 1.0)
    expected = {
        n: torch.zeros(x.shape, dtype=torch.float64) for n, x in zip("awu", (wy, w, u), strict=True)
    }
    for segment, chunk in part.chunk_indices.array.tolist():
        first = int(segments.boundaries[segment]) + chunk * 64
        t = slice(first, min(first + 64, int(segments.boundaries[segment + 1])))
        for head in range(value_heads):
            key, value, d = (
                k[0, t, head // group].double(),
                v[0, t, head].double(),
                decay[0, t, head],
            )
            lower = (2 * (key @ key.T) * (d[:, None] - d).exp()).tril(-1)
            a = torch.linalg.inv(torch.eye(len(d), dtype=torch.float64) + lower)
            expected["a"][0, t, head, : len(d)] = a
            expected["w"][0, t, head] = a @ (2 * d.exp()[:, None] * key)
            expected["u"][0, t, head] = a @ (2 * value)
    assert_all_close({"a": wy, "w": w, "u": u}, expected, tolerance)
    assert torch.equal(again[0], w) and torch.equal(again[1], u)


CASES = {
    "wy-fp32": lambda: check_wy(torch.float32, False, {"a": 5e-5, "w": 5e-5, "u": 5e-5}),
    # w and u are sums that nearly cancel: they show the rounding of the factor enlarged.
    "wy-bf16": lambda: check_wy(torch.bfloat16, True, {"a": 4e-3, "w": 3e-2, "u": 1e-2}),
    "rule-equal-heads": lambda: check_rule((70, 1, 64), (1, 1), (16, 16), 0.05),
    "rule-grouped-heads": lambda: check_rule((5, 1, 65), (1, 2), (24, 40), 0.05),
    "rule-two-key-blocks": lambda: check_rule((34, 5), (2, 4), (72, 24), 0.05),
    "rule-strong-decay": lambda: check_rule((40,), (1, 1), (16, 16), 16.0),
    "rule-many-launches": lambda: (
        setattr(fla_kernels, "_MAX_GRID", 4),
        check_rule((5, 1, 9, 3, 7), (1, 2), (16, 16), 0.05),
    ),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        CASES[name]()
        print("ok", name, flush=True)
