"""Every private name of torch that autopar uses, each with the versions it was tried on.

Nothing else in the project imports ``torch._…``; a test keeps it so.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass  # 2.13: subclasses are not asked
from torch._ops import OpOverload as OpOverload  # tried on 2.13: the class of torch.ops.aten.mm.default
from torch._ops import OpOverloadPacket as OpOverloadPacket  # tried on 2.13: the class of torch.ops.aten.mm
from torch._prims_common import infer_size  # tried on 2.13: the sizes of a view, with that of -1
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException  # 2.13: .item()
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException  # 2.13: nonzero()
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # tried on 2.13
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # tried on 2.13
from torch.fx.experimental.proxy_tensor import get_proxy_mode as get_proxy_mode  # experimental; 2.13
from torch.fx.experimental.proxy_tensor import get_proxy_slot  # experimental; 2.13
from torch.fx.experimental.proxy_tensor import make_fx as make_fx  # experimental; 2.13
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # 2.13: control flow on an unknown size
from torch.utils import _pytree as pytree  # tried on 2.13: flattens user structures, knows registered classes
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # tried on 2.13

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)

BoxedCodeGen = torch.fx.graph._BoxedCodeGen  # tried on 2.13: arguments in a list that is emptied
IncompatibleKeys = torch.nn.modules.module._IncompatibleKeys  # tried on 2.13: what load_state_dict returns
set_onednn = torch._C._set_mkldnn_enabled  # tried on 2.13: whether ops are oneDNN's; the public flag may have been closed for the process
FUNCTIONAL = torch.ops._c10d_functional  # tried on 2.13: collectives that return a tensor to be waited for
NO_DIMS = torch.Size()

FLASH_FOR_CPU = (  # tried on 2.13: attention on CPU, and its backward
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
GLOBAL_HOOKS = tuple(some for name, some in vars(torch.nn.modules.module).items() if name.startswith("_global_") and isinstance(some, dict))  # tried on 2.13

ASKED_BY_DDP = "_ddp_params_and_buffers_to_ignore"  # the attribute that DistributedDataParallel asks a module for; tried on 2.13
NOTED_BY_COMPOSABLE = "__composable_api"  # how the keys begin under which fully_shard notes itself in __dict__; tried on 2.13


def autograd_sequence_number() -> int:
    """The number of the newest autograd node: in a dispatch mode, that of the op being called. Tried on 2.13."""
    return torch.autograd._get_sequence_nr() - 1


def running_backward_of() -> int | None:
    """The number of the autograd node whose backward is running, ``None`` in forward. Tried on 2.13."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


@contextlib.contextmanager
def single_threaded_backward() -> Iterator[None]:
    """Backward on the calling thread, where the tracing modes are active. Public; here beside its reason."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


@contextlib.contextmanager
def value_checks_replaced(by: Callable[[], None]) -> Iterator[None]:
    """Where torch would look at a tensor's values and do nothing but raise, ``by`` is called: in ``torch._check_tensor_all``,
    and where a distribution is made, which then checks nothing later either. And ``nn.Transformer`` does not look whether
    a mask is causal, where it is not told: that is for speed alone. Nor does ``gaussian_nll_loss`` look for variances below 0.
    Tried on 2.13."""
    kind, transformer, functional = torch.distributions.Distribution, torch.nn.modules.transformer, torch.nn.functional
    kept = torch._check_tensor_all, torch._check_tensor_all_with, kind.__init__, transformer._detect_is_causal_mask
    gaussian, look = functional.gaussian_nll_loss, torch.any

    def make(self: Any, batch_shape: Any = NO_DIMS, event_shape: Any = NO_DIMS, validate_args: bool | None = None) -> None:
        if self._validate_args if validate_args is None else validate_args:
            by()
        kept[2](self, batch_shape, event_shape, validate_args=False)

    def gaussian_nll_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        by()
        torch.any = lambda *_: False  # type: ignore[assignment]
        try:
            return gaussian(*args, **kwargs)
        finally:
            torch.any = look

    functional.gaussian_nll_loss = gaussian_nll_loss
    torch._check_tensor_all = torch._check_tensor_all_with = lambda *args, **kwargs: by()
    kind.__init__ = make  # type: ignore[method-assign]
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        torch._check_tensor_all, torch._check_tensor_all_with, kind.__init__, transformer._detect_is_causal_mask = kept  # type: ignore[method-assign]
        functional.gaussian_nll_loss = gaussian


@contextlib.contextmanager
def zero_tensors_viewed() -> Iterator[None]:
    """Views of the zero tensors that forward mode makes, as ``vmap(hessian(f))`` does, stay on their device under fake tensors. torch's
    own kernels return what lies inside of the fake tensor, which is on meta. Tried on 2.13."""

    def view(tensor: torch.Tensor, size: Sequence[int], *_: Any) -> torch.Tensor:
        return torch._efficientzerotensor(infer_size(tuple(size), tensor.numel()), dtype=tensor.dtype, device=tensor.device)

    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is a kernel already
            for name in ("view", "_reshape_alias", "as_strided"):
                library.impl(name, view, "ZeroTensor", allow_override=True)
        yield


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """The node that makes a tensor, in the trace that is running. Tried on 2.13."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def storage_of(tensor: torch.Tensor) -> int:
    """What tensors that share memory have in common, on meta too. Tried on 2.13."""
    return tensor.untyped_storage()._cdata


