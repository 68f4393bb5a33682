# SPDX-License-Identifier: Apache-2.0
"""The Gated Delta Net layer whose tokens may be spread over context-parallel ranks."""

from collections.abc import Callable
from typing import Any, Self

import torch
from megatron.core import tensor_parallel
from megatron.core.jit import jit_fuser
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as _UpstreamGatedDeltaNet
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.linear_cp.config import check_declares_linear_cp
from megatron.linear_cp.exchange_choice import LayerSizes, working_plan
from megatron.linear_cp.hidden_layout import convert_hidden
from megatron.linear_cp.micro_batch import plan_for
from megatron.linear_cp.modes import (
    GatedDeltaNetInputs,
    check_linear_cp_executor,
    run_linear_cp_mode,
)
from megatron.linear_cp.modes.heads import check_heads
from megatron.linear_cp.norm import RMSNorm
from megatron.linear_cp.ops.fla_exchange import check_fla_exchange
from megatron.linear_cp.ops.split import split_channels
from megatron.linear_cp.packed_seq_params import is_packed, resolve_cp_group
from megatron.linear_cp.plan import ContextParallelPlan

# What the config declares and no call may change.
_DECLARED = {
    "linear_cp_mode",
    "gdn_cp_mode",
    "linear_cp_layout",
    "linear_cp_state_exchange",
    "linear_cp_move_sequences",
}

_HALVES = (torch.bfloat16, torch.float16)

__all__ = ["GatedDeltaNet", "GatedDeltaNetSubmodules"]


