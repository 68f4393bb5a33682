# SPDX-License-Identifier: Apache-2.0
"""A rank that fails in the middle of a step does not leave the others waiting for ever.

If it exits, its peers lose their connection and fail at once. If it lives on (held in a debugger,
or in a handler that swallowed the error), the timeout given to ``initialize_model_parallel`` ends
the collective that its peers wait in, and the traceback leads to the layer.
"""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.linear_cp import TransformerConfig
from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.workers import WorkerError, run_distributed
from tests.distributed import test_composition as composition

MODES = ("headwise", "chunkwise", "all_gather")
ROW = (0, 16, 64)
HIDDEN = 16
FAULTY = 1  # the rank that fails
TIMEOUT = 5.0  # of a collective, in seconds
# Far above the timeout, for a machine under load, and far below the ten minutes that are the
# default.
PATIENCE = 60.0


class PlannedError(RuntimeError):
    """What the faulty rank raises."""


@dataclass(frozen=True)
class Report:
    """How a rank's step ended."""

    error: str
    trace: str
    seconds: float


def make_layers(mode: str) -> Any:
    """Two GDN layers and one softmax attention, in Megatron-Core's own block."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megatron.linear_cp import get_gdn_hybrid_layer_spec

    config = TransformerConfig(
        num_layers=3,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        context_parallel_size=dist.get_world_size(),
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=3,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_cp_mode=mode,
        linear_cp_move_sequences="never",
        normalization="RMSNorm",
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        transformer_impl="local",
    )
    model_parallel_cuda_manual_seed(1)
    return TransformerBlock(config, get_gdn_hybrid_layer_spec(config))


def step(block: Any) -> None:
    cu = torch.tensor(ROW, dtype=torch.int32)
    params = PackedSeqParams("thd", cu, cu, None, None, 48, 48)
    hidden = torch.ones(ROW[-1] // dist.get_world_size(), 1, HIDDEN, requires_grad=True)
    block(hidden, None, packed_seq_params=params).sum().backward()


def plant_fault(block: Any, when: str) -> None:
    """Fail before the second layer's forward, or before its backward."""

    def fail(*_: Any) -> None:
        raise PlannedError(f"planned in {when}")

    layer = block.layers[1]
    if when == "forward":
        layer.register_forward_pre_hook(fail)
    else:
        # On the output: backward reaches it before anything of the layer.
        layer.register_forward_hook(lambda module, args, out: out[0].register_hook(fail) and None)


def ending(run: Callable[[], None]) -> Report:
    """Start together, and live until all ranks have ended."""
    dist.barrier()
    start = time.monotonic()
    report = Report("no error", "", 0.0)
    try:
        run()
    except RuntimeError as error:
        seconds = time.monotonic() - start
        report = Report(f"{type(error).__name__}: {error}", traceback.format_exc(), seconds)
    # Over the world's group, which has the long timeout of the job.
    dist.barrier()
    return report


def fail_and_live(mode: str, when: str) -> Report:
    """One good step, then one in which a rank fails."""
    from megatron.core import parallel_state

    with cpu_cuda():
        parallel_state.initialize_model_parallel(
            context_parallel_size=dist.get_world_size(),
            distributed_timeout_minutes=TIMEOUT / 60,
        )
        block = make_layers(mode)
        step(block)
        if dist.get_rank() == FAULTY:
            plant_fault(block, when)
        return ending(partial(step, block))


@pytest.mark.parametrize(
    ("mode", "when"),
    [
        ("headwise", "backward"),
        ("chunkwise", "forward"),
        ("chunkwise", "backward"),
        ("all_gather", "forward"),
    ],
)
def test_timeout_ends_the_wait_for_a_rank_that_lives_on(mode: str, when: str) -> None:
    waited, faulty = run_distributed(fail_and_live, 2, mode, when, timeout=150)
    assert faulty.error == f"PlannedError: planned in {when}"
    # The message gives the limit that was set, and the trace the place in this package.
    assert f"Timed out waiting {TIMEOUT * 1000:g}ms" in waited.error, waited
    assert "/megatron/linear_cp/comm.py" in waited.trace, waited
    assert 0.5 * TIMEOUT < waited.seconds < PATIENCE


def fail_and_exit(mode: str, when: str) -> None:
    """The same with the error left alone: the rank's process ends."""
    from megatron.core import parallel_state

    with cpu_cuda():
        parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
        block = make_layers(mode)
        step(block)
        if dist.get_rank() == FAULTY:
            plant_fault(block, when)
        step(block)


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("mode", MODES)
def test_rank_that_exits_takes_the_others_with_it(mode: str, when: str) -> None:
    """At once, long before any timeout, and the message says who was first."""
    start = time.monotonic()
    with pytest.raises(WorkerError, match=f"rank {FAULTY} failed first") as info:
        run_distributed(fail_and_exit, 4, mode, when, timeout=150)
    assert time.monotonic() - start < PATIENCE
    assert isinstance(info.value.__cause__, PlannedError)
    assert f"PlannedError: planned in {when}" in str(info.value)


def fail_in_a_stage(stage: int) -> Report:
    """PP 2: the schedule of the other stage waits for activations, or for their gradients."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    case, ranks = composition.Case("chunkwise"), composition.Ranks(pp=2, cp=2)
    with cpu_cuda():
        parallel_state.initialize_model_parallel(
            1, 2, context_parallel_size=2, distributed_timeout_minutes=TIMEOUT / 60
        )
        model_parallel_cuda_manual_seed(1)
        [model] = composition.make_models(composition.make_config(case, ranks), ranks)

        def run() -> None:
            get_forward_backward_func()(
                forward_step_func=partial(composition.forward_step, labels=False),
                data_iterator=iter(composition.micro_batches(case, ranks)),
                model=model,
                num_microbatches=len(composition.ROWS),
                seq_length=composition.TOKENS,
                micro_batch_size=1,
                forward_only=False,
            )

        run()
        if parallel_state.get_pipeline_model_parallel_rank() == stage:
            plant_fault(model.module.decoder, "backward")
        return ending(run)


@pytest.mark.parametrize("stage", [0, 1])
def test_timeout_reaches_across_pipeline_stages(stage: int) -> None:
    reports = run_distributed(fail_in_a_stage, 4, stage, timeout=150)
    first, last = reports[:2], reports[2:]
    failed, waited = (last, first) if stage else (first, last)
    for report in failed:
        assert report.error == "PlannedError: planned in backward"
    for report in waited:
        # The last stage may end its part before it needs the first again.
        assert "Timed out waiting" in report.error or report.error == "no error", report
        assert report.seconds < PATIENCE
    assert any("Timed out waiting" in report.error for report in waited)
