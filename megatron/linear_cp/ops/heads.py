# SPDX-License-Identifier: Apache-2.0
"""How the channels of a layer's convolution divide into heads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadShape:
    """``H`` query heads of ``K`` channels, as many key heads, then ``HV`` value heads of ``V``.

    Attributes:
        num_key_heads: ``H``; 0 leaves only values.
        key_head_dim: ``K``.
        num_value_heads: ``HV``.
        value_head_dim: ``V``.

    Raises:
        ValueError: a negative number of heads, or heads without channels.
    """

    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int

    def __post_init__(self) -> None:
        if min(self.num_key_heads, self.num_value_heads) < 0 or (
            min(self.key_head_dim, self.value_head_dim) < 1
        ):
            raise ValueError(f"heads must have channels and not be negative in number, got {self}")

    @property
    def sections(self) -> tuple[int, int, int]:
        """Channels of all queries, of all keys and of all values, in the order they are stored."""
        keys = self.num_key_heads * self.key_head_dim
        return keys, keys, self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """``2 * H * K + HV * V``."""
        return sum(self.sections)