class GatedDeltaNet(_UpstreamGatedDeltaNet):
    """Gated Delta Net that runs the CP mode its config declares, under the micro-batch's CP group.

    Construction, parameters (names, shapes, initialisation) and ``sharded_state_dict`` are those of
    Megatron-Core's module of the installed release: checkpoints load both ways and do not know the
    mode. Only ``forward`` is ours, and nothing in it depends on the CP size at construction.

    With ``config.linear_cp_fp32_decay`` the parameters ``A_log`` and ``dt_bias`` are float32 and
    stay so when the module, or a model that holds it, is converted to bf16 or fp16.

    Args:
        config: a config with ``linear_cp_mode``, see
            :class:`megatron.linear_cp.TransformerConfig`.
        submodules: specs of ``in_proj``, ``out_norm`` and ``out_proj``.
        layer_number: 1-based.
        bias, conv_bias, conv_init, use_qk_l2norm, A_init_range: as in Megatron-Core.
        pg_collection: its ``tp`` and ``cp`` groups; ``cp`` serves micro-batches that name none.
        name: instance name.
        cp_comm_type, pp_layer_offset: what ``TransformerLayer`` passes to every attention; unused.
        stack_layout: the one layout that the attention in the same stack knows, if only one.

    Raises:
        TypeError: a config that declares no ``linear_cp_mode``.
        ValueError: a convolution activation other than SiLU, or a stack of another layout.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int | None = None,
        bias: bool = False,
        conv_bias: bool = False,
        conv_init: float | None = None,
        use_qk_l2norm: bool = True,
        A_init_range: tuple[float, float] = (1, 16),
        pg_collection: ProcessGroupCollection | None = None,
        *,
        name: str | None = None,
        cp_comm_type: str | None = None,
        pp_layer_offset: int | None = None,
        stack_layout: str | None = None,
    ) -> None:
        check_declares_linear_cp(config)
        if stack_layout not in (None, config.linear_cp_layout):
            raise ValueError(
                f"the config declares linear_cp_layout={config.linear_cp_layout!r} but Megatron-"
                f"Core's SelfAttention in the same spec knows {stack_layout!r} only; swap it too: "
                f"use_linear_cp(spec, linear_cp_layout={config.linear_cp_layout!r})"
            )
        super().__init__(
            config,
            submodules,
            layer_number=layer_number,
            bias=bias,
            conv_bias=conv_bias,
            conv_init=conv_init,
            use_qk_l2norm=use_qk_l2norm,
            A_init_range=A_init_range,
            pg_collection=pg_collection,
            name=name,
        )
        if self.activation not in ("silu", "swish"):
            raise ValueError(
                f"Gated Delta Net's convolution needs activation_func=silu, got {self.activation}"
            )
        # The base class froze the CP size here; the group is the micro-batch's, so nothing may
        # read this one.
        del self.cp_size

    def reset_parameters(self) -> None:
        """Draw what Megatron-Core's module draws, in ``params_dtype``; then widen the decay."""
        if self.config.linear_cp_fp32_decay:
            for parameter in (self.A_log, self.dt_bias):
                parameter.data = parameter.data.to(self.config.params_dtype)
        super().reset_parameters()
        self._widen_decay()

    def _widen_decay(self) -> None:
        if self.config.linear_cp_fp32_decay:
            for parameter in (self.A_log, self.dt_bias):
                if parameter.dtype in _HALVES:
                    parameter.data = parameter.data.float()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load as every module does; ``assign=True`` may have put half-precision tensors here."""
        super()._load_from_state_dict(*args, **kwargs)
        self._widen_decay()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Convert this module, and leave the decay in float32 where the config asks for it.

        Megatron-Core's ``Float16Module`` calls ``.bfloat16()`` on the whole model, which reaches
        its parts through this method only, and knows no mark for parameters to leave alone.
        """
        if not self.config.linear_cp_fp32_decay:
            return super()._apply(fn, recurse)
        wide = [x for p in (self.A_log, self.dt_bias) for x in (p, p.grad) if x is not None]

        def convert(x: torch.Tensor) -> torch.Tensor:
            converted = fn(x)
            if converted.dtype in _HALVES and any(x is kept for kept in wide):
                return x.to(converted.device, torch.float32)
            return converted

        return super()._apply(convert, recurse)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layer on this rank's tokens.

        Args:
            hidden_states: ``[s, b, hidden_size]``, tokens in ``config.linear_cp_layout`` (under
                sequence parallelism, this tensor-parallel rank's part of them). Packed input has
                ``b == 1``.
            attention_mask: ignored: the layer is causal within every sequence.
            packed_seq_params: boundaries of packed input, and the micro-batch's CP group. A format
                other than ``"thd"`` means dense input; the group counts all the same.
            inference_context, inference_params, sequence_len_offset: must be None.
            **kwargs: rotary embeddings and the like, which attention layers get; ignored.

        Returns:
            ``[s, b, hidden_size]`` and the output bias or None.

        Raises:
            ValueError: inference, a per-call mode, another shape, group metadata that does not
                agree, or boundaries that do not fit; the same on every rank, before any collective.
        """
        if inference_context is not None or inference_params is not None:
            raise ValueError("GatedDeltaNet under context parallelism trains; it has no inference")
        if sequence_len_offset is not None:
            raise ValueError("sequence_len_offset serves inference, which this layer has not")
        for name in _DECLARED & kwargs.keys():
            raise ValueError(
                f"{name}={kwargs[name]!r} was passed to forward; it is declared by the config and "
                "the same for every call"
            )
        if hidden_states.dim() != 3 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden_states must be [s, b, {self.hidden_size}], got {list(hidden_states.shape)}"
            )
        batch = hidden_states.shape[1]
        local_tokens = hidden_states.shape[0] * self.sp_size
        stored = plan_for(
            packed_seq_params,
            resolve_cp_group(self.pg_collection.cp, packed_seq_params),
            local_tokens=local_tokens,
            batch=batch,
            layout=self.config.linear_cp_layout,
            conv_kernel_size=self.conv_kernel_dim,
        )
        self._check_mode(stored.cp_size)
        plan = self._working_plan(stored, hidden_states, is_packed(packed_seq_params))
        sharded_over = self.pg_collection.tp if self.sp_size > 1 else None
        hidden_states = convert_hidden(hidden_states, stored, plan, sharded_over)
        projected, _ = self.in_proj(hidden_states)
        # [s, b, x] -> [1, b * s, x]: samples one after another; a view where b is 1.
        width = projected.shape[-1]
        tokens = projected.transpose(0, 1).reshape(1, plan.local_tokens, width)
        qkv, gate, beta, alpha = split_channels(
            tokens,
            [
                self.conv_dim_local_tp,
                self.v_dim_local_tp,
                self.num_v_heads_local_tp,
                self.num_v_heads_local_tp,
            ],
        )
        out = run_linear_cp_mode(self.config.linear_cp_mode, self._inputs(qkv, beta, alpha), plan)
        gate = gate.unflatten(-1, (self.num_v_heads_local_tp, self.value_head_dim))

        def norm_and_layout(out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            normed = self._gated_norm(out, gate).view(batch, -1, self.v_dim_local_tp)
            return normed.transpose(0, 1).contiguous()

        if self._recomputes_norm():
            # Left out, it asks Transformer Engine for its fp8 state, installed or not.
            quantized = self.config.fp8 or self.config.fp4
            checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=quantized)
            normed = checkpoint.checkpoint(norm_and_layout, out, gate)
            result, bias = self.out_proj(normed)
            checkpoint.discard_output_and_register_recompute(result)
        else:
            result, bias = self.out_proj(norm_and_layout(out, gate))
        return convert_hidden(result, plan, stored, sharded_over), bias

    def _working_plan(
        self, stored: ContextParallelPlan, hidden: torch.Tensor, packed: bool
    ) -> ContextParallelPlan:
        """Where the layer works: where the tokens are stored, unless moving them is better."""
        config = self.config
        if config.linear_cp_mode != "chunkwise" or stored.cp_size == 1:
            return stored
        if config.linear_cp_state_exchange == "fla":
            plan = stored.in_layout("contiguous")
            check_fla_exchange(plan, hidden.device, self.conv_kernel_dim)
            return plan
        if not packed or stored.layout != "zigzag":
            return stored
        sizes = LayerSizes(
            hidden_size=self.hidden_size // self.sp_size,
            num_value_heads=self.num_v_heads_local_tp,
            key_head_dim=self.key_head_dim,
            value_head_dim=self.value_head_dim,
            conv_channels=self.conv_dim_local_tp,
            conv_kernel_size=self.conv_kernel_dim,
            element_size=hidden.element_size(),
            token_multiple=self.sp_size,
        )
        return working_plan(stored, sizes, config.linear_cp_move_sequences)

    def _check_mode(self, cp_size: int) -> None:
        """Raise unless the declared mode can run at this CP size, before anything is sent."""
        mode = self.config.linear_cp_mode
        check_linear_cp_executor(mode, cp_size)
        check_heads(
            mode,
            num_key_heads=self.num_key_heads,
            num_value_heads=self.num_value_heads,
            tensor_model_parallel_size=self.tp_size,
            context_parallel_size=cp_size,
        )

    def _inputs(
        self, qkv: torch.Tensor, beta: torch.Tensor, alpha: torch.Tensor
    ) -> GatedDeltaNetInputs:
        return GatedDeltaNetInputs(
            qkv=qkv,
            beta=beta,
            alpha=alpha,
            conv_weight=self.conv1d.weight.squeeze(1),
            conv_bias=self.conv1d.bias,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            num_key_heads=self.num_key_heads // self.tp_size,
            num_value_heads=self.num_v_heads_local_tp,
            key_head_dim=self.key_head_dim,
            value_head_dim=self.value_head_dim,
            activation=self.activation,
            use_qk_l2norm=self.use_qk_l2norm,
            state_exchange=self.config.linear_cp_state_exchange,
            # FLA's kernels are not bitwise repeatable.
            backend="torch" if self.config.deterministic_mode else "auto",
        )

    def _gated_norm(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Norm of every value head times its gate, ``[1, T, HV, V]`` in and out."""
        if isinstance(self.out_norm, RMSNorm):
            normed: torch.Tensor = self._out_norm(out, gate)
            return normed
        normed = self._out_norm(out.reshape(-1, self.value_head_dim)).view_as(out)
        return _times_silu_fused(normed, gate) if out.is_cuda else _times_silu(normed, gate)

    def _out_norm(self, *inputs: torch.Tensor) -> Any:
        """Run ``out_norm``; under tensor parallelism its weight's gradient is summed over heads.

        The weight is replicated but each tensor-parallel rank sees its own heads. Megatron-Core
        sums such gradients at the end of a step under sequence parallelism only; without it the
        replicas would drift apart.
        """
        if self.tp_size == 1 or self.config.sequence_parallel:
            return self.out_norm(*inputs)
        weights = {
            name: tensor_parallel.copy_to_tensor_model_parallel_region(
                weight, group=self.pg_collection.tp
            )
            for name, weight in self.out_norm.named_parameters()
        }
        return torch.func.functional_call(self.out_norm, weights, inputs)

    def _recomputes_norm(self) -> bool:
        config = self.config
        return (
            self.training
            and config.recompute_granularity == "selective"
            and "gdn_norm_out" in (config.recompute_modules or [])
        )


def _times_silu(normed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The gate for norms that do not take it, such as Transformer Engine's."""
    return (normed * torch.nn.functional.silu(gate.float())).to(normed.dtype)


_times_silu_fused = jit_fuser(_times_silu)
