"""Name every private part of torch that autopar uses, each with the versions it was tried on.

Nothing else in the project imports ``torch._…``; a test keeps it so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import logging
import operator
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, TypeGuard, cast

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass  # 2.13: ignores subclasses of tensors
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher  # 2.13: kernels in Python
from torch._guards import Source  # tried on 2.13: where a symbol comes from
from torch._prims_common import infer_size  # tried on 2.13: the sizes of a view, with -1 replaced
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException  # 2.13: .item()
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException  # 2.13: nonzero()
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # tried on 2.13
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # tried on 2.13
from torch.fx.experimental.proxy_tensor import get_proxy_mode as get_proxy_mode  # experimental; 2.13
from torch.fx.experimental.proxy_tensor import get_proxy_slot  # experimental; 2.13
from torch.fx.experimental.proxy_tensor import make_fx as make_fx  # experimental; 2.13
from torch.fx.experimental.symbolic_shapes import (  # experimental; 2.13: sizes that are symbols
    DimDynamic,
    GuardOnDataDependentSymNode,  # 2.13: control flow on an unknown size
    ShapeEnv,
)
from torch.utils import _pytree as pytree  # tried on 2.13: flattens user structures, knows registered classes
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # tried on 2.13
from torch.utils._sympy.functions import FloorDiv as FloorDiv  # tried on 2.13: a // b, simplified
from torch.utils._sympy.functions import PythonMod as PythonMod  # tried on 2.13: a % b, simplified

from autopar.torch_private.ops import LACKING as LACKING
from autopar.torch_private.ops import LackingOp as LackingOp
from autopar.torch_private.ops import OpOverload as OpOverload
from autopar.torch_private.ops import OpOverloadPacket as OpOverloadPacket
from autopar.torch_private.ops import aten as aten
from autopar.torch_private.ops import find_op as find_op
from autopar.torch_private.ops import op_named as op_named
from autopar.torch_private.ops import packets as packets
from autopar.torch_private.ops import present as present
from autopar.torch_private.ops import prims as prims

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)

BoxedCodeGen = torch.fx.graph._BoxedCodeGen  # tried on 2.13: functions that take arguments in a list and empty it
IncompatibleKeys = torch.nn.modules.module._IncompatibleKeys  # tried on 2.13: the result of load_state_dict
set_onednn = (
    torch._C._set_mkldnn_enabled
)  # tried on 2.13: turns oneDNN's ops on or off; the public flag may be locked in the process
FUNCTIONAL = torch.ops._c10d_functional  # tried on 2.13: collectives that return a tensor to wait for
DYNAMO = "torch._dynamo"  # tried on 2.13: the module that torch.compile imports
INDUCTOR = "torch._inductor.compile_fx"  # tried on 2.13: the module that Inductor is in
# tried on 2.13: whether a profiler of torch records this process, in any thread; no public name tells. It calls no
# function of Python, because each run of a function asks
profiler_is_on: Callable[[], bool] = functools.partial(
    operator.attrgetter("_is_profiler_enabled"), torch.autograd.profiler
)
NO_DIMS = torch.Size()

FLASH_FOR_CPU = (  # tried on 2.13: attention on CPU, and its backward
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
GLOBAL_HOOKS = tuple(
    hooks
    for name, hooks in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(hooks, dict)
)  # tried on 2.13

# the attribute that DistributedDataParallel looks up in a module; tried on 2.13
ASKED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
NOTED_BY_COMPOSABLE = "__composable_api"  # the prefix of the keys that fully_shard adds to __dict__; tried on 2.13


def autograd_sequence_number() -> int:
    """Return the number of the newest autograd node: in a dispatch mode, that of the op being called. Tried on 2.13."""
    return torch.autograd._get_sequence_nr() - 1


def running_backward_of() -> int | None:
    """Return the number of the autograd node whose backward is running; ``None`` in forward. Tried on 2.13."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


