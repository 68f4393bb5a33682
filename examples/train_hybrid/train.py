# SPDX-License-Identifier: Apache-2.0
"""Train a small Qwen3-Next-style hybrid at CP 1 and under every CP mode, and compare the losses.

    python examples/train_hybrid/train.py [--data file.txt|file.jsonl] [--steps 30]

Two processes train on CPU with gloo; with two CUDA devices they use NCCL and FLA's kernels, and a
single one is not used. Exits with status 1 if any mode leaves CP 1 by more than 1e-4 relative at
any step.
"""

import argparse
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

# Before the imports that would tell of optional packages which are not installed. The processes
# started below import this file and so do the same.
warnings.filterwarnings("ignore")
for noisy in ("megatron", "torch.utils.cpp_extension"):
    logging.getLogger(noisy).setLevel(logging.ERROR)

import report
import text
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

PROCESSES = 2
TOLERANCE = 1e-4


def main() -> int:
    """Parse the command line, start the processes, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help=".txt or .jsonl to train on (default: Python's help topics)")
    parser.add_argument("--steps", type=int, default=30, help="training steps of each run")
    parser.add_argument("--output", default="demo_losses.png", help="picture of the loss curves")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, got {arguments.steps}")
    try:
        documents = text.load_documents(arguments.data or None)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tokens = sum(len(d) for d in documents)
    print(f"{len(documents)} documents, {tokens:,} byte tokens, {PROCESSES} processes")
    gpus = torch.cuda.device_count()
    if gpus < PROCESSES:
        # NCCL wants a GPU for each process, and Megatron-Core's DDP does not reduce CUDA tensors
        # over gloo. Hidden here, so that the processes started below do not see it.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if gpus:
            print(f"{gpus} GPU for {PROCESSES} processes: training on the CPU")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            worker,
            args=(documents, arguments.steps, folder),
            nprocs=PROCESSES,
            start_method="spawn",
        )
        results = torch.load(Path(folder) / "results.pt", weights_only=False)
    rows = report.compare(results, TOLERANCE)
    print(report.table(rows))
    report.draw(results, arguments.output)
    print(f"loss curves: {arguments.output}")
    if all(row.passed for row in rows):
        return 0
    print(f"error: a mode left CP 1 by more than {TOLERANCE:g} relative", file=sys.stderr)
    return 1


def worker(rank: int, documents: list[torch.Tensor], steps: int, folder: str) -> None:
    """One of the processes: every run after the other on the same data."""
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if use_cuda else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=PROCESSES,
    )
    # Megatron-Core asks torch.cuda for a device even on CPU. On a GPU, tuning float32 kernels for
    # these small shapes would take minutes and gain nothing.
    from megatron.linear_cp.testing.cpu import cpu_cuda
    from megatron.linear_cp.testing.triton import first_configuration

    with first_configuration() if use_cuda else cpu_cuda():
        results = run_all(documents, steps, device)
    if rank == 0:
        torch.save(results, Path(folder) / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_all(
    documents: list[torch.Tensor], steps: int, device: torch.device
) -> "dict[str, report.Result]":
    """CP 1, then every mode at CP 2."""
    # Imported here: the parent process builds no model.
    from model import Run, Settings, train

    runs = [Run("cp 1", "headwise", 1)]
    runs += [Run(mode, mode, PROCESSES) for mode in ("headwise", "chunkwise", "all_gather")]
    settings = Settings(
        steps=steps,
        vocab_size=text.VOCAB_SIZE,
        # FLA's kernels are made for the head size of real models; on CPU a small one saves time.
        linear_head_dim=128 if device.type == "cuda" else 16,
    )
    results = {}
    bar = tqdm(total=steps * len(runs), unit="step", disable=dist.get_rank() != 0)
    for run in runs:
        bar.set_description(run.name)
        batches = text.packed_batches(
            documents, row_tokens=settings.row_tokens, multiple_of=2 * PROCESSES, seed=settings.seed
        )

        def on_step(loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.4f}")
            bar.update()

        results[run.name] = train(run, settings, batches, device, on_step)
    bar.close()
    return results


if __name__ == "__main__":
    sys.exit(main())
