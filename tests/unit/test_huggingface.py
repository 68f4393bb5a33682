# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next's weights in our hybrid: the logits of transformers, and no bit lost on the way."""

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.linear_cp import TransformerConfig
from megatron.linear_cp.huggingface import (
    config_fields_from_hugging_face,
    model_fields_from_hugging_face,
    state_from_hugging_face,
    state_to_hugging_face,
)
from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.parity import assert_all_close, assert_close
from megatron.linear_cp.testing.workers import run_distributed

LOGITS_GATE = 1e-4

# A config.json as published, at a size for tests; every dimension that could be confused differs.
PUBLISHED: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
    "num_experts": 0,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
}
EXPERTS = {"num_experts": 4, "mlp_only_layers": [1]}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": EXPERTS,
    "experts, plain top-k": {**EXPERTS, "norm_topk_prob": False, "decoder_sparse_step": 2},
}

# Runs in a process of its own: transformers takes FLA where it finds it, and then wants a GPU.
THEIR_SIDE = """
import json, sys
for name in ("fla", "causal_conv1d"):
    sys.modules[name] = None
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

generator = torch.Generator().manual_seed(11)


def run(settings):
    config = Qwen3NextConfig(**settings, attn_implementation="eager")
    model = Qwen3NextForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                value = 0.2 * value.clamp(-2, 2) + ("linear_attn.norm" in name)
            elif name.endswith("A_log"):
                value = -2 + 0.3 * value
            elif value.dim() > 1 and "conv1d" not in name and "embed" not in name:
                value = value / value.shape[-1] ** 0.5
            parameter.copy_(value)
        tokens = torch.randint(0, config.vocab_size, (2, 96), generator=generator)
        logits = model(tokens).logits
    plain = json.loads(json.dumps(config.to_dict(), default=str))
    return {"config": plain, "state": model.state_dict(), "tokens": tokens, "logits": logits}


torch.save({kind: run(s) for kind, s in json.loads(sys.argv[1]).items()}, sys.argv[2])
"""


@dataclass(frozen=True)
class Theirs:
    config: dict[str, Any]
    state: dict[str, Tensor]
    tokens: Tensor
    logits: Tensor


@pytest.fixture(scope="module")
def all_of_theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Random models of the transformers library, and what they compute."""
    pytest.importorskip(
        "transformers", reason="the logits of Hugging Face's Qwen3-Next need transformers"
    )
    file = tmp_path_factory.mktemp("theirs") / "models.pt"
    settings = json.dumps({kind: PUBLISHED | changes for kind, changes in KINDS.items()})
    found = subprocess.run(
        [sys.executable, "-c", THEIR_SIDE, settings, str(file)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    loaded: dict[str, dict[str, Any]] = torch.load(file)
    return loaded


@pytest.fixture(params=KINDS)
def theirs(request: pytest.FixtureRequest, all_of_theirs: dict[str, dict[str, Any]]) -> Theirs:
    return Theirs(**all_of_theirs[request.param])


def make_config(hugging_face: dict[str, Any], **changes: Any) -> TransformerConfig:
    fields = config_fields_from_hugging_face(hugging_face) | changes
    return TransformerConfig(**fields, transformer_impl="local", linear_cp_mode="chunkwise")


def run_ours(
    hugging_face: dict[str, Any], state: dict[str, Tensor] | None, tokens: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and state dict of our model, with the given weights or its own."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron.linear_cp import get_gdn_hybrid_layer_spec

    with cpu_cuda(), torch.no_grad():
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        config = make_config(hugging_face)
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gdn_hybrid_layer_spec(config),
            **model_fields_from_hugging_face(hugging_face),
        ).eval()
        if state is not None:
            model.load_state_dict(state_from_hugging_face(state, config))
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits = model(tokens, positions, None)
    return logits, {n: x for n, x in model.state_dict().items() if isinstance(x, Tensor)}


def test_same_logits_as_transformers(theirs: Theirs) -> None:
    [(logits, _)] = run_distributed(run_ours, 1, theirs.config, theirs.state, theirs.tokens)
    assert_close("logits", logits, theirs.logits, LOGITS_GATE)


def test_their_weights_come_back_bitwise(theirs: Theirs) -> None:
    """Through the model itself: theirs to ours, loaded, read, and to theirs again."""
    config = make_config(theirs.config)
    [(_, ours)] = run_distributed(run_ours, 1, theirs.config, theirs.state, theirs.tokens)
    back = state_to_hugging_face(ours, config, stack_experts=True)
    assert_all_close(back, theirs.state, 0.0)
    again = state_from_hugging_face(back, config)
    assert_all_close(again, ours, 0.0)


@cache
def our_state(kind: str) -> dict[str, Tensor]:
    """A state dict of our model with values that any two confused rows would betray."""
    tokens = torch.zeros((1, 8), dtype=torch.int64)
    [(_, state)] = run_distributed(run_ours, 1, PUBLISHED | KINDS[kind], None, tokens)
    generator = torch.Generator().manual_seed(2)
    # A grid on which 1 can be added without rounding.
    return {
        name: torch.randint(-500, 500, x.shape, generator=generator) / 512
        for name, x in state.items()
    }


@pytest.mark.parametrize("stack_experts", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_our_weights_come_back_bitwise(kind: str, stack_experts: bool) -> None:
    config, state = make_config(PUBLISHED | KINDS[kind]), our_state(kind)
    there = state_to_hugging_face(state, config, stack_experts=stack_experts)
    assert any(name.endswith("experts.gate_up_proj") for name in there) == (
        stack_experts and kind != "dense"
    )
    assert_all_close(state_from_hugging_face(there, config), state, 0.0)


@pytest.mark.parametrize(
    ("low", "high", "exact"), [(0.5, 2.0, True), (0.01, 0.5, False)], ids=["usual", "small"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_the_norm_is_exact(low: float, high: float, exact: bool, dtype: torch.dtype) -> None:
    """The docstring's bound: gamma in [0.5, 2] survives in any dtype, a small one is rounded."""
    config = make_config(PUBLISHED)
    theirs = state_to_hugging_face(our_state("dense"), config)
    name = "model.layers.0.linear_attn.norm.weight"
    theirs[name] = torch.linspace(low, high, 4096).to(dtype)
    back = state_to_hugging_face(state_from_hugging_face(theirs, config), config)[name]
    assert back.dtype == dtype
    assert torch.equal(back, theirs[name]) == exact
    torch.testing.assert_close(back, theirs[name], rtol=0, atol=torch.finfo(dtype).eps / 2)