@contextlib.contextmanager
def single_threaded_backward() -> Iterator[None]:
    """Run backward on the calling thread, where the tracing modes are active. Public; here for its reason."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


@contextlib.contextmanager
def value_checks_replaced(by: Callable[[], None]) -> Iterator[None]:
    """Call ``by`` instead of each check that reads a tensor's values only to raise an error.

    These are ``torch._check_tensor_all``, and the checks of distributions, which also check nothing later.
    ``nn.Transformer`` does not look whether an unspecified mask is causal, which it does only for speed, and
    ``gaussian_nll_loss`` does not look for variances below 0. Tried on 2.13.
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
def conversions_replaced(by: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Call ``by`` where a module is converted, as by ``module.to(dtype)``, and that changes a tensor. Tried on 2.13."""
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
    """Call ``by`` for ``tolist()`` of a fake tensor, which has a method of its own. Tried on 2.13."""
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
    meta. Tried on 2.13.
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
def failed_ops_unlogged() -> Iterator[None]:
    """Keep fake tensors from logging the stack of an op that fails, because its error is raised, too. Tried on 2.13."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def keeps(record: logging.LogRecord) -> bool:
        return record.msg != "failed while attempting to run meta for %s"

    logger.addFilter(keeps)
    try:
        yield
    finally:
        logger.removeFilter(keeps)


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """Return the node that makes a tensor in the running trace, or ``None``. Tried on 2.13."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that tensors share exactly if they share memory, on meta too. Tried on 2.13."""
    return tensor.untyped_storage()._cdata


class StorageReference:
    """A reference to a storage that does not keep it alive.

    While it exists, no other storage has the address. Tried on 2.13.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._address = storage._weak_ref()

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._address)

    def expired(self) -> bool:
        return bool(torch.UntypedStorage._expired(self._address))

    def refers_to(self, storage: torch.UntypedStorage) -> bool:
        return self._address == storage._cdata

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage; ``None`` if it has expired."""
        return torch.UntypedStorage._new_with_weak_ptr(self._address)


def store_of_processes() -> torch.distributed.Store:
    """Return the store of the default process group, however it was initialised. Tried on 2.13."""
    return torch.distributed.distributed_c10d._get_default_store()


def dtensor_like(piece: torch.Tensor, other: Any) -> torch.Tensor:
    """Make a DTensor of this rank's piece with the layout of another DTensor.

    It is ``from_local`` without its 0.1 ms. Tried on 2.13. The piece gets the other's strides too: fused optimizers
    read both in memory order.
    """
    local = other._local_tensor
    if piece.stride() != local.stride():
        piece = torch.empty_strided(local.shape, local.stride(), dtype=piece.dtype, device=piece.device).copy_(piece)
    return type(other)(piece, other._spec, requires_grad=False)


def are_saved_tensors_hooked() -> bool:
    """Return whether someone, such as a checkpoint, has hooks on the tensors that autograd saves. Tried on 2.13."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def as_functional(tensor: torch.Tensor) -> torch.Tensor:
    """Wrap a tensor like the arguments of ``torch.func.functionalize``: copies may be written. Tried on 2.13."""
    level = torch._C._functorch.current_level()
    return torch._C._functorch._wrap_functional_tensor(tensor, level)


def mutates(op: Any) -> bool:
    """Return whether an overload writes to an argument, by its schema. Tried on 2.13."""
    return isinstance(op, OpOverload) and op._schema.is_mutable


def draws_random(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> bool:
    """Return whether a call draws random numbers; it does not if its dropout is 0 or off. Tried on 2.13."""
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    if is_composite(op):
        return False  # the ops that it consists of decide: dropout in evaluation draws nothing
    call_arguments = {
        a.name: args[k] if k < len(args) else a.default_value for k, a in enumerate(op._schema.arguments)
    } | dict(kwargs or {})
    return (
        call_arguments.get("dropout_p") != 0.0
        and call_arguments.get("training") is not False
        and call_arguments.get("train") is not False
    )


def is_composite(op: Any) -> bool:
    """Return whether an overload consists of other ops, which autograd sees. Tried on 2.13."""
    return isinstance(op, OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), "CompositeImplicitAutograd"
    )


def is_random_composite(op: Any) -> bool:
    """Return whether an overload consists of other ops, some of which draw random numbers. Tried on 2.13."""
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags and is_composite(op)


def operator_schema(op: OpOverload) -> str:
    """Return the schema of a random op's twin.

    For example ``(Tensor self, float p=0.5, *, Tensor seed, int stream, int[]? order=None) -> Tensor``. Tried on 2.13.
    """
    parameters, _, returned = str(op._schema).partition("(")[2].rpartition(") -> ")
    without_generator = [parameter.strip() for parameter in parameters.split(", ") if "Generator" not in parameter]
    star = [] if "*" in without_generator else ["*"]
    return f"({', '.join([*without_generator, *star, 'Tensor seed', 'int stream', 'int[]? order=None'])}) -> {returned}"


def overload_of(op: torch.library.CustomOpDef) -> OpOverload:
    """Return the op that ``torch.library.custom_op`` made. Tried on 2.13."""
    return op._opoverload


def with_defaults(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return a call's arguments, all that can be positional by position, with defaults. Tried on 2.13."""
    positional, rest = list(args), dict(kwargs)
    for argument in op._schema.arguments[len(args) :]:
        if not argument.kwarg_only:
            positional.append(rest.pop(argument.name, argument.default_value))
    return positional, rest


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator of ops on a device. Tried on 2.13; public, except the place of CUDA's generators."""
    if device.type == "cpu":
        return torch.default_generator
    return getattr(torch, device.type).default_generators[device.index or 0]


def is_seeded(op: OpOverload) -> bool:
    """Return whether an overload draws random numbers, unless an argument turns that off. Tried on 2.13."""
    return torch.Tag.nondeterministic_seeded in op.tags


def torch_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return overload → torch's decomposition, also of autograd's backward ops. Tried on 2.13."""
    from torch._decomp import global_decomposition_table  # imported late, because it loads all of torch's references

    return global_decomposition_table["post_autograd"]


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Disable all dispatch modes in a block: a running trace does not see its ops. Tried on 2.13."""
    from torch.utils._python_dispatch import _disable_current_modes  # a context

    return _disable_current_modes()


def without_function_modes() -> contextlib.AbstractContextManager[Any]:
    """Disable all function modes in a block. Tried on 2.13."""
    return torch._C.DisableTorchFunction()


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Skip the autograd kernels of ops in a block, where nothing needs a gradient. Tried on 2.13.

    That of ``wait_tensor`` is Python, and takes longer than the wait for a small message that is there.
    """
    return cast(contextlib.AbstractContextManager[None], torch._C._AutoDispatchBelowAutograd())


def kernel_of(op: OpOverload) -> Callable[..., Any]:
    """Return what calling an overload calls, without the Python function around it. Tried on 2.13."""
    return op._op if type(op).__call__ is OpOverload.__call__ else op


def functional_name(op: OpOverload) -> tuple[str, str]:
    """Return packet and overload of an in-place op's functional form: ``("add", "Tensor")``. Tried on 2.13."""
    return op._opname.removesuffix("_"), op._overloadname


def written_arguments(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes to, by its schema. Tried on 2.13."""
    tensors = []
    for position, argument in enumerate(op._schema.arguments if mutates(op) else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            tensors += [tensor for tensor in pytree.tree_leaves(value) if isinstance(tensor, torch.Tensor)]
    return tensors


def writes_outside(op: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call under fake tensors writes into a real tensor, which existed before. Tried on 2.13."""
    if not mutates(op):
        return False
    written = [
        k
        for k, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return any(
        isinstance(args[k], torch.Tensor) and not isinstance(args[k], FakeTensor) for k in written if k < len(args)
    )


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a torch.func wrapper, or has a forward-mode tangent. Tried on 2.13."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return wrapped or torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def tensor_arguments(op: OpOverload) -> list[tuple[int, str, bool]]:
    """Return (position, name, is a list) of each tensor argument in the schema. Tried on 2.13."""
    arguments = []
    for position, argument in enumerate(op._schema.arguments):
        kind = str(argument.type)
        if "Tensor" in kind:
            arguments.append((position, argument.name, "List" in kind))
    return arguments


def tensor_results(op: OpOverload) -> list[bool]:
    """Return for each result of the schema that contains tensors whether it is a list. Tried on 2.13."""
    kinds = [str(result.type) for result in op._schema.returns]
    return ["List" in kind for kind in kinds if "Tensor" in kind]


def returns_alias(op: Any) -> bool:
    """Return whether a result of an overload may share memory with an argument, by its schema. Tried on 2.13."""
    return not isinstance(op, OpOverload) or any(result.alias_info is not None for result in op._schema.returns)


def import_inductor() -> None:
    """Import Inductor without its warnings: it uses parts of torch that are deprecated. Tried on 2.13."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module(INDUCTOR)


def changes_operands(op: OpOverload) -> bool:
    """Return whether an overload writes to an argument, by its schema. Tried on 2.13."""
    return bool(op._schema.is_mutable)


def strided_shard(dim: int, parts: int) -> Any:
    """Return the placement of a dim of ``parts`` equal parts, each of which is split: ``(3 4096/tp)``. Tried on 2.13.

    DTensor uses it for FSDP over tensor parallelism. Optimizers, norms and ``full_tensor`` support it.
    ``torch.distributed.checkpoint`` refuses to save it, and loads wrong values into it without an error.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=parts)


@dataclass(frozen=True)
class FullStateDicts:
    """What a function of ``torch.distributed.checkpoint.state_dict`` with ``full_state_dict=True`` is about to do.

    Attributes:
        reads: whether it makes a state dict, and does not load one.
        model: whether it is about the parameters of the model, and not only about the state of optimizers.
        broadcasts: whether the first rank sends the values to the others.
        optimizers: the optimizers whose state is read or loaded.
    """

    reads: bool
    model: bool
    broadcasts: bool
    optimizers: tuple[torch.optim.Optimizer, ...]


def full_state_dicts() -> FullStateDicts | None:
    """Return what torch's state dict functions are about to do, if one of them lists the parameters now.

    They list them first, before they send anything. ``None`` if none of them runs, or without ``full_state_dict=True``.
    Tried on 2.13.
    """
    begin = getattr(sys.modules.get("torch.distributed.checkpoint.state_dict"), "_verify_options", None)
    if begin is None:
        return None
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not begin.__code__:
        frame = frame.f_back
    if frame is None or frame.f_back is None:
        return None
    options, optimizers, function = frame.f_locals["options"], frame.f_locals["optims"], frame.f_back.f_code.co_name
    if options is None or not options.full_state_dict:
        return None
    return FullStateDicts(
        reads=function.startswith("get_"),
        model="optimizer" not in function,
        broadcasts=options.broadcast_from_rank0,
        optimizers=tuple(optimizers),
    )


class StridedShard(Protocol):
    """What a placement of ``strided_shard`` has."""

    dim: int
    split_factor: int


def is_strided_shard(placement: object) -> TypeGuard[StridedShard]:
    """Return whether a placement is one of ``strided_shard``. Tried on 2.13."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return type(placement) is _StridedShard


def saved_by_min_cut(joint: fx.GraphModule, outputs: int) -> frozenset[str]:
    """Return the names of the values that torch's min-cut partitioner keeps for the backward. Tried on 2.13.

    Args:
        joint: forward and backward, with placeholders ``primals_…`` and ``tangents_…``; ``meta`` has fake tensors
            (``val``) and, for ops of the backward, the ``partitioner_tag``. The graph is changed.
        outputs: how many of its results are those of the forward; these come first.
    """
    from torch._functorch import config, partitioners  # imported late, because they load half of Inductor

    with config.patch(cse=False):  # equal values keep their names
        forward, _ = partitioners.min_cut_rematerialization_partition(joint, None, num_fwd_outputs=outputs)
    flat: Any
    (flat,) = forward.graph.output_node().args
    return frozenset(value.name for value in flat[outputs:])


# tried on 2.13, on CPU: the step of many parameters in one kernel. It reads the tensors of a parameter in memory order,
# one element after the other, whatever their strides are; it divides the gradients in place; it reads lr as a float32
# on CUDA
FUSED_ADAM = aten._fused_adam_.tensor_lr
FUSED_ADAMW = aten._fused_adamw_.tensor_lr
FUSED_SGD = aten._fused_sgd_.tensor_lr
FUSED_ADAGRAD = aten._fused_adagrad_.tensor_lr

assert_without_sync = (
    torch._assert_async
)  # tried on 2.13: an error where a tensor is false, without waiting for the device
add_to_each = torch._foreach_add_  # tried on 2.13: adds a tensor without dims to each of a list in place
copy_each = torch._foreach_copy_  # tried on 2.13: copies to each of a list the tensor of another list
interpolate_each = (
    torch._foreach_lerp_
)  # tried on 2.13: moves each of a list in place towards that of another by a share


@functools.cache
def has_kernel(op: OpOverload, device: str) -> bool:
    """Return whether an overload runs on devices of a type. Tried on 2.13."""
    return isinstance(op, OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), torch._C._dispatch_key_for_device(device)
    )


def steps_as(kind: type[torch.optim.Optimizer], base: type[torch.optim.Optimizer]) -> bool:
    """Return whether a class of optimizers has the step and the state of a base. Tried on 2.13."""
    return all(
        inspect.unwrap(getattr(kind, name, base)) is inspect.unwrap(getattr(base, name, base))
        for name in ("step", "_init_group")
    )


def start_gather(piece: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Start ``[n …] → [ranks · n …]``; wait for the result as for those of ``FUNCTIONAL``.

    On gloo this does not use ``all_gather_into_tensor``: that is a coalesced gather, which crashes ("malloc():
    unaligned tcache chunk detected") or hangs if several small ones run at once: some 30 of 16 to 128 bytes, within
    minutes. The gather of ``torch.distributed`` does not. Tried on 2.13.
    """
    if piece.device.type != "cpu":
        return FUNCTIONAL.all_gather_into_tensor(piece, ranks, group)
    from torch import distributed

    gather = (
        getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    )  # the name is new in 2.13
    gathered = piece.new_empty((ranks * piece.shape[0], *piece.shape[1:]))
    register_work(gathered, gather(gathered, piece, group=group_named(group), async_op=True))
    return gathered


def group_named(group: str) -> torch.distributed.ProcessGroup:
    """Return the process group of a name. ``RuntimeError`` if there is none. Tried on 2.13."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(cast(Any, group))


def register_work(tensor: torch.Tensor, work: Any) -> None:
    """Let ``FUNCTIONAL.wait_tensor`` wait for the work that writes a tensor. Tried on 2.13."""
    from torch._C._distributed_c10d import _register_work  # tried on 2.13

    _register_work(tensor, work)


def gloo_group(options: Any) -> Any:
    """Make a gloo process group that torch does not list, from the options that a backend is made from. Tried on 2.13.

    All its members make it, and wait for each other.
    """
    from torch.distributed import distributed_c10d

    group = distributed_c10d.ProcessGroup(options.store, options.group_rank, options.group_size)
    gloo = distributed_c10d.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )
    kind = distributed_c10d.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo)
    group._set_group_name(options.group_id)
    gloo._set_sequence_number_for_group()
    return group


def all_reduce_options(op: str) -> Any:
    """Return the options of an all-reduce by the name of its reduction, as in ``FUNCTIONAL``. Tried on 2.13."""
    from torch import distributed

    options = distributed.AllreduceOptions()
    options.reduceOp = getattr(distributed.ReduceOp, op.upper())
    return options


def reduction_options(kind: str, scatter: Any, root: int = 0) -> Any:
    """Return the options of the ``all_reduce`` or ``reduce`` that a reduce-scatter consists of. Tried on 2.13.

    ``scatter``: the options of the reduce-scatter; ``None`` for torch's own.
    """
    from torch import distributed

    options: Any = distributed.AllreduceOptions() if kind == "all_reduce" else distributed.ReduceOptions()
    scatter = distributed.ReduceScatterOptions() if scatter is None else scatter
    options.reduceOp, options.timeout = scatter.reduceOp, scatter.timeout
    if kind == "reduce":
        options.rootRank = root
    return options


def source_rank_of(work: Any) -> int:
    """Return the rank, in its group, from which a receive has got its message. Tried on 2.13."""
    return work._source_rank()


def note_a_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark that an optimizer has stepped: schedulers warn if they step before it. Tried on 2.13."""
    marked: Any = optimizer
    marked._opt_called = True


def refer_weakly(model: torch.nn.Module, whether: bool) -> None:
    """Set or drop weak references of recurrent layers to their parameters. Tried on 2.13.

    ``swap_tensors`` refuses them, and a forward needs them.
    """
    for layer in (module for module in model.modules() if isinstance(module, torch.nn.RNNBase)):
        layer._flat_weight_refs = (
            [None if weight is None else weakref.ref(weight) for weight in layer._flat_weights] if whether else []
        )


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks run before or after each step of an optimizer. Tried on 2.13."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def have_gradient_hooks(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether hooks run on the gradient of one of these leaves. Tried on 2.13."""
    return any(
        any(map(operator.attrgetter(hooks), tensors)) for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks")
    )


def tensor_dict() -> Any:
    """Return a dict whose keys are tensors, by identity, which it does not keep alive. Tried on 2.13."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory was written to; 0 for an inference tensor. Tried on 2.13."""
    return 0 if tensor.is_inference() else tensor._version


def dtensor_around(
    piece: torch.Tensor, device_mesh: Any, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int],
    kind: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Make a DTensor whose local tensor is ``piece``, on the piece's device. Tried on 2.11 to 2.14.

    ``kind``: a subclass of DTensor.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # tried on 2.13

    spec = DTensorSpec(
        device_mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), piece.dtype)
    )
    return (kind or DTensor)(piece, spec, requires_grad=False)


