# SPDX-License-Identifier: Apache-2.0
"""The two ops in a plain PyTorch loop: no Megatron model, no Megatron launcher.

    torchrun --nproc-per-node 2 examples/functional/train.py

A few layers of Gated Delta Net learn packed rows whose sequences run across the ranks. Every rank
computes the gradients of the whole batch alone as well, and the sum over the ranks must equal them:
the script exits with status 1 if it does not. CPU with gloo; with a GPU for each process, NCCL and
FLA's kernels.
"""

import argparse
import contextlib
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.linear_cp import ContextParallelPlan
from megatron.linear_cp.ops import causal_conv1d, gated_delta_rule
from megatron.linear_cp.testing.triton import first_configuration

LENGTHS = (150, 9, 301, 1, 51)  # of the sequences in a row; their sum divides by every CP size here
VOCABULARY = 64
TOLERANCE = 1e-4


class GatedDeltaNetLayer(nn.Module):
    """Projection, convolution, gates, rule, projection; ``plan`` is all that CP asks for."""

    def __init__(
        self, hidden: int, key_heads: int = 2, value_heads: int = 4, head_dim: int = 32
    ) -> None:
        super().__init__()
        self.widths = [key_heads * head_dim, key_heads * head_dim, value_heads * head_dim]
        self.head_dim = head_dim
        self.norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, sum(self.widths), bias=False)
        self.gates = nn.Linear(hidden, 2 * value_heads, bias=False)
        self.conv = nn.Parameter(torch.randn(sum(self.widths), 4) / 2)
        self.log_decay = nn.Parameter(torch.full((value_heads,), -3.0))
        self.out = nn.Linear(self.widths[2], hidden, bias=False)

    def forward(self, x: torch.Tensor, plan: ContextParallelPlan) -> torch.Tensor:
        """Hidden states ``[1, T, hidden]`` of the local tokens in plan order, the same back."""
        normed = self.norm(x)
        qkv = causal_conv1d(self.qkv(normed), self.conv, plan=plan)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in qkv.split(self.widths, dim=-1))
        decay, write = self.gates(normed).chunk(2, dim=-1)
        out = gated_delta_rule(
            q,
            k,
            v,
            -self.log_decay.exp() * F.softplus(decay),
            write.sigmoid(),
            plan=plan,
            use_qk_l2norm_in_kernel=True,
        )
        return x + self.out(out.flatten(-2))


class Model(nn.Module):
    """Embedding, two layers, logits."""

    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(GatedDeltaNetLayer(hidden) for _ in range(2))
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, plan: ContextParallelPlan) -> torch.Tensor:
        """Token ids ``[1, T]`` in plan order to logits ``[1, T, VOCABULARY]``."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, plan)
        return self.head(x)


@dataclass(frozen=True)
class Row:
    """Packed sequences: ``tokens`` and next-token ``labels`` (-100 at an end) of ``[1, T]``."""

    tokens: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor


def make_row(seed: int, device: torch.device) -> Row:
    """Sequences that repeat a few random tokens, so that there is something to remember."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = [], []
    for length in LENGTHS:
        phrase = torch.randint(VOCABULARY, (7,), generator=generator)
        sequence = phrase.repeat(length // 7 + 1)[:length]
        tokens.append(sequence)
        # Shifted before the cut: the next token may lie on another rank.
        labels.append(torch.cat([sequence[1:], torch.tensor([-100])]))
    ends = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Row(torch.cat(tokens)[None].to(device), torch.cat(labels)[None].to(device), ends)


def gradients(model: Model, row: Row, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Set every gradient of the row's mean loss over ``group`` (None: alone); returns the loss."""
    # Once per micro-batch; all layers use it. Without softmax attention nothing asks for zigzag,
    # and contiguous cuts a sequence into fewer segments.
    plan = ContextParallelPlan.build(row.cu_seqlens, group, layout="contiguous")
    mine = plan.local_indices.on(row.tokens.device)
    labels = row.labels[0, mine]
    logits = model(row.tokens[:, mine], plan)[0]
    # A sum over this rank's tokens, divided by the count of the whole row: gradients then add up.
    total = int((row.labels != -100).sum())
    loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / total
    model.zero_grad()
    loss.backward()
    loss = loss.detach()
    if group is not None:
        dist.all_reduce(loss, group=group)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
    return loss


def train(steps: int, device: torch.device) -> tuple[list[float], float]:
    """Losses, and the largest relative distance of any gradient to one rank's own."""
    torch.manual_seed(1)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    group = dist.group.WORLD
    losses, worst = [], 0.0
    for step in range(steps):
        row = make_row(step % 4, device)
        gradients(model, row, None)
        alone = [parameter.grad.clone() for parameter in model.parameters()]
        losses.append(float(gradients(model, row, group)))
        for expected, parameter in zip(alone, model.parameters(), strict=True):
            distance = (parameter.grad - expected).norm() / expected.norm()
            # A NaN would lose every comparison with max().
            worst = max(worst, float(distance.nan_to_num(float("inf"))))
        optimizer.step()
    return losses, worst


def main() -> int:
    """Join the processes that torchrun started, train, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    if "LOCAL_WORLD_SIZE" not in os.environ:
        sys.exit("error: start this with torchrun --nproc-per-node N")
    device = torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
        torch.cuda.set_device(device)
    # NCCL wants a GPU for each process; processes that share one talk over gloo.
    dist.init_process_group("nccl" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo")
    # Tuning FLA's kernels takes minutes, which a few steps do not repay.
    with first_configuration() if gpus else contextlib.nullcontext():
        losses, worst = train(steps, device)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks on {device.type}, {sum(LENGTHS)} tokens a row")
        print(f"loss: {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")
        print(f"gradients against one rank: {worst:.1e} relative at most, limit {TOLERANCE:g}")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
