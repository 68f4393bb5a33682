# SPDX-License-Identifier: Apache-2.0
"""What each mode asks of the head counts."""

BUILT_IN_MODES = ("headwise", "chunkwise", "all_gather")


def head_divisor(
    mode: str, tensor_model_parallel_size: int, context_parallel_size: int
) -> tuple[int, str]:
    """What key and value heads must divide by under ``mode``, and its name in messages."""
    if mode == "headwise":
        return tensor_model_parallel_size * context_parallel_size, "TP*CP"
    return tensor_model_parallel_size, "TP"


def heads_fit(
    mode: str,
    *,
    num_key_heads: int,
    num_value_heads: int,
    tensor_model_parallel_size: int,
    context_parallel_size: int,
) -> bool:
    """Whether ``mode`` can spread these heads: headwise over TP x CP, any other mode over TP."""
    divisor, _ = head_divisor(mode, tensor_model_parallel_size, context_parallel_size)
    return num_key_heads % divisor == 0 and num_value_heads % divisor == 0


def check_heads(
    mode: str,
    *,
    num_key_heads: int,
    num_value_heads: int,
    tensor_model_parallel_size: int,
    context_parallel_size: int,
) -> None:
    """Raise ``ValueError`` unless the heads of the whole model fit ``mode``.

    The message names the heads, TP, CP, the rule, and the modes that would fit.
    """
    sizes = {
        "num_key_heads": num_key_heads,
        "num_value_heads": num_value_heads,
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "context_parallel_size": context_parallel_size,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if num_value_heads % num_key_heads:
        raise ValueError(
            f"{num_value_heads} value heads do not divide by {num_key_heads} key heads; every key "
            "head serves the same number of value heads"
        )
    if heads_fit(mode, **sizes):
        return
    divisor, rule = head_divisor(mode, tensor_model_parallel_size, context_parallel_size)
    kind, heads = ("key", num_key_heads) if num_key_heads % divisor else ("value", num_value_heads)
    fitting = [name for name in BUILT_IN_MODES if name != mode and heads_fit(name, **sizes)]
    advice = (
        f"{' or '.join(fitting)} would fit"
        if fitting
        else "no mode fits; lower the tensor-parallel size"
    )
    raise ValueError(
        f"linear_cp_mode {mode!r}: {heads} {kind} heads do not divide by {rule} = {divisor} "
        f"(TP={tensor_model_parallel_size}, CP={context_parallel_size}); {advice}"
    )