def device_mesh_of_others(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> Any:
    """Make a device mesh that this rank is not on, without process groups. Tried on 2.13.

    The public ways make groups, or take this rank's.
    """
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)


def join_fake_job(rank: int, size: int) -> None:
    """Initialize the default process group as one rank of a job that has no other processes. Tried on 2.13.

    Its collectives return at once, and exchange nothing.
    """
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore  # tried on 2.13: it registers the backend, too

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def forget_groups(device_mesh: Any) -> None:
    """Drop the closed groups of a device mesh, so that their threads end. Tried on 2.13.

    They also end while DTensors keep the mesh. DTensor's rules for ops forget the mesh, too: else an op on an equal
    mesh would return a DTensor on this one.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # tried on 2.13

    device_mesh._pg_registry.clear()
    _clear_sharding_prop_cache()


# -- graphs and nodes of torch.fx
# ---------------------------------------------------------------------------------------

inputs_of = operator.attrgetter(
    "_input_nodes"
)  # tried on 2.13: the operands of a node, without the list of all_input_nodes
is_erased = operator.attrgetter("_erased")  # tried on 2.13


def call_inserter(
    graph: fx.Graph, made: dict[fx.Node, Any]
) -> Callable[[fx.Node, str, Any, tuple[Any, ...], dict[str, Any], Any], fx.Node]:
    """Return ``Graph.call_function`` in front of a node, with this name.

    If the name has been used before, a number is appended. It omits what takes half of the time: an insertion point,
    checks of the arguments for symbolic numbers, hooks. ``about`` is written to ``made`` before the node becomes part
    of the graph. Tried on 2.13.
    """
    names = graph._graph_namespace
    used, named, tabled = names._used_names, names._obj_to_name, graph._find_nodes_lookup_table.insert

    def insert(
        before: fx.Node, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], about: Any
    ) -> fx.Node:
        if name in used:
            name = names.create_name(name, None)
        made[node := fx.Node(graph, name, "call_function", target, args, kwargs)] = about
        used.add(name)
        named[node] = name
        before._prepend(node)
        tabled(node)
        graph._len += 1
        return node

    return insert


def set_arguments(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Set ``node.args`` and ``node.kwargs`` and update users, without a table update for each. Tried on 2.13."""
    node._update_args_kwargs(args, kwargs)


