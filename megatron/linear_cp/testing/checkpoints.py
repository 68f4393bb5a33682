# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of whole models: a small hybrid, and saving and loading it all or not at all."""

import dataclasses
import queue
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from megatron.linear_cp import TransformerConfig

VOCABULARY = 64
# Heads fit TP 4 in every mode, and headwise at TP 2 with CP 4.
HYBRID: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 8,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "normalization": "RMSNorm",
    "activation_func": F.silu,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "calculate_per_token_loss": True,
    "gradient_accumulation_fusion": False,
    "transformer_impl": "local",
}


def hybrid_config(mode: str, **changes: Any) -> TransformerConfig:
    """Three GDN layers and one of softmax attention, for the groups that exist."""
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
    }
    return TransformerConfig(**{**HYBRID, **sizes, "linear_cp_mode": mode, **changes})


def hybrid_model(config: Any, spec: Any = None) -> torch.nn.Module:
    """A GPTModel of ``config``, with the package's block spec unless one is given."""
    from megatron.core.models.gpt import GPTModel

    from megatron.linear_cp import get_gdn_hybrid_layer_spec

    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=get_gdn_hybrid_layer_spec(config) if spec is None else spec,
        vocab_size=VOCABULARY,
        max_sequence_length=256,
        position_embedding_type="rope",
        rotary_percent=0.5,
        share_embeddings_and_output_weights=False,
    )
    return model


def step_folder(root: str | Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(root, f"step_{step:06d}")


def latest_checkpoint(root: str | Path) -> Path | None:
    """The newest complete checkpoint: ``metadata.json`` is what Megatron-Core writes last."""
    folders = sorted(Path(root).glob("step_*"), reverse=True)
    complete = (f for f in folders if dist_checkpointing.check_is_distributed_checkpoint(str(f)))
    return next(complete, None)


def save_checkpoint(
    folder: str | Path,
    model: torch.nn.Module,
    optimizer: Any = None,
    common: Mapping[str, Any] | None = None,
) -> None:
    """Write parameters, optimizer state and whatever is equal on every rank; for all ranks."""
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _sharded_state(model, optimizer, is_loading=False) | {"common": dict(common or {})}
    # What was written comes back through a queue of another process, made for asynchronous saves;
    # each rank would start an interpreter for it.
    with mock.patch.object(filesystem_async, "get_write_results_queue", queue.Queue):
        dist_checkpointing.save(state, str(folder), verify_integrity=True)


def load_checkpoint(
    folder: str | Path,
    model: torch.nn.Module,
    optimizer: Any = None,
    verify_integrity: bool = False,
) -> dict[str, Any]:
    """Load what ``save_checkpoint`` wrote, under any groups and mode; for all ranks.

    ``dist_checkpointing.load`` reads into the tensors it is given, parameters included, stops where
    a file is bad, and tells only the ranks that needed that file. Here it reads into new memory,
    and nothing changes anywhere before every rank has all of it.

    Args:
        folder: of one checkpoint.
        model: the bare model, not wrapped.
        optimizer: Megatron-Core's, or None.
        verify_integrity: compare every file with its hash first.

    Returns:
        ``common``, as it was saved.

    Raises:
        CheckpointingException: a file is missing, cannot be read, or (with ``verify_integrity``) is
            not what was written; on every rank, and nothing has changed.
    """
    wanted = dict_list_map_outplace(
        _in_new_memory, _sharded_state(model, optimizer, is_loading=True)
    )
    state: dict[str, Any] = {}
    error: BaseException | None = None
    try:
        state = dist_checkpointing.load(wanted, str(folder), verify_integrity=verify_integrity)
    # PyTorch's own is a BaseException.
    except (Exception, CheckpointException) as caught:
        error = caught
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, "" if error is None else _cause(error))
    # Ranks mostly fail alike: one line for those that do.
    failures = {text: rank for rank, text in reversed(list(enumerate(everyone))) if text}
    if failures:
        causes = "\n".join(f"rank {rank}: {text}" for text, rank in failures.items())
        raise CheckpointingException(f"{folder} was not loaded by any rank:\n{causes}") from error
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    common: dict[str, Any] = state["common"]
    return common


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        # Every rank reads for itself, so what it holds is one error, this rank's.
        [error, *_] = [cause for cause, _ in error.failures.values()]
    return f"{type(error).__name__}: {error}"


def _sharded_state(model: Any, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    state = {"model": model.sharded_state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=is_loading)
    return state


def _in_new_memory(value: Any) -> Any:
    if isinstance(value, (ShardedTensor, ShardedTensorFactory)):
        return dataclasses.replace(value, data=torch.empty_like(value.data))
    return value
