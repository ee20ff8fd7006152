"""Trace programs on fake tensors, read or leave the modes that are active, and replace what a trace cannot follow."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx

# tried on 2.11 to 2.15: ignores subclasses of tensors
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass

# tried on 2.11 to 2.15: kernels in Python
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._prims_common import infer_size  # tried on 2.11 to 2.15: the sizes of a view, with -1 replaced

# tried on 2.11 to 2.15: .item()
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException

# tried on 2.11 to 2.15: nonzero()
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # tried on 2.11 to 2.15
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # tried on 2.11 to 2.15
from torch.fx.experimental.proxy_tensor import get_proxy_mode as get_proxy_mode  # experimental; tried on 2.11 to 2.15
from torch.fx.experimental.proxy_tensor import get_proxy_slot  # experimental; tried on 2.11 to 2.15
from torch.fx.experimental.proxy_tensor import make_fx as make_fx  # experimental; tried on 2.11 to 2.15
from torch.fx.experimental.symbolic_shapes import (  # experimental; tried on 2.11 to 2.15: sizes that are symbols
    GuardOnDataDependentSymNode,  # tried on 2.11 to 2.15: control flow on an unknown size
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # tried on 2.11 to 2.15

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)

BEFORE_2_13 = torch.__version__.startswith(("2.11.", "2.12."))


def _attention_of_doubles(query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    sums = torch.empty((batch, rows, heads), dtype=dtype, device=query.device)
    return torch.empty_like(query), sums.transpose(1, 2)


if BEFORE_2_13:  # there the logarithms of sums are float64, and on fake tensors float32
    META = torch.library.Library("aten", "IMPL")
    META.impl("_scaled_dot_product_flash_attention_for_cpu", _attention_of_doubles, "Meta", allow_override=True)


def products_of_symbols() -> contextlib.AbstractContextManager[Any]:
    """Let products take sizes that are symbols: before 2.13, ``matmul`` makes numbers of them unless it is in Python.

    Tried on 2.11 to 2.15.
    """
    return _ProductsInPython() if BEFORE_2_13 else contextlib.nullcontext()


class _ProductsInPython(TorchFunctionMode):
    PRODUCTS = frozenset({F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        if func not in self.PRODUCTS or bias is not None:  # with a bias it is no matmul
            return func(*args, **kwargs)
        with enable_python_dispatcher():
            return func(*args, **kwargs)


def autograd_sequence_number() -> int:
    """Return the number of the newest autograd node: in a dispatch mode, that of the op being called.

    Tried on 2.11 to 2.15.
    """
    return torch.autograd._get_sequence_nr() - 1


def running_backward_of() -> int | None:
    """Return the number of the autograd node whose backward is running; ``None`` in forward. Tried on 2.11 to 2.15."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


@contextlib.contextmanager
def single_threaded_backward() -> Iterator[None]:
    """Run backward on the calling thread, where the tracing modes are active. Public; here for its reason."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


@contextlib.contextmanager
def failed_ops_unlogged() -> Iterator[None]:
    """Keep fake tensors from logging the stack of an op that fails, because its error is raised, too.

    Tried on 2.11 to 2.15.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def keeps(record: logging.LogRecord) -> bool:
        return record.msg != "failed while attempting to run meta for %s"

    logger.addFilter(keeps)
    try:
        yield
    finally:
        logger.removeFilter(keeps)


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """Return the node that makes a tensor in the running trace, or ``None``. Tried on 2.11 to 2.15."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def are_saved_tensors_hooked() -> bool:
    """Return whether someone, such as a checkpoint, has hooks on the tensors that autograd saves.

    Tried on 2.11 to 2.15.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def as_functional(tensor: torch.Tensor) -> torch.Tensor:
    """Wrap a tensor like the arguments of ``torch.func.functionalize``: copies may be written.

    Tried on 2.11 to 2.15.
    """
    level = torch._C._functorch.current_level()
    return torch._C._functorch._wrap_functional_tensor(tensor, level)


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Disable all dispatch modes in a block: a running trace does not see its ops. Tried on 2.11 to 2.15."""
    from torch.utils._python_dispatch import _disable_current_modes  # a context

    return _disable_current_modes()


def without_function_modes() -> contextlib.AbstractContextManager[Any]:
    """Disable all function modes in a block. Tried on 2.11 to 2.15."""
    return torch._C.DisableTorchFunction()


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Skip the autograd kernels of ops in a block, where nothing needs a gradient. Tried on 2.11 to 2.15.

    That of ``wait_tensor`` is Python, and takes longer than the wait for a small message that is there.
    """
    return cast(contextlib.AbstractContextManager[None], torch._C._AutoDispatchBelowAutograd())


