# SPDX-License-Identifier: Apache-2.0
"""The module inside CUDA graphs: replays equal eager steps, and what cannot hold is refused.

A graph repeats what was recorded, with the plan that there was. So the plan must exist before the
capture, and boundaries that change afterwards must stop a replay.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

pytest.importorskip("fla", reason="needs fla-core (and Triton), which is not installed")

from megatron.linear_cp.testing.checkpoints import VOCABULARY, hybrid_config, hybrid_model
from megatron.linear_cp.testing.layer import LayerShape
from megatron.linear_cp.testing.module import (
    ModuleCase,
    build_module,
    context_parallel_groups,
    local_inputs,
    make_config,
)
from megatron.linear_cp.testing.parity import relative_rms
from megatron.linear_cp.testing.triton import first_configuration
from megatron.linear_cp.testing.workers import WorkerError, run_distributed

ROW, OTHER_ROW = (0, 8, 648, 664, 1176), (0, 648, 656, 664, 1176)
BASE = ModuleCase(
    dense=(256, 2),
    shape=LayerShape(4, 8, 128, 128),
    hidden=256,
    device="cuda",
    dtype=torch.bfloat16,
    config={"linear_cp_fp32_decay": True},
)
CASES = {"sbhd": BASE, "thd": replace(BASE, row=ROW)}
MODES = ("headwise", "chunkwise", "all_gather")
# A replay runs the kernels of an eager step; only matrix products may be split otherwise.
GATE = 1e-3
MODEL: dict[str, Any] = {
    "num_layers": 2,
    "linear_attention_freq": [1, 1],
    "hidden_size": 256,
    "ffn_hidden_size": 256,
    "kv_channels": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "bf16": True,
    "params_dtype": torch.bfloat16,
}

Tensors = dict[str, torch.Tensor]


class Step:
    """Forward and backward of one module over tensors that stay where they are."""

    def __init__(self, case: ModuleCase) -> None:
        groups = context_parallel_groups()
        self.module = build_module(case, make_config(case, groups.cp.size()), groups)
        _, hidden, self.grad, self.params = local_inputs(case, groups)
        self.hidden = hidden.requires_grad_()

    def __call__(self) -> Tensors:
        names = ["hidden", *(name for name, _ in self.module.named_parameters())]
        leaves = [self.hidden, *self.module.parameters()]
        out, _ = self.module(self.hidden, None, packed_seq_params=self.params)
        grads = torch.autograd.grad(out, leaves, self.grad)
        return {"out": out.detach()} | {f"d{n}": g for n, g in zip(names, grads, strict=True)}

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Other values in the same tensors."""
        generator = torch.Generator(self.hidden.device).manual_seed(seed)
        for x in (self.hidden, self.grad):
            x.copy_(torch.randn(x.shape, generator=generator, device=x.device))


