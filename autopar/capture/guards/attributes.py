"""Forward attributes of a parallelized model to the model: forward reads what ``parallel.beta = 2.0`` sets."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from autopar.capture.guards.values import FUNCTIONS


class AttributesOfModule(torch.nn.Module):
    """A module that also has the attributes of the module ``self.module``.

    Attributes:
        OWN: names that always belong to this module, whatever ``self.module`` has. Attributes that are already set here
            belong to it too.
    """

    OWN: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("module")
            if module is None or isinstance(
                inspect.getattr_static(module, name, FUNCTIONS[0]), (*FUNCTIONS, type, classmethod, staticmethod)
            ):
                raise  # a method would run the original model
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
        attributes = self.__dict__
        if "module" not in attributes or name in attributes or name in self.OWN or hasattr(type(self), name):
            return False
        return not name.startswith("_") or name in vars(attributes["module"])
