"""Casts that a model writes into its forward: promoted, for oracles in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode


class PromotedCasts(TorchFunctionMode):
    """``x.float()`` and every ``torch.float32`` that is asked for become float64, in eager and in a capture alike."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


@pytest.fixture
def promoted_casts() -> Iterator[None]:
    """Hugging Face models cast to float32 inside, even in float64: with this, all of a step is float64."""
    with PromotedCasts():
        yield
