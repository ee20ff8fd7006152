"""Answer what transformers, Accelerate and PEFT ask of a model before they train it.

They ask with ``isinstance`` for its class, read the signature of its ``forward``, and ask whether something else has
sharded it, and then neither wrap nor shard it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from autopar.capture.guards import AttributesOfModule
from autopar.capture.provenance import user_line

# methods of such models that read or count tensors, or set flags that forward reads: they are the model's own
OWN_METHODS = (
    "get_base_model", "get_input_embeddings", "get_nb_trainable_parameters", "get_output_embeddings",
    "gradient_checkpointing_disable", "gradient_checkpointing_enable", "is_gradient_checkpointing", "num_parameters",
    "print_trainable_parameters",
)  # fmt: skip

ADAPTERS = (
    "adapters are added to a model before it is on a mesh, because its layers are in pieces then: "
    "autopar.parallelize(get_peft_model(model, config), mesh)\n    {line}"
)
LOCAL = (
    'transformers.Trainer passes the same batch on each process, so the model takes inputs="global", the default of '
    'parallelize, and not "local"'
)


class SignatureOfModule:
    """A method that has the signature of the module's method of this name; in a class, the method itself."""

    def __init__(self, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self.method = method
        self.key = f"_{method.__name__}_like_the_module"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self.method
        function = instance.__dict__.get(self.key)
        if function is None:
            theirs = getattr(instance.module, self.method.__name__)
            function = instance.__dict__[self.key] = self._like(inspect.signature(theirs))
        return types.MethodType(function, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(*args, **kwargs)

    def _like(self, signature: inspect.Signature) -> types.FunctionType:
        """Return a copy of the method that has another signature."""
        method = self.method
        assert isinstance(method, types.FunctionType)
        copied = types.FunctionType(
            method.__code__, method.__globals__, method.__name__, method.__defaults__, method.__closure__
        )
        copied.__kwdefaults__, copied.__doc__ = method.__kwdefaults__, method.__doc__
        parameters = signature.parameters
        own = inspect.Parameter("self" if "self" not in parameters else "self_", inspect.Parameter.POSITIONAL_ONLY)
        copied.__signature__ = signature.replace(parameters=[own, *parameters.values()])  # type: ignore[attr-defined]
        return copied


class PretrainedModel(AttributesOfModule):
    """A proxy that is to these libraries what its module is, if the module is one of their models."""

    __class__ = property(lambda self: type(self.__dict__.get("module")) if _is_pretrained(self) else type(self))

    def __getattr__(self, name: str) -> Any:
        if name in ASKED and _is_pretrained(self):
            return ASKED[name](self)
        if name in OWN_METHODS and _is_pretrained(self):
            return getattr(self.module, name)
        return super().__getattr__(name)


def _is_pretrained(proxy: torch.nn.Module) -> bool:
    """Return whether the proxy stands for a model that has a folder format, as those of transformers and PEFT have."""
    module = proxy.__dict__.get("module")
    return module is not None and hasattr(module, "save_pretrained") and hasattr(module, "config")


def _tensor_parallel_size(proxy: Any) -> None:
    """Answer what a Trainer asks before it makes its ``Accelerator``: nothing that Accelerate has to divide.

    From here on Accelerate counts the processes of the job as one: each of them loads whole batches, as on one device,
    and it gathers nothing, because the model's outputs are those of the whole batch. Only the first process writes and
    logs, as before.
    """
    if proxy.job is None:
        return
    if proxy._calls.binding.passed == "local":
        raise ValueError(LOCAL)
    from accelerate import PartialState
    from accelerate.state import AcceleratorState, is_initialized
    from accelerate.utils import DistributedType

    for state in (PartialState(), *([AcceleratorState()] if is_initialized() else [])):
        state.distributed_type, state.num_processes = DistributedType.NO, 1


def _refuse_adapters(proxy: Any) -> None:
    """Refuse what PEFT, and ``add_adapter`` of transformers, ask before they replace layers."""
    raise TypeError(ADAPTERS.format(line=user_line("peft", "transformers")))


ASKED: dict[str, Callable[[Any], Any]] = {  # attribute → its answer
    "tp_size": _tensor_parallel_size,
    "is_distributed_loading_by_transformers": lambda proxy: proxy.job is not None,  # it is sharded: do not wrap it
    "is_custom_code": _refuse_adapters,
}