def warm_up(step: Callable[[], Any]) -> None:
    """A few eager steps on a side stream, as a capture wants them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def capture(step: Callable[[], Tensors]) -> tuple[torch.cuda.CUDAGraph, Tensors]:
    """The graph of one step, and the tensors that its replays write."""
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog is another thread and may do what a capture must not.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = step()
    return graph, results


def replay_errors(case: ModuleCase) -> dict[str, Any]:
    """Relative RMS of a replay against an eager step, for two inputs; and how far these differ."""
    step = Step(case)
    warm_up(step)
    graph, static = capture(step)
    errors: dict[str, float] = {}
    outs = []
    for seed in (11, 12):
        step.fill(seed)
        graph.replay()
        replayed = {name: x.clone() for name, x in static.items()}
        eager = step()
        for name, x in eager.items():
            errors[name] = max(errors.get(name, 0.0), relative_rms(replayed[name], x))
        outs.append(replayed["out"])
    return {"errors": errors, "inputs apart": relative_rms(*outs)}


def run_replays(modes: tuple[str, ...]) -> dict[str, Any]:
    with first_configuration():
        return {
            f"{mode} {name}": replay_errors(replace(case, mode=mode))
            for mode in modes
            for name, case in CASES.items()
        }


@cache
def outcome(cp: int) -> list[dict[str, Any]] | Exception:
    modes = MODES if cp > 1 else ("chunkwise",)
    try:
        return run_distributed(run_replays, cp, modes, cuda=True, timeout=400)
    except WorkerError as error:
        return error


def check_replays(cp: int, name: str) -> None:
    results = outcome(cp)
    if isinstance(results, Exception):
        raise results
    for result in results:
        found = result[name]
        assert len(found["errors"]) == 2 + 7
        assert {n: e for n, e in found["errors"].items() if not e <= GATE} == {}
        assert found["inputs apart"] > 0.5, "a replay must follow its input"


@pytest.mark.parametrize("input_format", CASES)
@pytest.mark.timeout(500)
def test_replays_equal_eager_steps(input_format: str) -> None:
    check_replays(1, f"chunkwise {input_format}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("input_format", CASES)
@pytest.mark.timeout(500)
def test_replays_with_exchanges_equal_eager_steps(input_format: str, mode: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("exchanges can be captured with NCCL only, which wants a GPU per rank")
    check_replays(2, f"{mode} {input_format}")


def said_in_capture(step: Callable[[], Any]) -> str:
    try:
        capture(step)
    except ValueError as error:
        return str(error)
    return "captured"


def refusals() -> dict[str, str]:
    """What a capture says that comes too early; the same step runs eagerly afterwards."""
    said = {}
    with first_configuration():
        for case in CASES.values():
            warm_up(Step(case))  # compiles the kernels, so that nothing else can be in the way
        packed = Step(CASES["thd"])
        said["packed, no plan"] = said_in_capture(packed)
        warm_up(packed)
        packed.params.cu_seqlens_q.copy_(torch.tensor(OTHER_ROW))
        said["packed, boundaries changed"] = said_in_capture(packed)
        dense = Step(replace(BASE, dense=(320, 2)))
        said["dense, another shape"] = said_in_capture(dense)
        for step in (packed, dense):
            finite = all(bool(x.isfinite().all()) for x in step().values())
            said[f"afterwards {len(said)}"] = "finite" if finite else "not finite"
    return said


@pytest.mark.timeout(300)
def test_a_capture_that_comes_too_early_is_refused() -> None:
    [said] = run_distributed(refusals, 1, cuda=True, timeout=250)
    for name in ("packed, no plan", "packed, boundaries changed"):
        assert "run forward and backward once before the capture" in said[name]
        assert "same PackedSeqParams" in said[name]
    assert "an index table" in said["dense, another shape"]
    assert "run forward and backward once before the capture" in said["dense, another shape"]
    assert [text for name, text in said.items() if name.startswith("afterwards")] == ["finite"] * 2


def replay_with_other_boundaries() -> None:
    with first_configuration():
        step = Step(CASES["thd"])
        warm_up(step)
        graph, _ = capture(step)
        graph.replay()
        torch.cuda.synchronize()
        print("the first replay was fine")
        step.params.cu_seqlens_q.copy_(torch.tensor(OTHER_ROW))
        graph.replay()
        torch.cuda.synchronize()


@pytest.mark.timeout(300)
def test_a_replay_stops_when_boundaries_on_the_gpu_changed() -> None:
    with pytest.raises(WorkerError) as error:
        run_distributed(replay_with_other_boundaries, 1, cuda=True, timeout=250)
    assert "the first replay was fine" in str(error.value)
    assert "device-side assert" in str(error.value)
    assert "packed boundaries changed after the CUDA graph was captured" in str(error.value)


def shared_gpu() -> str:
    """What a capture says whose ranks exchange through host memory."""
    assert "cuda:nccl" not in str(dist.get_backend_config())
    with first_configuration():
        step = Step(BASE)
        warm_up(step)
        return said_in_capture(step)


@pytest.mark.timeout(300)
def test_exchanges_through_the_host_are_refused() -> None:
    if torch.cuda.device_count() >= 2:
        pytest.skip("two ranks get a GPU each here and NCCL, whose exchanges can be captured")
    for said in run_distributed(shared_gpu, 2, cuda=True, timeout=250):
        assert "exchanges through host memory" in said
        assert "2 ranks" in said


# --- Megatron-Core's own graphs of layers ------------------------------------------------------


def model_step(model: torch.nn.Module, seed: int, params: PackedSeqParams | None) -> Tensors:
    """Loss and gradients on 256 tokens, one packed row or two samples."""
    generator = torch.Generator().manual_seed(seed)
    size = (1, 256) if params is not None else (2, 128)
    tokens, labels = torch.randint(0, VOCABULARY, (2, *size), generator=generator).cuda()
    positions = torch.arange(size[1]).cuda().expand(size)
    model.zero_grad()
    loss = model(tokens, positions, None, labels=labels, packed_seq_params=params).float().mean()
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | grads


def layer_graphs(packed: bool) -> dict[str, Any]:
    """Megatron-Core records the first step, captures its layers, and replays them from then on."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.cuda_graphs import create_cudagraphs

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=True)
    params = None
    if packed:
        cu = torch.tensor([0, 64, 256], dtype=torch.int32, device="cuda")
        params = PackedSeqParams(
            "thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=192, max_seqlen_kv=192
        )
    plain, graphed = (
        hybrid_model(hybrid_config("chunkwise", **MODEL, cuda_graph_impl=impl)).cuda()
        for impl in ("none", "local")
    )
    graphed.load_state_dict(plain.state_dict())
    torch.cuda.synchronize()
    with first_configuration():
        model_step(graphed, 0, params)
        try:
            create_cudagraphs()
        except ValueError as error:
            return {"said": str(error)}
        wrong: list[str] = []
        losses = []
        for seed in (1, 2):
            replayed, eager = (model_step(model, seed, params) for model in (graphed, plain))
            wrong += sorted(replayed.keys() ^ eager.keys())
            wrong += [n for n in eager if not relative_rms(replayed[n], eager[n]) <= 1e-2]
            losses.append(float(eager["loss"]))
    layers = [layer.cudagraph_manager.cudagraph_runners for layer in graphed.decoder.layers]
    return {
        "said": "captured",
        "wrong": wrong,
        "losses": losses,
        "captured": [[runner.fwd_graph is not None for runner in found] for found in layers],
    }


@pytest.mark.timeout(300)
def test_megatron_cores_graphs_of_layers_on_dense_input() -> None:
    [result] = run_distributed(layer_graphs, 1, False, cuda=True, timeout=250)
    assert result["said"] == "captured"
    assert result["wrong"] == []
    assert result["losses"][0] != result["losses"][1]
    assert result["captured"] == [[True], [True]]


@pytest.mark.timeout(300)
def test_megatron_cores_graphs_of_layers_refuse_packed_input() -> None:
    """It puts buffers in the place of the boundaries, which the layer must know at capture."""
    [result] = run_distributed(layer_graphs, 1, True, cuda=True, timeout=250)
    assert "cuda_graph_impl='none' for packed input" in result["said"]