def their_state() -> dict[str, Tensor]:
    return state_to_hugging_face(our_state("experts"), make_config(PUBLISHED | EXPERTS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtp.norm.weight": torch.ones(1)}, r"names without a place: \['mtp.norm.weight'\]"),
        ({"model.layers.0.linear_attn.dt_bias": None}, "has no model.layers.0.linear_attn.dt_bias"),
        ({"model.layers.2.mlp.experts.3.up_proj.weight": None}, "no .*experts.3.up_proj.weight"),
        (
            {"model.layers.0.linear_attn.in_proj_ba.weight": torch.ones(8, 24)},
            r"in_proj_ba.weight has shape \(8, 24\); the config says \(12, 24\)",
        ),
        (
            {"model.layers.3.self_attn.q_proj.weight": torch.ones(96, 24)},
            r"q_proj.weight has shape \(96, 24\); the config says \(192, 24\)",
        ),
    ],
    ids=["extra", "missing", "missing expert", "shape of gates", "no output gate"],
)
def test_what_does_not_fit_is_named(change: dict[str, Tensor | None], message: str) -> None:
    state = {n: x for n, x in {**their_state(), **change}.items() if x is not None}
    with pytest.raises(ValueError, match=message):
        state_from_hugging_face(state, make_config(PUBLISHED | EXPERTS))


def test_number_of_experts_is_checked() -> None:
    config = make_config(PUBLISHED | EXPERTS)
    state = state_to_hugging_face(our_state("experts"), config, stack_experts=True)
    fewer = make_config(PUBLISHED | EXPERTS | {"num_experts": 2})
    with pytest.raises(ValueError, match="hold 4 and 4 experts; the config says 2"):
        state_from_hugging_face(state, fewer)


def test_config_of_another_model_is_refused() -> None:
    config = make_config(PUBLISHED, layernorm_zero_centered_gamma=False)
    with pytest.raises(ValueError, match="has layernorm_zero_centered_gamma=True, got False"):
        state_from_hugging_face({}, config)
    with pytest.raises(ValueError, match="has layernorm_zero_centered_gamma=True, got False"):
        state_to_hugging_face({}, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "no attention bias, got 'silu' and True"),
        ({"hidden_act": "gelu"}, "hidden_act='silu'"),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "even distances"),
        ({"layer_types": ["linear_attention"] * 4}, "even distances"),
    ],
)
def test_config_that_is_not_mapped_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_fields_from_hugging_face(PUBLISHED | change)


def test_rotary_embedding_in_both_spellings() -> None:
    """Published configs have it flat; recent transformers put it in an object of its own."""
    flat = model_fields_from_hugging_face(PUBLISHED)
    nested = {n: x for n, x in PUBLISHED.items() if not n.startswith(("rope", "partial"))}
    nested["rope_parameters"] = {
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "rope_type": "default",
    }
    assert model_fields_from_hugging_face(nested) == flat
    assert (flat["rotary_base"], flat["rotary_percent"]) == (10000.0, 0.5)
    with pytest.raises(ValueError, match="rope_type='yarn'"):
        model_fields_from_hugging_face(
            PUBLISHED | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
        )