def transforms() -> bool:
    """Return whether this runs inside of a transform of torch.func. Tried on 2.11 to 2.15."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a torch.func wrapper, or has a forward-mode tangent. Tried on 2.11 to 2.15."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return wrapped or torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


NO_DIMS = torch.Size()


@contextlib.contextmanager
def value_checks_replaced(by: Callable[[], None]) -> Iterator[None]:
    """Call ``by`` instead of each check that reads a tensor's values only to raise an error.

    These are ``torch._check_tensor_all``, and the checks of distributions, which also check nothing later.
    ``nn.Transformer`` does not look whether an unspecified mask is causal, which it does only for speed, and
    ``gaussian_nll_loss`` does not look for variances below 0. Tried on 2.11 to 2.15.
    """
    library: Any = torch  # of no type, because its functions are replaced
    kind: Any = torch.distributions.Distribution
    transformer, functional = torch.nn.modules.transformer, torch.nn.functional
    originals = torch._check_tensor_all, torch._check_tensor_all_with, kind.__init__, transformer._detect_is_causal_mask
    gaussian, look = functional.gaussian_nll_loss, torch.any

    def make(
        self: Any, batch_shape: Any = NO_DIMS, event_shape: Any = NO_DIMS, validate_args: bool | None = None
    ) -> None:
        if self._validate_args if validate_args is None else validate_args:
            by()
        originals[2](self, batch_shape, event_shape, validate_args=False)

    def gaussian_nll_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        by()
        library.any = lambda *_: False
        try:
            return gaussian(*args, **kwargs)
        finally:
            library.any = look

    functional.gaussian_nll_loss = gaussian_nll_loss
    library._check_tensor_all = library._check_tensor_all_with = lambda *args, **kwargs: by()
    kind.__init__ = make
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        library._check_tensor_all, library._check_tensor_all_with, kind.__init__ = originals[:3]
        transformer._detect_is_causal_mask = originals[3]
        functional.gaussian_nll_loss = gaussian


@contextlib.contextmanager
def attention_replaced(by: Callable[[Callable[..., torch.Tensor], Any, Any], torch.Tensor]) -> Iterator[None]:
    """Call ``by`` with torch's function and the arguments in place of each scaled_dot_product_attention.

    A mode would not see the calls in which a checkpoint computes again: the backward of an op runs with the modes in
    which torch's functions have called it. Tried on 2.11 to 2.15.
    """
    functional: Any = torch.nn.functional
    attention = functional.scaled_dot_product_attention

    def original(*args: Any, **kwargs: Any) -> torch.Tensor:
        functional.scaled_dot_product_attention = attention  # which a mode of the user's may look for
        try:
            result: torch.Tensor = attention(*args, **kwargs)
        finally:
            functional.scaled_dot_product_attention = replaced
        return result

    def replaced(*args: Any, **kwargs: Any) -> torch.Tensor:
        return by(original, args, kwargs)

    functional.scaled_dot_product_attention = replaced
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = attention


@contextlib.contextmanager
def conversions_replaced(by: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Call ``by`` where a module is converted, as by ``module.to(dtype)``, and that changes a tensor.

    Tried on 2.11 to 2.15.
    """
    kind: Any = torch.nn.Module  # of no type, because its method is replaced
    convert = kind._apply

    def apply(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        tensors = [*self.parameters(recurse), *self.buffers(recurse)]
        with torch.no_grad():
            if any(fn(tensor) is not tensor for tensor in tensors):
                by(self)
        return self

    kind._apply = apply
    try:
        yield
    finally:
        kind._apply = convert


@contextlib.contextmanager
def lists_replaced(by: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Call ``by`` for ``tolist()`` of a fake tensor, which has a method of its own. Tried on 2.11 to 2.15."""
    kind: Any = FakeTensor  # of no type, because its method is replaced
    before = kind.tolist
    kind.tolist = lambda self: by(self)
    try:
        yield
    finally:
        kind.tolist = before


@contextlib.contextmanager
def zero_tensors_viewed() -> Iterator[None]:
    """Keep views of forward mode's zero tensors on their device under fake tensors.

    ``vmap(hessian(f))`` makes such views. torch's own kernels return the inner tensor of the fake tensor, which is on
    meta. Tried on 2.11 to 2.15.
    """

    def view(tensor: torch.Tensor, size: Sequence[int], *_: Any) -> torch.Tensor:
        return torch._efficientzerotensor(
            infer_size(tuple(size), tensor.numel()), dtype=tensor.dtype, device=tensor.device
        )

    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that a kernel exists already
            for name in ("view", "_reshape_alias", "as_strided"):
                library.impl(name, view, "ZeroTensor", allow_override=True)
        yield


@contextlib.contextmanager
def compiled_parts_in_eager() -> Iterator[None]:
    """Run functions of torch.compile as plain Python while this block traces them. Tried on 2.11 to 2.15."""
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"Using `torch\.compile\(module\)` when there are global hooks"
        )  # capture installs them
        yield
