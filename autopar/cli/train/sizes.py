"""List the sizes of the model in a table."""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY = 256  # the text is read as bytes


@dataclass(frozen=True)
class Size:
    """One row. ``lr`` is a learning rate at which the loss falls quickly and rounding errors do not grow."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    lr: float


SIZES: dict[str, Size] = {
    "tiny": Size(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=4, lr=2e-3),
    "small": Size(hidden=128, intermediate=256, layers=4, heads=8, kv_heads=4, lr=1e-3),
    "medium": Size(hidden=256, intermediate=768, layers=6, heads=8, kv_heads=4, lr=1e-3),
    "large": Size(hidden=768, intermediate=2048, layers=12, heads=12, kv_heads=4, lr=3e-4),
}
