"""Attributes of a model on a mesh are the model's own: ``parallel.beta = 2.0`` is what forward reads next."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from autopar.capture.guards.values import FUNCTIONS


class AttributesOfModule(torch.nn.Module):
    """A module that has the attributes of the module ``self.module``, beside its own.

    Attributes:
        OWN: names that are its own, whatever the model has; those that it has already are, too.
    """

    OWN: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("module")
            if module is None or isinstance(inspect.getattr_static(module, name, FUNCTIONS[0]), (*FUNCTIONS, type, classmethod, staticmethod)):
                raise  # methods of the model would run it as it is
            return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_of_module(name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_of_module(name):
            delattr(self.module, name)
        else:
            super().__delattr__(name)

    def _is_of_module(self, name: str) -> bool:
        own = self.__dict__
        if "module" not in own or name in own or name in self.OWN or hasattr(type(self), name):
            return False
        return not name.startswith("_") or name in vars(own["module"])
