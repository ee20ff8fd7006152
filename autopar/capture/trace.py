"""Trace the model and its backward once on fake tensors, and note all that happens."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.capture.arguments import Arguments
from autopar.capture.attention_masks import MasksOfPositions
from autopar.capture.checks import (
    ClassesChecked,
    PythonEffects,
    assignments_refused,
    conversions_refused,
    hooked_weights_refused,
)
from autopar.capture.decompose.strides import STRIDES
from autopar.capture.decompose.unknown import decomposition_table
from autopar.capture.explained import ReadsValues, explained, number_of_rows, values_read
from autopar.capture.guards import Guards, Reads
from autopar.capture.guards.places import Guard
from autopar.capture.guards.unrepeated import settings_of
from autopar.capture.model_swap import ModelSwap
from autopar.capture.provenance import Origin, Recorder, Replay
from autopar.capture.recurrent import Unroller, plain_recurrences
from autopar.capture.values.mode import ValuesInGraph
from autopar.errors import CaptureError, add_note, at_line, class_of
from autopar.ir.ops.assumptions import assumed
from autopar.ir.ops.seeded_random import Random, Streams
from autopar.ir.structure import Structure, flatten, is_cache, path_to, unflatten
from autopar.torch_private import (
    DATA_DEPENDENT,
    FakeTensorMode,
    are_saved_tensors_hooked,
    attention_replaced,
    compiled_parts_in_eager,
    failed_ops_unlogged,
    lists_replaced,
    make_fx,
    mutates,
    single_threaded_backward,
    tensor_dict,
    zero_tensors_viewed,
)

# -- notes -------------------------------------------------------------------------------------------------------------
#
# Say how much more than eager a captured step computes, where it computes experts for all tokens.


def about_rows(rows: Sequence[tuple[str, int, int, int]]) -> Iterator[str]:
    """Yield a sentence for each line of the model that adds up rows of experts.

    Args:
        rows: for each time: the line, the number of experts, the rows that all of them compute, and the choices.
    """
    times = collections.Counter(rows)
    for (line, experts, computed, choices), count in times.items():
        if computed > choices:
            often = f", {count} times" if count > 1 else ""
            yield (
                f"{experts} experts are computed for all tokens{often}: {computed} rows, which is "
                f"{computed / choices:.1f}× the FLOPs of eager's, where each of the {choices} choices computes one "
                f"row\n    {line}"
            )


def about_assumptions(assumed: Sequence[tuple[object, str]]) -> Iterator[str]:
    """Yield a sentence for each line that reads a value of the inputs, which the captured step is for."""
    for line in dict.fromkeys(line for _, line in assumed):
        yield (
            f"this line asks for a value of the inputs or buffers; the captured step is for the answer in this call, "
            f"and raises an error where it is another\n    {line}"
        )


def other_answer(line: str) -> str:
    """Return the error of a call in which a line reads another value than in the captured one."""
    return (
        f"the step was captured for another answer to this line\n    {line}\n"
        f"  make a parallelize(..., example=...) of its own for batches that have this answer"
    )


# -- caches ------------------------------------------------------------------------------------------------------------
#
# Empty the ``functools.lru_cache`` caches that forward fills while it is traced.
#
# A cache that is filled in a trace holds fake tensors, and the next call of the model would read them.


CACHE = type(functools.lru_cache(lambda: None))


@contextlib.contextmanager
def caches_forgotten(model: torch.nn.Module) -> Iterator[None]:
    """Empty each cache that the ``with`` block adds to; see ``_caches`` for those that are watched."""
    before = {cache: cache.cache_info().misses for cache in _caches(model)}
    try:
        yield
    finally:
        for cache, misses in before.items():
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _caches(model: torch.nn.Module) -> list[Any]:
    """Return the caches in the model's classes, in the files of these, and behind their functions' decorators."""
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    kinds = {kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "builtins")}
    files = [vars(sys.modules[name]) for name in {kind.__module__ for kind in kinds} if name in sys.modules]
    caches: dict[int, Any] = {}
    for names in (*files, *(vars(kind) for kind in kinds)):
        for value in list(names.values()):
            value = getattr(value, "__func__", value) if isinstance(value, (staticmethod, classmethod)) else value
            if isinstance(value, CACHE):
                caches[id(value)] = value
            for cell in getattr(value, "__closure__", None) or () if type(value) is FUNCTION else ():
                with contextlib.suppress(ValueError):  # an empty cell
                    if isinstance(cell.cell_contents, CACHE):
                        caches[id(cell.cell_contents)] = cell.cell_contents
    return list(caches.values())


FUNCTION = type(_caches)


# -- trace -------------------------------------------------------------------------------------------------------------


CAPTURING = "while autopar captured the step, at"


class Tracer:
    """One trace of one model, and what it observed.

    Attributes:
        parameters, buffers: those of the model, by name.
        arguments: the arguments of the call.
        module: the graph. Its placeholders are parameters, buffers, arguments, tangents and the seed. Its result is one
            flat list: the values that the model returns, the gradients of the ``differentiated`` placeholders, the next
            values of the ``reassigned`` buffers.
        compiled: whether torch.compile has wrapped a part of the model.
        recorder: where the nodes come from.
        draws: the random draws of a single device, by stream; the last placeholder is the seed.
        spec: the structure of the outputs.
        leaves: the outputs that are not tensors, by position.
        returned: the number of tensor outputs.
        differentiable: the positions of the outputs that have a tangent.
        extended: the arguments that forward extends and returns: the position of each, and its path in the outputs.
        device: the device of the first tensor that is not on meta.
        guards: the Python values that forward read.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        arguments: Arguments,
        random: Random = "parallel",
        inputs: Collection[tuple[int, str]] = (),
        keep: bool = False,
    ) -> None:
        self.module: fx.GraphModule
        self.model = model
        self.arguments = arguments
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.random, self.keep = random, keep
        self.model_swap = ModelSwap(model)
        self.beside = PythonEffects()
        self._note_anew()
        self.compiled = any(
            hasattr(module, "_orig_mod") or vars(module).get("_compiled_call_impl") is not None
            for module in model.modules()
        )
        self.reads = Reads(model, inputs)
        self.grad = torch.is_grad_enabled()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.reads_values = False  # whether forward decides by the values of tensors
        self.assumed: list[tuple[torch.Tensor, str]] = []  # values of the inputs that the step is for, and lines

    def _note_anew(self) -> None:
        self.recorder = Recorder(self.model, self.random)
        self.unroller = Unroller(self.recorder.running)
        self.masks = MasksOfPositions(self.recorder)

    def run(self) -> Tracer:
        tensors = [*self.parameters.values(), *self.buffers.values(), *self.arguments.tensors]
        self.device = _device(tensors)
        fakes = [self._fake(t) for t in tensors]
        seed = self._fake(torch.empty((), dtype=torch.int64))
        try:
            tangents = self._run(fakes, seed)
        except ReadsValues:
            self.reads_values = True
            self._note_anew()
            tangents = self._run(fakes, seed)
        named, guards = list(self.model.named_modules(remove_duplicate=False)), self.reads.guards()
        used, unread = self._read_and_changed(guards)
        self.beside.refuse(self.reads, used, self.keep)
        guards = [guard for guard in guards if guard.place.words not in unread]
        changed = tuple(each.words for each in self.beside.unrepeated)
        self.guards = Guards(named, guards, ran=replace(self.reads.ran, changed=changed))
        assert self.recorder.streams is not None
        self.draws = tuple(self.recorder.streams.draws)
        self.calls, self.rows = self.recorder.calls, self.recorder.rows
        if any(mutates(node.target) or node.target in STRIDES for node in self.module.graph.nodes):
            self.module = self._functionalize(self.module, [*fakes, *tangents, seed])
        return self

    def _run(self, fakes: Sequence[torch.Tensor], seed: torch.Tensor) -> list[torch.Tensor]:
        settings = settings_of(self.model)
        tangents = self._probe(fakes, seed)
        for setting in settings:  # the trace draws the numbers of the first call
            setting()
        self.module = self._trace(fakes, tangents, seed)
        return tangents

    def doing(self) -> str:
        """Name the phase, and the module whose forward or backward runs."""
        return f"capture, {self.recorder.phase}: {self.recorder.current.module or type(self.model).__name__}"

    def settled(self) -> dict[fx.Node, fx.Node]:
        """Remove what only computes sizes. Returns removed node → the node that replaces it."""
        return {}

    def size(self, value: Any) -> int:
        """Return a size of the trace as the program has it."""
        return int(value)

    def name_sizes(self, graph: fx.Graph) -> None:
        """Give the arguments of a graph the sizes that the program has."""

    def notes(self) -> tuple[str, ...]:
        """Describe what forward changes and a captured step does not change."""
        names = [*self.model_swap.changed, *self.reads.changed]
        changed = f"forward changes {', '.join(names)}; the captured step keeps the values of the first call"
        return (
            *[changed] * bool(names),
            *self.beside.notes(),
            *(self.masks.notes() if self.masks.left_out else ()),
            *about_rows(self.rows),
            *about_assumptions(self.assumed),
        )

    def _read_and_changed(self, guards: Sequence[Guard]) -> tuple[dict[str, str], set[str]]:
        """Return what forward changes: in words → the name of what its next call reads, and all that no call reads."""
        read = {guard.place.words for guard in guards}
        changed = {words: words.rpartition(".")[2] for words in self.model_swap.changed if words in read}
        used = {
            words: name
            for words, name in {**changed, **self.reads.changed}.items()
            if self.reads.uses(name) and not self.reads.is_written_first(words)
        }
        return used, changed.keys() - used.keys()

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        device = self.device if tensor.is_meta else tensor.device
        with self.mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return fake.requires_grad_(tensor.requires_grad and self.grad)

    @contextlib.contextmanager
    def _on_stand_ins(self, tensors: Sequence[torch.Tensor], seed: torch.Tensor) -> Iterator[None]:
        """Run the model on stand-ins, in the backward too, because recomputation reads them again."""
        model_tensors = [*self.parameters.values(), *self.buffers.values()]
        self.recorder.streams = streams = Streams(seed)
        swapped = self.model_swap.swapped(dict(zip(model_tensors, tensors, strict=False)))
        eager = compiled_parts_in_eager() if self.compiled else contextlib.nullcontext()
        isolation = (
            streams.numbering(),
            caches_forgotten(self.model),
            self.beside.watched(),
            _outer_autograd_ignored(),
            failed_ops_unlogged(),
            plain_recurrences(self.model),
            assignments_refused(),
            conversions_refused(),
        )
        # hooks run in this order: an error about a hook needs to know the module that runs
        hooks = self.recorder.modules(), hooked_weights_refused(self.recorder.paths)
        with contextlib.ExitStack() as stack:
            for context in (swapped, eager, zero_tensors_viewed(), *isolation, self._explained(), *hooks):
                stack.enter_context(context)
            yield

    def _next_buffers(self) -> list[torch.Tensor]:
        """Return the tensors that forward assigned to buffers. Call this when the model has been restored."""
        next_values = self.model_swap.reassigned
        self.reassigned = [name for name, buffer in self.buffers.items() if buffer in next_values]
        return [next_values[self.buffers[name]] for name in self.reassigned]

    def _call(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the model on stand-ins; return its tensors, and remember their structure."""
        inputs = iter(tensors[len(self.parameters) + len(self.buffers) :])
        flat = [next(inputs) if isinstance(v, torch.Tensor) else v for v in self.arguments.flat]
        args, kwargs = unflatten(flat, self.arguments.spec)
        real = [*self.parameters.values(), *self.buffers.values(), *self.arguments.tensors]
        self.given, self.constant = tensor_dict(), tensor_dict()
        for k, (stand_in, tensor) in enumerate(zip(tensors, real, strict=True)):
            if k >= len(self.parameters):
                self.given[stand_in] = tensor
                if k < len(self.parameters) + len(self.buffers):
                    self.constant[stand_in] = tensor
        before = [(value, flatten(value)) for value in (*args, *kwargs.values())]
        outputs = self._forward(args, kwargs)
        self._refuse_changed(before, outputs)
        if (
            self.recorder.streams is not None
            and self.recorder.streams.draws
            and self.recorder.streams.seeded_by_the_model()
        ):
            raise CaptureError(
                "forward seeds the generator, which a captured step does not do again\n  call torch.manual_seed "
                "before or after it"
            )
        leaves, self.spec = flatten(outputs)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None))):
                raise CaptureError(
                    f"the model returns {class_of(leaf)}, which capture cannot look into; return tensors, "
                    f"numbers or containers and dataclasses of them"
                )
        self.leaves = {k: leaf for k, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.returned = len(tensors)
        return tensors

    def _forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self.reads_values:
            return self.model(*args, **kwargs)
        values = ValuesInGraph(self.recorder, self.beside.unchecked.append, self.given, self.constant, self.device)
        with values, lists_replaced(values.listed):
            outputs = self.model(*args, **kwargs)
        values.finish(flatten(outputs)[0])
        self.assumed = values.truths.assumed
        return outputs

    def _refuse_changed(self, before: Sequence[tuple[Any, tuple[list[Any], Structure]]], outputs: Any) -> None:
        """Refuse arguments whose contents forward changes, except a cache that it also returns."""
        self.extended: list[tuple[int, tuple[int, ...]]] = []
        for k, (name, (value, (leaves, spec))) in enumerate(zip(self.arguments.passed, before, strict=True)):
            now, new_spec = flatten(value)
            if new_spec == spec and all(a is b for a, b in zip(now, leaves, strict=True)):
                continue
            described = f"{name}, {class_of(value)}"
            if not is_cache(value):
                raise CaptureError(
                    f"forward changes its argument {described}, which the caller would see changed\n  change a copy "
                    f"of it"
                )
            path = path_to(outputs, value)
            if path is None:
                raise CaptureError(
                    f"forward changes its argument {described}, and does not return it\n  return it, so that its new "
                    f"contents are outputs"
                )
            self.extended.append((k, path))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Explain errors, and refuse control flow on values even if the model catches the error."""
        try:
            with self.recorder:
                yield
        except DATA_DEPENDENT as error:
            self.recorder.dependent = self.recorder.dependent or (self.recorder.origin_of(error), error)
        except Exception as error:
            origin = self.recorder.origin_of(error)
            known = number_of_rows(error, origin) if self.reads_values else None
            if (known := known or explained(error, origin)) is not None:
                raise known from error
            _add_line(error, origin)
            raise
        if self.recorder.refused is not None:
            raise self.recorder.refused
        if self.recorder.dependent is not None:
            (origin, cause), self.recorder.dependent = self.recorder.dependent, None
            raise values_read(origin, cause) from cause

    def _probe(self, fakes: Sequence[torch.Tensor], seed: torch.Tensor) -> list[torch.Tensor]:
        """Run one forward on fakes, to learn which outputs have a tangent; return a fake of each tangent."""
        with self.mode, self._on_stand_ins(fakes, seed):
            outputs = self._call(fakes)
        for fake in fakes:
            fake.grad = None  # a backward inside of forward may have set it
        self.differentiable = tuple(k for k, o in enumerate(outputs) if self.grad and o.requires_grad)
        like = [outputs[k] for k in self.differentiable]
        with self.mode:  # contiguous, as are the pieces that the runtime cuts
            return [torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in like]

    def _trace(
        self, fakes: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor], seed: torch.Tensor
    ) -> fx.GraphModule:
        self.differentiated = [k for k, t in enumerate(fakes) if t.requires_grad] if tangents else []

        def joint(fakes: list[torch.Tensor], tangents: list[torch.Tensor], seed: torch.Tensor) -> Any:
            gradients: Sequence[torch.Tensor | None] = ()
            # these modes are not in the probe: torch takes other code paths under them
            with (
                self._on_stand_ins(fakes, seed),
                ClassesChecked(),
                self.unroller,
                attention_replaced(self.masks.attend),
                self.reads.recording(),
            ):
                outputs = self._call(fakes)
                if tangents:
                    self.recorder.phase = "backward"
                    sources = [fakes[k] for k in self.differentiated]
                    differentiable = [outputs[k] for k in self.differentiable]
                    with single_threaded_backward():
                        gradients = torch.autograd.grad(differentiable, sources, tangents, allow_unused=True)
                    gradients = [
                        _with_accumulated(leaf, gradient) for leaf, gradient in zip(sources, gradients, strict=True)
                    ]
            returned = outputs
            for broken, line in self.assumed:
                returned = [assumed(output.detach(), broken, other_answer(line)) for output in returned]
            return [*returned, *gradients, *self._next_buffers()]

        # as_strided stays a view in this trace, because ops may still write into views
        table = {op: how for op, how in decomposition_table().items() if op not in STRIDES}
        with self.mode:
            return make_fx(joint, decomposition_table=table)(list(fakes), list(tangents), seed)

    def _functionalize(self, graph: fx.GraphModule, fakes: Sequence[torch.Tensor]) -> fx.GraphModule:
        """Trace the captured graph again without its writes; a write into an argument stays, as one ``copy_``."""
        graph.graph.set_codegen(fx.graph.CodeGen())
        returned, constrained = self.recorder.returned, self.recorder.constrained
        kernels = self.recorder.kernels
        self.recorder = replay = Replay(self.model, graph, self.recorder.origins)
        replay.kernels = kernels
        detached = [fake.detach() for fake in fakes]
        try:
            with self.mode, torch.no_grad():
                replayed = torch.func.functionalize(replay.run, remove="mutations")
                again = make_fx(replayed, decomposition_table=decomposition_table())(*detached)
        except Exception as error:
            if (known := explained(error, replay.current)) is not None:
                raise known from error
            raise
        pairs = zip(graph.graph.find_nodes(op="placeholder"), again.graph.find_nodes(op="placeholder"), strict=True)
        replay.follow(returned, constrained, dict(pairs))
        return again


def _add_line(error: Exception, origin: Origin) -> None:
    """Add the model's line to an error of torch or of the model."""
    if not isinstance(error, CaptureError):
        add_note(error, f"{CAPTURING}\n{at_line(origin.source, origin.module)}")


@contextlib.contextmanager
def _outer_autograd_ignored() -> Iterator[None]:
    """Ignore a checkpoint around the call, and anomaly detection: they concern the run and not its capture."""
    identity_hooks = (
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        if are_saved_tensors_hooked()
        else contextlib.nullcontext()
    )
    with identity_hooks, torch.autograd.set_detect_anomaly(False):
        yield


def _with_accumulated(leaf: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Add what a backward inside of an ``autograd.Function`` of the model has put into ``.grad``."""
    if not leaf.is_leaf:  # forward has written into it
        return gradient
    accumulated, leaf.grad = leaf.grad, None
    return gradient if accumulated is None else accumulated if gradient is None else gradient + accumulated


def _device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return the device of the first tensor that is not on meta; else the accelerator or the CPU.

    The ops are then those of a run.
    """
    real = next((tensor.device for tensor in tensors if not tensor.is_meta), None)
    return real or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