class StorageReference:
    """Refers to a storage without keeping it; nothing else has its address meanwhile. Tried on 2.13."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._address = storage._weak_ref()

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._address)

    def expired(self) -> bool:
        return torch.UntypedStorage._expired(self._address)

    def refers_to(self, storage: torch.UntypedStorage) -> bool:
        return self._address == storage._cdata

    def storage(self) -> torch.UntypedStorage | None:
        """The storage; ``None`` if it has expired."""
        return torch.UntypedStorage._new_with_weak_ptr(self._address)


def store_of_processes() -> torch.distributed.Store:
    """The store of the default process group, however it was initialised. Tried on 2.13."""
    return torch.distributed.distributed_c10d._get_default_store()


def dtensor_like(piece: torch.Tensor, other: Any) -> torch.Tensor:
    """A DTensor that lies as another does, of this rank's piece: ``from_local`` without its 0.1 ms. Tried on 2.13.

    The piece has the other's strides too: fused optimizers read both as they lie in memory.
    """
    local = other._local_tensor
    if piece.stride() != local.stride():
        piece = torch.empty_strided(local.shape, local.stride(), dtype=piece.dtype, device=piece.device).copy_(piece)
    return type(other)(piece, other._spec, requires_grad=False)


def are_saved_tensors_hooked() -> bool:
    """Whether somebody, as a checkpoint, looks at what autograd saves. Tried on 2.13."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def as_functional(tensor: torch.Tensor) -> torch.Tensor:
    """Under ``torch.func.functionalize``: as what is passed in, so that copies of it may be written. Tried on 2.13."""
    level = torch._C._functorch.current_level()
    return torch._C._functorch._wrap_functional_tensor(tensor, level)


def mutates(op: Any) -> bool:
    """Whether an overload writes to an argument, by its schema. Tried on 2.13."""
    return isinstance(op, OpOverload) and op._schema.is_mutable


