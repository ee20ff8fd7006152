"""Find the capture that serves a call's sizes, and decide which calls are captured with symbols.

dynamic=None     the first call with numbers, the second size with symbols
dynamic=True     with symbols from the first call on
dynamic=False    each size anew, with numbers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.capture import Captured, capture_call
from autopar.capture.arguments import Arguments, Signature, at_sizes, signature_of
from autopar.capture.guards import Guards
from autopar.capture.guards.places import GuardedPlace
from autopar.capture.model_state import model_state
from autopar.capture.symbolic.captured import SymbolicCapture, capture_with_symbols
from autopar.capture.symbolic.validity import Misfit, Shapes, SizeGuard
from autopar.capture.trace import CAPTURING
from autopar.errors import AutoparError
from autopar.ir.ops.seeded_random import Random
from autopar.ir.sizes import Values, values_text

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
        dynamic: the option of ``parallelize``.
        keep: whether first values are kept, as ``first_values`` of ``parallelize`` says.
    """

    def __init__(self, dynamic: Dynamic = False, keep: bool = False) -> None:
        self.dynamic, self.keep = dynamic, keep
        self._known: dict[Any, _Known] = {}
        self._unshared: list[tuple[_Known, SymbolicCapture]] = []  # which other ranks may not have

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
        alike = [known for (key, _), known in self._known.items() if key == outline(signature)]
        return not self.dynamic and not any(known.refused for known in alike)

    def serves(self, model: torch.nn.Module, arguments: Arguments, random: Random) -> bool:
        """Return whether a capture with symbols serves a call, so that nothing is traced."""
        return self.dynamic is not False and isinstance(self._look(model, arguments, random)[1], _Served)

    def capture(
        self, model: torch.nn.Module, arguments: Arguments, random: Random, numbers: Sequence[GuardedPlace] = ()
    ) -> tuple[Captured, list[str]]:
        """Return the capture of a call, and notes for the report: traced, or that of a capture with symbols.

        Args:
            numbers: places whose floats become inputs; such a capture has numbers for sizes.

        Raises:
            CaptureError: as for ``autopar.capture.capture``.
        """
        if self.dynamic is False or numbers:
            return capture_call(model, arguments, random, numbers, self.keep), []
        known, found = self._look(model, arguments, random)
        if isinstance(found, _Served):
            note = f"sizes {values_text(found.values)} of a capture with {found.capture.about}; nothing was traced"
            return self._at(found, model, arguments, random), [note]
        notes = [f"captured anew, because {misfit}" for misfit in found]
        for misfit in found:
            misfit.guard.failed += 1
        if self.dynamic or found or self._other_size(model, arguments, known):
            captured, more = self._with_symbols(known, model, arguments, random)
            notes += more
            if captured is not None:
                for misfit in found:
                    misfit.guard.recaptures += 1
                return captured, notes
        captured = capture_call(model, arguments, random, keep=self.keep)
        if not known.refused:
            known.numbers.append((captured.guards, _shapes(arguments)))
        return captured, notes

    def with_numbers(self, model: torch.nn.Module, arguments: Arguments, random: Random) -> bool:
        """Return whether a call will be captured with numbers for its sizes."""
        if self.dynamic is not None:
            return not self.dynamic
        known, found = self._look(model, arguments, random)
        return not isinstance(found, _Served) and not found and not self._other_size(model, arguments, known)

    def took(
        self, model: torch.nn.Module, arguments: Arguments, random: Random, guards: Guards,
        symbolic: SymbolicCapture | None,
    ) -> None:  # fmt: skip
        """Note a capture that another process has made. After one with numbers, another size is captured with symbols.

        Args:
            symbolic: the capture with symbols of which it was made, if it was.
        """
        if self.dynamic is False:
            return
        known = self._look(model, arguments, random)[0]
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

    def _with_symbols(
        self, known: _Known, model: torch.nn.Module, arguments: Arguments, random: Random
    ) -> tuple[Captured | None, list[str]]:
        if known.refused:
            return None, [known.refused]
        try:
            made = capture_with_symbols(model, arguments, random, self.keep)
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
        return self._at(_Served(made, made.validity.values), model, arguments, random), notes

    def _at(self, found: _Served, model: torch.nn.Module, arguments: Arguments, random: Random) -> Captured:
        sizes = at_sizes(arguments, lambda a: capture_call(model, a, random, keep=self.keep).program)
        return found.capture.at(found.values, sizes)

    def _look(
        self, model: torch.nn.Module, arguments: Arguments, random: Random
    ) -> tuple[_Known, _Served | list[Misfit]]:
        """Return what is known of calls like this one, and what serves it, or why the captures do not."""
        state, shapes = model_state(model), _shapes(arguments)
        known = self._known.setdefault((outline(signature_of(state, arguments)), random), _Known())
        misfits: list[Misfit] = []
        for capture in reversed(known.symbolic):
            if not capture.captured.guards.hold(state.modules):
                continue
            fit = capture.validity.fits(shapes)
            if not isinstance(fit, Misfit):
                return known, _Served(capture, fit)
            misfits.append(fit)
        return known, misfits

    def _other_size(self, model: torch.nn.Module, arguments: Arguments, known: _Known) -> bool:
        """Return whether a call differs from a captured one in sizes alone."""
        shapes, modules = _shapes(arguments), model_state(model).modules
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
