# SPDX-License-Identifier: Apache-2.0
"""Policy-gradient steps on packed rollouts, with a CP size chosen for every micro-batch.

    torchrun --nproc-per-node 4 examples/rl_dynamic_cp/train.py

Rollouts of very uneven lengths are packed into micro-batches. A short one runs on one rank while
others run beside it; a long one takes a context-parallel group of two or more. The same steps then
run with CP 1 throughout, and the script exits with status 1 unless every loss and gradient norm
agrees, and the first log-probs are those of the "engine". CPU with gloo; with a GPU for each
process, NCCL and FLA's kernels.
"""

import argparse
import logging
import os
import sys
import warnings
from dataclasses import dataclass, replace

# Before the imports that would tell of optional packages which are not installed.
warnings.filterwarnings("ignore")
for noisy in ("megatron", "torch.utils.cpp_extension"):
    logging.getLogger(noisy).setLevel(logging.ERROR)

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from policy import VOCABULARY, Rollout, make_policy, run_micro_batch

from megatron.linear_cp.dynamic_cp import create_context_parallel_groups
from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.triton import first_configuration

TOKENS = 384  # what fits on all ranks together here; many thousands on GPUs
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Step:
    """What one optimizer step did, the same on every rank."""

    loss: float
    gradient_norm: float
    engine_gap: float  # largest distance of a log-prob to the engine's
    sizes: list[int]  # CP size of each micro-batch


def make_rollouts() -> list[Rollout]:
    """Most answers are short, a few run on: stands for your engine and your reward model."""
    generator = torch.Generator().manual_seed(1)
    rollouts = []
    for length in (311, 150, 70, 33, 17, 12, 9, 120, 25, 6):
        tokens = torch.randint(1, VOCABULARY, (length,), generator=generator)
        reward = float((tokens % 2 == 0).float().mean()) - 0.5
        rollouts.append(Rollout(tokens, prompt_length=4, advantage=10 * reward))
    return rollouts


def make_micro_batches(rollouts: list[Rollout], tokens_per_rank: int) -> list[list[int]]:
    """First fit, longest first: what exceeds one rank stands alone, the others share a rank's."""
    micro_batches: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(rollouts)), key=lambda i: -len(rollouts[i].tokens)):
        length = len(rollouts[index].tokens)
        fits = next((i for i, free in enumerate(room) if free >= length), None)
        if fits is None:
            micro_batches.append([index])
            room.append(tokens_per_rank - length)
        else:
            micro_batches[fits].append(index)
            room[fits] -= length
    return micro_batches


def run_all(
    policy: DistributedDataParallel,
    rollouts: list[Rollout],
    micro_batches: list[list[int]],
    groups: list[dist.ProcessGroup],
    learn: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run each micro-batch on its group; those of one CP size run side by side."""
    totals, mine = torch.zeros(2), {}
    for size in sorted({group.size() for group in groups}):
        same = [(m, g) for m, g in zip(micro_batches, groups, strict=True) if g.size() == size]
        # Block b of this size holds the ranks from b * size. One that has nothing left to do goes
        # on at once: gradients are summed over all ranks after the last micro-batch only.
        for members, group in same[dist.get_rank() // size :: dist.get_world_size() // size]:
            sums, found = run_micro_batch(policy, [rollouts[i] for i in members], group, learn)
            totals += sums
            mine.update(zip(members, found, strict=True))
    everyone: list[dict[int, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    whole = {i: x for found in everyone for i, x in found.items()}
    return totals, [whole[i] for i in range(len(rollouts))]


def train(steps: int, device: torch.device, dynamic: bool) -> list[Step]:
    """Train from scratch, with a CP size per micro-batch or with CP 1 throughout."""
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    sizes = [2**i for i in range(dist.get_world_size().bit_length())]
    groups = create_context_parallel_groups(sizes)
    policy = make_policy(device, dist.get_world_size())
    settings = OptimizerConfig(optimizer="adam", lr=3e-3, clip_grad=1.0)
    optimizer = get_megatron_optimizer(settings, [policy])
    pool = make_rollouts()
    tokens_per_rank = TOKENS // dist.get_world_size()
    micro_batches = make_micro_batches(pool, tokens_per_rank)
    alone = [groups[1]] * len(micro_batches)
    # The first policy stands for the inference engine.
    with torch.no_grad():
        _, engine = run_all(policy, pool, micro_batches, alone, learn=False)
    rollouts = [replace(r, log_probs=x) for r, x in zip(pool, engine, strict=True)]
    chosen = alone
    if dynamic:
        lengths = [[len(rollouts[i].tokens) for i in members] for members in micro_batches]
        chosen = [groups[groups.choose(n, tokens_per_rank)] for n in lengths]
    done = []
    for _ in range(steps):
        policy.zero_grad_buffer()
        optimizer.zero_grad()
        totals, log_probs = run_all(policy, rollouts, micro_batches, chosen, learn=True)
        policy.finish_grad_sync()
        totals = totals.to(device)
        dist.all_reduce(totals)
        policy.scale_gradients(1 / float(totals[1]))
        _, norm, _ = optimizer.step()
        gap = float((torch.cat(log_probs) - torch.cat(engine)).abs().max())
        loss = float(totals[0] / totals[1])
        done.append(Step(loss, float(norm), gap, [group.size() for group in chosen]))
    parallel_state.destroy_model_parallel()
    return done


def largest_difference(dynamic: list[Step], static: list[Step]) -> float:
    """Relative, of loss and gradient norm, over all steps."""
    found = []
    for a, b in zip(dynamic, static, strict=True):
        found += [abs(a.loss - b.loss) / abs(b.loss)]
        found += [abs(a.gradient_norm - b.gradient_norm) / b.gradient_norm]
    # A NaN would lose every comparison.
    return max(x if x == x else float("inf") for x in found)


def main() -> int:
    """Join the processes that torchrun started, train twice, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    if "LOCAL_WORLD_SIZE" not in os.environ:
        sys.exit("error: start this with torchrun --nproc-per-node N")
    device = torch.device("cpu")
    gpus, processes = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    if 0 < gpus < processes:
        # NCCL wants one for each, and Megatron-Core's DDP does not reduce CUDA tensors over gloo.
        sys.exit(
            f"error: {processes} processes for {gpus} GPU(s); start at most {gpus} processes, "
            "or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on the CPU"
        )
    if gpus:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    # Megatron-Core asks torch.cuda for a device even on CPU. On a GPU, tuning float32 kernels for
    # these small shapes would take minutes and gain nothing.
    with first_configuration() if gpus else cpu_cuda():
        dynamic, static = (train(steps, device, choice) for choice in (True, False))
    difference = largest_difference(dynamic, static)
    # Before its first step the policy is the engine's.
    gap = dynamic[0].engine_gap
    if dist.get_rank() == 0:
        print(f"CP sizes of the micro-batches: {dynamic[0].sizes}")
        for number, (ours, base) in enumerate(zip(dynamic, static, strict=True), start=1):
            print(f"step {number}: loss {ours.loss:+.6f}, with CP 1 throughout {base.loss:+.6f}")
        print(f"log-probs against the engine's, before the first step: {gap:.1e}")
        print(f"loss and gradient norm against CP 1: {difference:.1e}, limit of both {TOLERANCE:g}")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if difference <= TOLERANCE and gap <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