def rename(node: fx.Node, name: str) -> None:
    """Name a node, with a number appended if another node has the name. Tried on 2.13."""
    node._rename(name)


def tables_of(graph: fx.Graph, nodes: Iterable[fx.Node]) -> dict[Any, list[fx.Node]]:
    """Return the rows of ``Graph.find_nodes`` that contain the nodes. Tried on 2.13."""
    lookup = graph._find_nodes_lookup_table
    return {key: list(lookup.table[key]) for key in {lookup._key(node) for node in nodes}}


def relink(
    graph: fx.Graph, order: Sequence[fx.Node], gone: Collection[fx.Node], tables: Mapping[Any, Sequence[fx.Node]]
) -> None:
    """Make ``order`` the nodes of a graph, without those in ``gone``. Tried on 2.13.

    ``tables`` come from ``tables_of``. After an interrupt it may be called again.
    """
    lookup, names = graph._find_nodes_lookup_table, graph._graph_namespace
    write = object.__setattr__  # Node's own method would first remove the node from a table
    for key, row in tables.items():
        lookup.table[key] = dict.fromkeys(row)
    for node in gone:
        write(node, "_erased", True)
        node._update_args_kwargs((), {})
        lookup.table[lookup._key(node)].pop(node, None)
        names._used_names.discard(node.name)
        names._obj_to_name.pop(node, None)
    for node in order:
        write(node, "_erased", False)
    for node, following in itertools.pairwise((graph._root, *order, graph._root)):
        write(node, "_next", following)
        write(following, "_prev", node)
    graph._len = len(order)