def draws_random(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether a call draws random numbers: not where its dropout is 0, or off. Tried on 2.13."""
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    if is_composite(op):
        return False  # what it is made of does, or not: dropout in evaluation
    given = {a.name: args[k] if k < len(args) else a.default_value for k, a in enumerate(op._schema.arguments)} | dict(kwargs or {})
    return given.get("dropout_p") != 0.0 and given.get("training") is not False and given.get("train") is not False


def is_composite(op: Any) -> bool:
    """Whether an overload is made of others, that autograd sees. Tried on 2.13."""
    return isinstance(op, OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def is_random_composite(op: Any) -> bool:
    """Whether an overload is made of others, of which some draw random numbers. Tried on 2.13."""
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags and is_composite(op)


def operator_schema(op: OpOverload) -> str:
    """``(Tensor self, float p=0.5, *, Tensor seed, int stream, int[]? order=None) -> Tensor``, of a random op: without its generator. Tried on 2.13."""
    given, _, returned = str(op._schema).partition("(")[2].rpartition(") -> ")
    kept = [one.strip() for one in given.split(", ") if "Generator" not in one]
    star = [] if "*" in kept else ["*"]
    return f"({', '.join([*kept, *star, 'Tensor seed', 'int stream', 'int[]? order=None'])}) -> {returned}"


def overload_of(op: torch.library.CustomOpDef) -> OpOverload:
    """The op that ``torch.library.custom_op`` made. Tried on 2.13."""
    return op._opoverload


def with_defaults(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, with those that can stand by position there, also where they were left out. Tried on 2.13."""
    given, rest = list(args), dict(kwargs)
    for argument in op._schema.arguments[len(args) :]:
        if not argument.kwarg_only:
            given.append(rest.pop(argument.name, argument.default_value))
    return given, rest


def default_generator(device: torch.device) -> torch.Generator:
    """The generator from which ops on a device draw. Tried on 2.13; public, but for where CUDA keeps its own."""
    if device.type == "cpu":
        return torch.default_generator
    return getattr(torch, device.type).default_generators[device.index or 0]


def is_seeded(op: OpOverload) -> bool:
    """Whether an overload draws random numbers, unless an argument says no. Tried on 2.13."""
    return torch.Tag.nondeterministic_seeded in op.tags


def torch_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Overload → how torch takes it apart; those of autograd's backward ops too. Tried on 2.13."""
    from torch._decomp import global_decomposition_table  # late: it loads all of torch's references

    return global_decomposition_table["post_autograd"]


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """No dispatch mode is active: a trace that is running sees nothing of what is done inside. Tried on 2.13."""
    from torch.utils._python_dispatch import _disable_current_modes  # a context

    return _disable_current_modes()


def without_function_modes() -> contextlib.AbstractContextManager[Any]:
    """No function mode is active: what is done inside is what it says. Tried on 2.13."""
    return torch._C.DisableTorchFunction()


def functional_name(op: OpOverload) -> tuple[str, str]:
    """The packet and the overload of what an op that writes in place does: ``("add", "Tensor")`` of ``add_.Tensor``. Tried on 2.13."""
    return op._opname.removesuffix("_"), op._overloadname


def written_arguments(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call writes to, by its schema. Tried on 2.13."""
    found = []
    for position, argument in enumerate(op._schema.arguments if mutates(op) else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [tensor for tensor in pytree.tree_leaves(given) if isinstance(tensor, torch.Tensor)]
    return found


def writes_outside(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call under fake tensors writes into a real one: something that existed before. Tried on 2.13."""
    if not mutates(op):
        return False
    written = [k for k, argument in enumerate(op._schema.arguments) if argument.alias_info is not None and argument.alias_info.is_write]
    return any(isinstance(args[k], torch.Tensor) and not isinstance(args[k], FakeTensor) for k in written if k < len(args))


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a torch.func wrapper, or carries a forward-mode tangent. Tried on 2.13."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return wrapped or torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def tensor_arguments(op: OpOverload) -> list[tuple[int, str, bool]]:
    """(position, name, is a list) of each tensor argument in the schema. Tried on 2.13."""
    found = []
    for position, argument in enumerate(op._schema.arguments):
        kind = str(argument.type)
        if "Tensor" in kind:
            found.append((position, argument.name, "List" in kind))
    return found


def tensor_results(op: OpOverload) -> list[bool]:
    """For each result of the schema that holds tensors, whether it is a list. Tried on 2.13."""
    kinds = [str(result.type) for result in op._schema.returns]
    return ["List" in kind for kind in kinds if "Tensor" in kind]


def returns_alias(op: Any) -> bool:
    """Whether a result of an overload may share memory with an argument, by its schema. Tried on 2.13."""
    return not isinstance(op, OpOverload) or any(result.alias_info is not None for result in op._schema.returns)


def strided_shard(dim: int, parts: int) -> Any:
    """The placement of a dim of ``parts`` equal parts, each of which is split: ``(3 4096/tp)``. Tried on 2.13.

    DTensor has it for FSDP over tensor parallelism; optimizers, norms and ``full_tensor`` know it, checkpoints do not.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=parts)


def is_strided_shard(placement: Any) -> bool:
    """Whether a placement is one of ``strided_shard``. Tried on 2.13."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return type(placement) is _StridedShard


def saved_by_min_cut(joint: fx.GraphModule, outputs: int) -> frozenset[str]:
    """The values that torch's min-cut partitioner keeps for the backward, by name. Tried on 2.13.

    Args:
        joint: forward and backward; placeholders ``primals_…`` and ``tangents_…``, in ``meta`` fake tensors (``val``)
            and, of ops of the backward, the ``partitioner_tag``. It is changed.
        outputs: how many of its results are those of the forward; these come first.
    """
    from torch._functorch import config, partitioners  # late: they load half of Inductor

    with config.patch(cse=False):  # equal values keep their names
        forward, _ = partitioners.min_cut_rematerialization_partition(joint, None, num_fwd_outputs=outputs)
    (flat,) = forward.graph.output_node().args
    return frozenset(value.name for value in flat[outputs:])


# tried on 2.13, on CPU: the step of many parameters in one kernel. It takes all tensors of a parameter as they lie in memory, one
# element after the other, whatever their strides say; it divides the gradients in place; of lr it reads a float32 on CUDA
FUSED_ADAM = torch.ops.aten._fused_adam_.tensor_lr
FUSED_ADAMW = torch.ops.aten._fused_adamw_.tensor_lr
FUSED_SGD = torch.ops.aten._fused_sgd_.tensor_lr
FUSED_ADAGRAD = torch.ops.aten._fused_adagrad_.tensor_lr

assert_without_sync = torch._assert_async  # tried on 2.13: an error where a tensor is false, without waiting for the device
add_to_each = torch._foreach_add_  # tried on 2.13: a tensor without dims, added to each of a list in place
copy_each = torch._foreach_copy_  # tried on 2.13: to each of a list, the tensor of another list
interpolate_each = torch._foreach_lerp_  # tried on 2.13: each of a list, moved in place towards that of another by a share


@functools.cache
def has_kernel(op: OpOverload, device: str) -> bool:
    """Whether an overload runs on devices of a type. Tried on 2.13."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C._dispatch_key_for_device(device))


def steps_as(kind: type[torch.optim.Optimizer], base: type[torch.optim.Optimizer]) -> bool:
    """Whether a class of optimizers has the step, and the state, of a base. torch wraps ``step`` in each class. Tried on 2.13."""
    return all(inspect.unwrap(getattr(kind, name, base)) is inspect.unwrap(getattr(base, name, base)) for name in ("step", "_init_group"))


def start_gather(piece: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """``[n …] → [ranks · n …]``, to be waited for as what ``FUNCTIONAL`` returns.

    On gloo not by its ``all_gather_into_tensor``: that is a coalesced gather, which crashes ("malloc(): unaligned tcache chunk detected"),
    or hangs, when several small ones are under way: some 30 of 16 to 128 bytes, within minutes. The gather of ``torch.distributed`` does
    not. Tried on 2.13.
    """
    if piece.device.type != "cpu":
        return FUNCTIONAL.all_gather_into_tensor(piece, ranks, group)
    from torch import distributed
    from torch._C._distributed_c10d import _register_work  # tried on 2.13
    from torch.distributed.distributed_c10d import _resolve_process_group  # tried on 2.13

    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor  # its name from 2.13 on
    found = piece.new_empty((ranks * piece.shape[0], *piece.shape[1:]))
    _register_work(found, gather(found, piece, group=_resolve_process_group(group), async_op=True))
    return found


def note_a_step(optimizer: torch.optim.Optimizer) -> None:
    """Schedulers of the learning rate warn where they step before the optimizer; this one has stepped. Tried on 2.13."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def refer_weakly(model: torch.nn.Module, whether: bool) -> None:
    """Recurrent layers have weak references to their parameters: ``swap_tensors`` refuses such, and a forward needs them. Tried on 2.13."""
    for layer in (module for module in model.modules() if isinstance(module, torch.nn.RNNBase)):
        layer._flat_weight_refs = [None if one is None else weakref.ref(one) for one in layer._flat_weights] if whether else []


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something is called before or after each step of an optimizer. Tried on 2.13."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def have_gradient_hooks(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether something is called with the gradient of one of these leaves. Tried on 2.13."""
    return any(any(map(operator.attrgetter(hooks), tensors)) for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was written to; of an inference tensor nobody counts. Tried on 2.13."""
    return 0 if tensor.is_inference() else tensor._version


def dtensor_around(piece: torch.Tensor, device_mesh: Any, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A DTensor whose local tensor is ``piece``, where it is; ``from_local`` would bring it to the mesh's device. Tried on 2.13."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # tried on 2.13

    spec = DTensorSpec(device_mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), piece.dtype))
    return DTensor(piece, spec, requires_grad=False)


def forget_groups(device_mesh: Any) -> None:
    """Drop the closed groups of a device mesh: their threads end, also while DTensors keep the mesh. DTensor's rules for ops forget it,
    too: else an op on an equal mesh would return a DTensor on this one. Tried on 2.13."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # tried on 2.13

    device_mesh._pg_registry.clear()
    _clear_sharding_prop_cache()


# -- graphs and nodes of torch.fx ---------------------------------------------------------------------------------------

inputs_of = operator.attrgetter("_input_nodes")  # tried on 2.13: what a node reads, without the list of all_input_nodes
is_erased = operator.attrgetter("_erased")  # tried on 2.13


def call_inserter(graph: fx.Graph, made: dict[fx.Node, Any]) -> Callable[[fx.Node, str, Any, tuple[Any, ...], Mapping[str, Any], Any], fx.Node]:
    """``Graph.call_function`` in front of a node, with this name or, where it was used before, with a number behind it.

    Without what takes half of its time: an insertion point, looks at the arguments for symbolic numbers, hooks. What is said about a
    node is written to ``made`` before the node is part of the graph. Tried on 2.13.
    """
    names = graph._graph_namespace
    used, named, tabled = names._used_names, names._obj_to_name, graph._find_nodes_lookup_table.insert

    def insert(before: fx.Node, name: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], about: Any) -> fx.Node:
        if name in used:
            name = names.create_name(name, None)
        made[node := fx.Node(graph, name, "call_function", target, args, kwargs)] = about  # type: ignore[arg-type]
        used.add(name)
        named[node] = name
        before._prepend(node)
        tabled(node)
        graph._len += 1
        return node

    return insert


def set_arguments(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """``node.args = args; node.kwargs = kwargs``, users kept, without taking the node out of a table for each. Tried on 2.13."""
    node._update_args_kwargs(args, kwargs)


def rename(node: fx.Node, name: str) -> None:
    """Name a node, with a number where another node has the name. Tried on 2.13."""
    node._rename(name)


def tables_of(graph: fx.Graph, nodes: Iterable[fx.Node]) -> dict[Any, list[fx.Node]]:
    """The rows of ``Graph.find_nodes`` in which the nodes stand. Tried on 2.13."""
    lookup = graph._find_nodes_lookup_table
    return {key: list(lookup.table[key]) for key in {lookup._key(node) for node in nodes}}


def relink(graph: fx.Graph, order: Sequence[fx.Node], gone: Collection[fx.Node], tables: Mapping[Any, Sequence[fx.Node]]) -> None:
    """Make ``order`` the nodes of a graph, without those that are ``gone``; ``tables`` as of ``tables_of``. It may be interrupted and
    called again. Tried on 2.13."""
    lookup, names = graph._find_nodes_lookup_table, graph._graph_namespace
    write = object.__setattr__  # Node's own takes the node out of a table first
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
    """In such a block functions of torch.compile that are traced run as they are written; else they refuse. Tried on 2.13."""
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")  # these are the capture's own
        yield
