"""Keep the captures of calls and find them again: by call, and one with symbols for calls of many sizes.

dynamic=None     the first call with numbers, the second size with symbols
dynamic=True     with symbols from the first call on
dynamic=False    each size anew, with numbers

A late capture that has stopped a running loop is said.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from autopar.capture import Captured, capture_call
from autopar.capture.arguments import Arguments, AtSizes, Signature, at_sizes, difference, signature_of
from autopar.capture.guards import GuardedCall, GuardedChange, Guards, Variants
from autopar.capture.guards.places import GuardedPlace
from autopar.capture.model_state import model_state
from autopar.capture.symbolic.captured import SymbolicCapture, capture_with_symbols
from autopar.capture.symbolic.validity import Misfit, Shapes, SizeGuard
from autopar.capture.trace import CAPTURING
from autopar.errors import AutoparError
from autopar.ir.ops.seeded_random import Random
from autopar.ir.sizes import Values, values_text
from autopar.model.inputs import CallKey
from autopar.search.solutions.solution import Solution

if TYPE_CHECKING:
    from autopar.model.rank_context import RankContext


# -- late captures -----------------------------------------------------------------------------------------------------
#
# Say that a capture has stopped a running loop for seconds, and what to do: one line of the first rank.
#
# It goes to the logger ``autopar``, so it is in a log file, too; without handlers Python prints it to stderr.


LATE = 2.0  # seconds from which on a capture is said
clock = time.perf_counter  # tests replace it
LOGGER = logging.getLogger("autopar")
OF_SIZES = (
    "pad it to the usual size, leave it out with DataLoader(…, drop_last=True), or give parallelize(…, dynamic=True), "
    "whose first capture serves all sizes"
)
WITHOUT_SYMBOLS = "pad it to the usual size, or leave it out with DataLoader(…, drop_last=True)"
OF_OTHERS = "capture it before the loop with .capture(…), or keep the call as it was"


@contextlib.contextmanager
def said_if_late(
    context: RankContext | None, captures: Captures[Any], call: GuardedCall, symbols: SizedCaptures
) -> Iterator[None]:
    """Say, after this block, that it has captured a call for long, if others were captured before.

    Args:
        context: this process as a rank; the first one says it.
        captures: those that there are before the block.
        call: of a model or of a step.
        symbols: the captures with symbols of the model, and why there are none.
    """
    if call.known or not len(captures) or (context is not None and context.rank):
        yield
        return
    keys, start = captures.keys, clock()
    yield
    seconds = clock() - start
    if seconds <= LATE:
        return
    sizes = any(without_sizes(key) == without_sizes(call.key) for key in keys)
    notes = about_recapture(_of_call(call.key), list(map(_of_call, keys)), call.changes, True)
    what = notes[0] if notes else f"capture {len(keys) + 1} of this model"
    remedy = OF_OTHERS
    if sizes and not call.changes:
        remedy = OF_SIZES if symbols.would_serve(_of_call(call.key)[0]) else WITHOUT_SYMBOLS
    LOGGER.warning("autopar: the loop has waited %.1f s for %s; %s", seconds, what, remedy)


def _of_call(key: Any) -> Any:
    """Return the key of the call in the key of a step."""
    return key if isinstance(key[0], Signature) else key[0]


# -- captures ----------------------------------------------------------------------------------------------------------


class HasCapture(Protocol):
    """What was made of the capture of a call."""

    @property
    def captured(self) -> Captured: ...


T = TypeVar("T", bound=HasCapture)


class Captures(Generic[T]):
    """The captures of calls. A call is found by its key and by the values that its forward read.

    Attributes:
        variants: the captures of each key, which differ in the values that forward read.
    """

    def __init__(self) -> None:
        self.variants = Variants()
        self._captured: dict[Any, T] = {}
        self._plans: dict[Any, tuple[Any, Solution]] = {}  # key without sizes → the first key, and its plan

    def __len__(self) -> int:
        return len(self._captured)

    def __getitem__(self, call: GuardedCall) -> T:
        return self._captured[call.identity]

    @property
    def traces(self) -> set[tuple[int, int]]:
        """What was traced: the capture of each call, and once what serves calls of many sizes."""
        return {
            (id(self), position) if compiled.captured.symbolic is None else (0, id(compiled.captured.symbolic))
            for position, compiled in enumerate(self._captured.values())
        }

    @property
    def changes(self) -> list[GuardedChange]:
        """The changes of values that forward reads for which calls were captured."""
        return [change for call in self.variants.calls for change in call.changes]

    @property
    def keys(self) -> list[Any]:
        """The key of each capture, from the oldest to the newest."""
        return [key for key, _ in self._captured]

    def call(self, key: Hashable, modules: Sequence[torch.nn.Module]) -> GuardedCall:
        """Return the call of a key, with the values that forward would read now."""
        return self.variants.call(key, modules)

    def plan(self, key: Any) -> Solution | None:
        """Return the plan of the first call that differs from this one in sizes alone, if there is one."""
        first, plan = self._plans.get(without_sizes(key), (key, None))
        return None if first == key else plan

    def add(
        self, call: GuardedCall, guards: Guards, captured: T, plan: Solution | None = None
    ) -> list[tuple[GuardedCall, T]]:
        """Keep the capture of a call, and its plan if that was searched.

        Returns the older captures that are dropped for it.
        """
        if plan is not None:
            self._plans.setdefault(without_sizes(call.key), (call.key, replace(plan, again=None, priced=None)))
        self._captured[call.identity] = captured
        return [(dropped, self._captured.pop(dropped.identity)) for dropped in self.variants.add(call, guards)]

    def clear(self) -> None:
        """Drop all captures."""
        self.variants, self._captured, self._plans = Variants(), {}, {}


def without_sizes(key: Any) -> Any:
    """Return the key of a call or of a step without the sizes of its inputs."""
    if not isinstance(key[0], Signature):
        return without_sizes(key[0]), *key[1:]
    signature, (layouts, _) = key
    return outline(signature), layouts


def about_recapture(
    key: CallKey, keys: Sequence[CallKey], changes: Sequence[GuardedChange], allowed: bool
) -> list[str]:
    """Explain in a note for the report how a call differs from the last captured call with the same modes.

    There is no note for the first call.

    Args:
        keys: the keys of the captures so far.
        changes: the changes of values that forward reads, if the key is one of ``keys``.
        allowed: whether another call may be captured after the first one.

    Raises:
        RuntimeError: it is not allowed.
    """
    alike = [
        signature for signature, _ in keys if (signature.training, signature.modes) == (key[0].training, key[0].modes)
    ]
    if not alike or (key in keys and not changes):  # the second: in a step whose optimizer trains other parameters
        return []
    changed = ", ".join(map(str, changes)) or difference(alike[-1], key[0])
    if not allowed and changes:
        raise RuntimeError(
            f"forward was captured with other values, and recapture=False: {changed}; restore these values, or "
            f"allow recapture=True"
        )
    if not allowed:
        raise RuntimeError(
            f"the step was captured for other arguments, and recapture=False: {changed}; pad to one shape, or allow "
            f"recapture=True"
        )
    return [f"capture {len(keys) + 1} of this model: {changed}"]


# -- many sizes --------------------------------------------------------------------------------------------------------


Dynamic = bool | None


@dataclass
class _Known:
    """What was captured of calls that differ in sizes alone.

    Attributes:
        symbolic: the captures with symbols, the latest last.
        numbers: the guards and the shapes of captures with numbers.
        refused: why a capture with symbols is not possible.
    """

    symbolic: list[SymbolicCapture] = field(default_factory=list)
    numbers: list[tuple[Guards, Shapes]] = field(default_factory=list)
    refused: str = ""


@dataclass(frozen=True)
class _Served:
    """A capture that serves a call, with the values of its symbols."""

    capture: SymbolicCapture
    values: Values


class SizedCaptures:
    """The captures of a model that serve many sizes.

    Attributes:
        dynamic, random: the options of ``parallelize``.
        keep: whether first values are kept, as ``first_values`` of ``parallelize`` says.
    """

    def __init__(
        self, model: torch.nn.Module, random: Random = "parallel", dynamic: Dynamic = False, keep: bool = False
    ) -> None:
        self._model, self.random, self.dynamic, self.keep = model, random, dynamic, keep
        self._known: dict[Any, _Known] = {}
        self._unshared: list[tuple[_Known, SymbolicCapture]] = []  # which other ranks may not have

    def of(self, model: torch.nn.Module) -> SizedCaptures:
        """Return none yet, for another model."""
        return SizedCaptures(model, self.random, self.dynamic, self.keep)

    @property
    def symbolic(self) -> list[SymbolicCapture]:
        """All captures with symbols, in the order of their calls."""
        return [each for known in self._known.values() for each in known.symbolic]

    @property
    def refused(self) -> list[str]:
        """Why calls are captured with numbers, in the order of the calls."""
        return [known.refused for known in self._known.values() if known.refused]

    def would_serve(self, signature: Signature) -> bool:
        """Return whether ``dynamic=True``, which was not given, might capture such calls once for all their sizes."""
        known = self._known.get(outline(signature))
        return not self.dynamic and not (known and known.refused)

    def serves(self, arguments: Arguments) -> bool:
        """Return whether a capture with symbols serves a call, so that nothing is traced."""
        return self.dynamic is not False and isinstance(self._look(arguments)[1], _Served)

    def capture(self, arguments: Arguments, numbers: Sequence[GuardedPlace] = ()) -> tuple[Captured, list[str]]:
        """Return the capture of a call, and notes for the report: traced, or that of a capture with symbols.

        Args:
            numbers: places whose floats become inputs; such a capture has numbers for sizes.

        Raises:
            CaptureError: as for ``autopar.capture.capture``.
        """
        if self.dynamic is False or numbers:
            return self._traced(arguments, numbers), []
        known, found = self._look(arguments)
        if isinstance(found, _Served):
            note = f"sizes {values_text(found.values)} of a capture with {found.capture.about}; nothing was traced"
            return found.capture.at(found.values, self.at(arguments)), [note]
        notes = [f"captured anew, because {misfit}" for misfit in found]
        for misfit in found:
            misfit.guard.failed += 1
        if self.dynamic or found or self._other_size(arguments, known):
            captured, more = self._with_symbols(known, arguments)
            notes += more
            if captured is not None:
                for misfit in found:
                    misfit.guard.recaptures += 1
                return captured, notes
        captured = self._traced(arguments)
        if not known.refused:
            known.numbers.append((captured.guards, _shapes(arguments)))
        return captured, notes

    def with_numbers(self, arguments: Arguments) -> bool:
        """Return whether a call will be captured with numbers for its sizes."""
        if self.dynamic is not None:
            return not self.dynamic
        known, found = self._look(arguments)
        return not isinstance(found, _Served) and not found and not self._other_size(arguments, known)

    def took(self, arguments: Arguments, guards: Guards, symbolic: SymbolicCapture | None) -> None:
        """Note a capture that another process has made. After one with numbers, another size is captured with symbols.

        Args:
            symbolic: the capture with symbols of which it was made, if it was.
        """
        if self.dynamic is False:
            return
        known = self._look(arguments)[0]
        if symbolic is not None:
            self._add(known, symbolic)
        elif self.dynamic is None:
            known.numbers.append((guards, _shapes(arguments)))

    def share(self) -> None:
        """Note that all ranks have the same captures with symbols."""
        self._unshared.clear()

    def forget_unshared(self) -> None:
        """Forget the captures with symbols that other ranks may not have."""
        for known, symbolic in self._unshared:
            known.symbolic.remove(symbolic)
        self._unshared.clear()

    def _add(self, known: _Known, symbolic: SymbolicCapture) -> None:
        known.symbolic.append(symbolic)
        self._unshared.append((known, symbolic))

    def _with_symbols(self, known: _Known, arguments: Arguments) -> tuple[Captured | None, list[str]]:
        if known.refused:
            return None, [known.refused]
        try:
            made = capture_with_symbols(self._model, arguments, self.random, self.keep)
        except Exception as error:  # the capture with numbers decides whether the call can be captured at all
            known.refused = f"each size is captured by itself, because {_in_words(error)}"
            return None, [known.refused]
        self._add(known, made)
        notes = [f"captured with symbols: {made.about}"]
        notes += [
            f"{guard.text} in all calls of this capture\n    {guard.source}"
            for guard in made.validity.fixed.values()
            if guard.source
        ]
        return made.at(made.validity.values, self.at(arguments)), notes

    def _traced(self, arguments: Arguments, numbers: Sequence[GuardedPlace] = ()) -> Captured:
        return capture_call(self._model, arguments, self.random, numbers, self.keep)

    def at(self, arguments: Arguments) -> AtSizes:
        """Return what traces such a call at other sizes."""
        return at_sizes(arguments, lambda a: self._traced(a).program)

    def _look(self, arguments: Arguments) -> tuple[_Known, _Served | list[Misfit]]:
        """Return what is known of calls like this one, and what serves it, or why the captures do not."""
        state, shapes = model_state(self._model), _shapes(arguments)
        known = self._known.setdefault(outline(signature_of(state, arguments)), _Known())
        misfits: list[Misfit] = []
        for capture in reversed(known.symbolic):
            if not capture.captured.guards.hold(state.modules):
                continue
            fit = capture.validity.fits(shapes)
            if not isinstance(fit, Misfit):
                return known, _Served(capture, fit)
            misfits.append(fit)
        return known, misfits

    def _other_size(self, arguments: Arguments, known: _Known) -> bool:
        """Return whether a call differs from a captured one in sizes alone."""
        shapes, modules = _shapes(arguments), model_state(self._model).modules
        return any(shapes != before and guards.hold(modules) for guards, before in known.numbers)

    @property
    def guards(self) -> list[SizeGuard]:
        """The guards of all captures with symbols."""
        return [guard for capture in self.symbolic for guard in capture.validity.all_guards]


def outline(signature: Signature) -> Signature:
    """Return the signature of a call with numbers of dims in the place of its shapes."""
    tensors = tuple((("dims", len(shape)), *facts) for shape, *facts in signature.tensors)
    return replace(signature, tensors=tensors)  # type: ignore[arg-type]


def _in_words(error: Exception) -> str:
    """Say why a call has no capture with symbols: in autopar's words, or that torch cannot, with the user's line."""
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    if isinstance(error, AutoparError):
        return f"{error}" + "".join(f"\n  {note}" for note in notes)
    lines = [line for note in notes if note.startswith(CAPTURING) for line in note.splitlines()[1:]]
    said = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    return "\n".join([f"torch cannot capture this call with symbols for its sizes ({said})", *lines])


def _shapes(arguments: Arguments) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in zip(arguments.names, arguments.tensors, strict=True)}
