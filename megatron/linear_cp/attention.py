# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention under context parallelism, for stacks without Transformer Engine."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention as _MegatronSelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention.bias import causal_lower_right

from megatron.linear_cp.comm import all_gather_rows
from megatron.linear_cp.hidden_layout import convert_hidden
from megatron.linear_cp.micro_batch import physical_packed_seq_params, plan_for
from megatron.linear_cp.packed_seq_params import is_packed, resolve_cp_group
from megatron.linear_cp.permute import permute_rows
from megatron.linear_cp.plan import ContextParallelPlan

MASK_TYPES = (AttnMaskType.causal, AttnMaskType.padding_causal)
# Config entries that change what attention computes, and the one value that is computed here.
ONLY_VALUES: dict[str, Any] = {
    "attention_dropout": 0.0,
    "softmax_type": "vanilla",
    "window_size": None,
    "qk_clip": False,
    "log_max_attention_logit": False,
    "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False,
}


class CoreAttention(MegatronModule):
    """Causal ``softmax(scale * q k^T) v`` within each sequence, under any layout.

    Keys and values of the whole micro-batch are gathered over its context-parallel group (backward:
    reduce-scattered); each run of local queries then attends to its sequence up to its own end, so
    no rank ever holds more scores than those of its own queries. Grouped queries are legal.

    The constructor takes what Megatron-Core passes to every core attention.

    Args:
        config: the layout is read from ``linear_cp_layout`` (zigzag where it has none).
        layer_number: unused, as is ``cp_comm_type``: there is one way to exchange here.
        attn_mask_type: causal or padding_causal.
        attention_type: ``"self"``.
        softmax_scale: None means ``1 / sqrt(head size)``.
        pg_collection: its ``cp`` group serves micro-batches that name none; None takes
            Megatron-Core's global groups.

    Raises:
        ValueError: a mask or attention type, or a config entry, that is not computed here.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        _check_mask_type(attn_mask_type)
        if attention_type != "self":
            raise ValueError(f"CoreAttention computes self attention, got {attention_type!r}")
        for name, value in ONLY_VALUES.items():
            asked = getattr(config, name, value)
            if asked != value:
                raise ValueError(
                    f"CoreAttention computes {name}={value!r} only, got {asked!r}; use Transformer "
                    "Engine's attention or change the config"
                )
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = pg_collection.cp
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.layout = getattr(config, "linear_cp_layout", "zigzag")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: ``[t, heads, dim]`` packed or ``[s, b, heads, dim]`` dense local tokens.
            key: the same with ``groups`` heads, of which ``heads`` is a multiple.
            value: as ``key``; its ``dim`` may differ.
            attention_mask: not read: the mask follows from the boundaries. A padding mask for
                dense input is refused.
            attn_mask_type: None means the constructor's.
            attention_bias: must be None.
            packed_seq_params: boundaries and group of the micro-batch.

        Returns:
            ``[t, heads * dim]`` or ``[s, b, heads * dim]``, ``dim`` of the values, in the query's
            dtype.

        Raises:
            ValueError: a request that is not computed here, or whatever is wrong with the
                micro-batch, see :func:`megatron.linear_cp.micro_batch.plan_for`.
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        _check_mask_type(mask_type)
        packed = is_packed(packed_seq_params)
        if attention_bias is not None:
            raise ValueError("CoreAttention takes no attention_bias")
        if mask_type == AttnMaskType.padding_causal and not packed and attention_mask is not None:
            raise ValueError(
                "CoreAttention takes no padding mask for dense input: pack the sequences (thd), or "
                "pad at their ends, mask the loss, and use AttnMaskType.causal"
            )
        if query.dim() != (3 if packed else 4):
            raise ValueError(
                f"query has shape {tuple(query.shape)}; it must be "
                f"{'[t, heads, dim] packed (thd)' if packed else '[s, b, heads, dim] dense'} input"
            )
        batch = 1 if packed else query.shape[1]
        plan = plan_for(
            packed_seq_params,
            resolve_cp_group(self.cp_group, packed_seq_params),
            local_tokens=query.shape[0],
            batch=batch,
            layout=self.layout,
            conv_kernel_size=getattr(self.config, "linear_conv_kernel_dim", None) or 4,
        )
        if packed:
            return _attend(query, key, value, plan, self.softmax_scale).flatten(1)
        # The plan of dense input has its samples one after another.
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = _attend(q, k, v, plan, self.softmax_scale)
        return out.view(batch, -1, *out.shape[1:]).transpose(0, 1).flatten(2)


class SelfAttention(_MegatronSelfAttention):
    """Megatron-Core's self attention under the micro-batch's own group, and in any layout.

    The base class rotates by the rank in the constructor's group, which is wrong for a micro-batch
    that brings another one. It also knows the zigzag layout only, which balances the causal mask:
    where the config declares contiguous, the hidden states are brought to zigzag before it and back
    after it, the only conversions that a hybrid stack in the contiguous layout makes.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the base class, whose arguments these are; ``self`` is not modified."""
        width = self.config.hidden_size
        if hidden_states.dim() != 3 or hidden_states.shape[-1] != width:
            raise ValueError(
                f"hidden_states must be [s, b, {width}], got {list(hidden_states.shape)}"
            )
        group = resolve_cp_group(self.pg_collection.cp, packed_seq_params)
        stored, working = self._plans(hidden_states, group, packed_seq_params)
        runtime = self
        if group is not self.pg_collection.cp or stored is not working:
            # Parameters and submodules are shared with the copy; only its group and the layout
            # that its core sees differ.
            runtime = copy.copy(self)
            runtime.pg_collection = copy.copy(self.pg_collection)
            runtime.pg_collection.cp = group
            runtime._modules = dict(self._modules)
            if isinstance(self.core_attention, CoreAttention):
                runtime.core_attention = copy.copy(self.core_attention)
                runtime.core_attention.layout = working.layout
        if is_packed(packed_seq_params) and not isinstance(self.core_attention, CoreAttention):
            assert packed_seq_params is not None
            packed_seq_params = physical_packed_seq_params(packed_seq_params, working)
        sharded_over = self.pg_collection.tp if self.config.sequence_parallel else None
        hidden_states = convert_hidden(hidden_states, stored, working, sharded_over)
        out, bias = super(SelfAttention, runtime).forward(
            hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs
        )
        return convert_hidden(out, working, stored, sharded_over), bias

    def _plans(
        self,
        hidden: torch.Tensor,
        group: dist.ProcessGroup,
        packed_seq_params: PackedSeqParams | None,
    ) -> tuple[ContextParallelPlan, ContextParallelPlan]:
        """How the tokens are stored, and how attention wants them."""
        sequence_parallel = self.config.sequence_parallel
        stored = plan_for(
            packed_seq_params,
            group,
            local_tokens=hidden.shape[0]
            * (self.pg_collection.tp.size() if sequence_parallel else 1),
            batch=hidden.shape[1],
            layout=getattr(self.config, "linear_cp_layout", "zigzag"),
            conv_kernel_size=getattr(self.config, "linear_conv_kernel_dim", None) or 4,
        )
        return stored, stored if group.size() == 1 else stored.in_layout("zigzag")


def _check_mask_type(mask_type: AttnMaskType) -> None:
    if mask_type not in MASK_TYPES:
        raise ValueError(
            f"CoreAttention is causal, got {mask_type}: use one of "
            f"{', '.join(str(kind) for kind in MASK_TYPES)}"
        )


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: ContextParallelPlan,
    scale: float | None,
) -> torch.Tensor:
    """``[T, heads, dim]`` local rows in plan order to ``[T, heads, value dim]``."""
    if plan.cp_size > 1:
        # One collective for both.
        sizes = [key.shape[-1], value.shape[-1]]
        rows = all_gather_rows(torch.cat([key, value], -1), plan.group)
        order, back = (t.on(rows.device) for t in (plan.global_order, plan.gathered_indices))
        rows = permute_rows(rows, order, back)
        key, value = torch.split(rows, sizes, -1)
    outputs = []
    local = plan.segments.boundaries.tolist()
    for (start, stop), first, last in zip(plan.segment_context, local[:-1], local[1:], strict=True):
        outputs.append(_causal(query[first:last], key[start:stop], value[start:stop], scale))
    if not outputs:
        return query.new_zeros((0, query.shape[1], value.shape[-1]))
    return torch.cat(outputs)


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """The queries are the last tokens of their context: query ``i`` sees all but the later ones."""
    heads_per_group = query.shape[1] // key.shape[1]
    if query.is_cuda and query.dtype not in (torch.bfloat16, torch.float16):
        # Only the half-precision kernels know grouped heads; the fallback keeps all the scores.
        key, value = (x.repeat_interleave(heads_per_group, 1) for x in (key, value))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    square = q.shape[2] == k.shape[2]
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if square else causal_lower_right(q.shape[2], k.shape[2]),
        is_causal=square,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)
