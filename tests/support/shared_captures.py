"""Capture a model once for all the meshes and plans that the cases of a test put it on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import autopar.model.captures
from autopar.capture import Captured
from autopar.capture.arguments import Arguments

# model → what it was called with → its capture, whose program nobody has touched
CAPTURES: weakref.WeakKeyDictionary[nn.Module, dict[Any, Captured]] = weakref.WeakKeyDictionary()


def kind(value: Any) -> Any:
    """What a capture knows of an argument."""
    return (value.shape, value.dtype, value.requires_grad) if isinstance(value, torch.Tensor) else repr(value)


def captured(make: Callable[..., Captured], model: nn.Module, flat: Sequence[Any], *options: Any) -> Captured:
    """What ``make()`` captures of the model with these arguments, made once, with a program to edit."""
    key = (*map(kind, flat), *options, model.training, torch.is_grad_enabled())
    known = CAPTURES.setdefault(model, {})
    if key not in known:
        known[key] = make()
    return replace(known[key], program=known[key].program.copy())


@pytest.fixture
def shared_captures() -> Iterator[None]:
    """A model that an earlier case has captured, in the same mode and with arguments of the same kind, is not captured
    again: passes begin with a copy of its program. For models that keep their parameters and Python values."""
    capture_call = autopar.model.captures.capture_call

    def shared(
        model: nn.Module, arguments: Arguments, random: Any = "parallel", numbers: Any = (), keep: bool = False
    ) -> Captured:
        def make() -> Captured:
            return capture_call(model, arguments, random, numbers, keep)

        return make() if numbers or keep else captured(make, model, arguments.flat, str(arguments.spec), random)

    with mock.patch.object(autopar.model.captures, "capture_call", shared):
        yield
