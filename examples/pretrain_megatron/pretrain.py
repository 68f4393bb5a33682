# SPDX-License-Identifier: Apache-2.0
"""A GDN hybrid on ``megatron.training.pretrain``, packed, with the flags of ``arguments.py``.

README.md beside this file has the command lines. What a training script of your own takes from
here: ``extra_args_provider=add_linear_cp_args``, ``linear_cp_config_from_args`` where the model is
built, and ``forward_step``.
"""

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# Before the imports that would tell of optional packages which are not installed.
warnings.filterwarnings("ignore")

import megatron.core.datasets
import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron.linear_cp import get_gdn_hybrid_layer_spec
from megatron.linear_cp.arguments import add_linear_cp_args, linear_cp_config_from_args
from megatron.linear_cp.data import (
    PackedBatch,
    make_packed_seq_params,
    pack_sequences,
    shard_batch,
    token_loss_sum,
)
from megatron.linear_cp.dynamic_cp import length_multiple
from megatron.linear_cp.micro_batch import packed_plan

LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


class PackedDocuments(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of ``row_tokens`` bytes of Python's help topics, several to a row."""

    def __init__(self, rows: int, row_tokens: int, multiple_of: int) -> None:
        # Imported here: only this text needs it.
        from pydoc_data.topics import topics

        texts = [text.encode() for _, text in sorted(topics.items())]
        self.documents = [torch.tensor(list(text), dtype=torch.int64) for text in texts]
        self.rows, self.row_tokens, self.multiple_of = rows, row_tokens, multiple_of

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        # A row follows from its number alone, so a resumed run sees what it would have seen.
        choose = random.Random(index)
        pieces, room = [], self.row_tokens
        while room >= max(2, self.multiple_of):
            piece = choose.choice(self.documents)[:room]
            pieces.append(piece)
            room -= -(-len(piece) // self.multiple_of) * self.multiple_of
        batch = pack_sequences(
            pieces, multiple_of=self.multiple_of, total_multiple_of=self.row_tokens
        )
        return vars(batch)


def datasets_provider(counts: list[int | None]) -> list[PackedDocuments | None]:
    """Datasets for training, validation and test, of that many rows."""
    args = get_args()
    # For the largest CP size, so that rows are the same at every size up to it.
    multiple_of = length_multiple(
        max(args.linear_cp_max_size or 1, args.context_parallel_size),
        tensor_model_parallel_size=args.tensor_model_parallel_size if args.sequence_parallel else 1,
    )
    make = partial(PackedDocuments, row_tokens=args.seq_length, multiple_of=multiple_of)
    return [make(count) if count else None for count in counts]


# Every rank loads for itself. Megatron would otherwise load on the first tensor-parallel rank only
# and expect the batch to be broadcast.
datasets_provider.is_distributed = True


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """The model of this pipeline stage."""
    args = get_args()
    if config is None:
        config = linear_cp_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gdn_hybrid_layer_spec(config, vp_stage=vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def forward_step(
    rows: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module
) -> tuple[torch.Tensor, LossFunction]:
    """Cut one row over the CP group, run the model, hand the schedule a loss function."""
    # The loader adds a dimension for the micro-batch, which is one packed row.
    batch = PackedBatch(**{name: tensor[0] for name, tensor in next(rows).items()})
    device = torch.cuda.current_device()
    group = parallel_state.get_context_parallel_group()
    params = make_packed_seq_params(batch.to(device), group)
    local = shard_batch(batch, packed_plan(params, group)).to(device)
    output = model(
        local.tokens, local.position_ids, None, labels=local.labels, packed_seq_params=params
    )
    return output, partial(loss_func, local.loss_mask)


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum and count of this rank; Megatron sums both over data and context parallel ranks."""
    total, count = token_loss_sum(output, loss_mask)
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}


def spare_the_wheel_from_make() -> None:
    """Megatron runs make at start-up. Its wheel holds what that would build, but no Makefile."""
    folder = Path(megatron.core.datasets.__file__).parent
    if any(folder.glob("helpers_cpp*.so")) and not (folder / "Makefile").exists():
        os.environ["MAKEFLAGS"] = "--eval=built_already:"  # a default goal with nothing to do


def main() -> None:
    """Parse Megatron's flags and ours, and train."""
    spare_the_wheel_from_make()
    args = parse_and_validate_args(extra_args_provider=add_linear_cp_args)
    if args.micro_batch_size != 1 or not args.calculate_per_token_loss:
        raise SystemExit("packed rows need --micro-batch-size 1 and --calculate-per-token-loss")
    # Keywords: the order differs between Megatron-Core 0.18 and 0.19.
    pretrain(
        cfg_container=pretrain_cfg_container_from_args(args),
        train_valid_test_dataset_provider=datasets_provider,
        model_provider=model_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        from on_cpu import megatron_training_on_cpu

        sys.argv += ["--distributed-backend", "gloo"]
        with megatron_training_on_cpu():
            main()