@contextlib.contextmanager
def compiled_parts_in_eager() -> Iterator[None]:
    """Run functions of torch.compile as plain Python while this block traces them. Tried on 2.13."""
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"Using `torch\.compile\(module\)` when there are global hooks"
        )  # capture installs them
        yield


class _Named(Source):
    """The origin of a symbol, which torch identifies by its name. Tried on 2.13."""

    def __init__(self, name: str) -> None:
        self._own_name = name

    @property
    def _name_template(self) -> str:
        return self._own_name

    def __hash__(self) -> int:
        return hash(self._own_name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Named) and self._own_name == other._own_name


class SymbolicSizes(ShapeEnv):
    """Makes sizes that are symbols, and notes each condition on them that a trace decides. Tried on 2.13.

    Sizes 0 and 1 are no symbols, because ops treat them in their own ways. Two symbols with equal values are different
    until an op needs them to be equal.

    Args:
        line: returns the user's line that runs; it is called for each condition.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        super().__init__(duck_shape=False)
        self._line = line

    def _get_sloc(self, framework_loc: str | None = None) -> Any:
        return self._line()  # instead of a stack, which takes longer

    def new(self, name: str, value: int) -> torch.SymInt:
        """Return a new symbol with a value of at least 2."""
        symbol = self.create_symbol(value, _Named(name), DimDynamic.DYNAMIC)
        return cast(torch.SymInt, self.create_symintnode(symbol, hint=value))

    @property
    def conditions(self) -> list[tuple[Any, str]]:
        """The conditions that hold for the values of the trace, each with the line that needs it."""
        return [(guard.expr, cast(str, guard.sloc)) for guard in self.guards]


def positional_arguments(program: torch.export.ExportedProgram) -> int:
    """Return how many arguments an exported program takes by position. Tried on 2.13."""
    return program.call_spec.in_spec.children()[0].num_children


def size_expression(size: torch.SymInt | torch.SymFloat | torch.SymBool | int) -> Any:
    """Return the expression of a size, with symbols that are known to be equal replaced by one. Tried on 2.13."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def size_hint(size: torch.SymInt) -> int:
    """Return the value of a size in the trace, without a condition. Tried on 2.13."""
    return int(size.node.hint)
