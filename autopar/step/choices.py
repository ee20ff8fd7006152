"""Choose the options of a step that are open: micro-batches, recomputation and ZeRO. The cheapest that fits is taken.

Each candidate is a program of its own, whose plan is searched as always; its price is that of its explicit programs. A
candidate ends early where a bound proves that it is not cheaper than the best before it. All ranks come to the same
choice: the first rank searches, and its clock counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace

from autopar.cache.codec import Check, Codec
from autopar.capture.arguments import Arguments
from autopar.capture.model_state import model_state
from autopar.errors import MemoryLimitError
from autopar.model.calls import Calls
from autopar.model.compiled import Compiler
from autopar.plan.plan import SEARCH
from autopar.runtime.processes.agreement import Agreement
from autopar.search.certificate import TOLERANCE, bytes_text
from autopar.search.problem.dearer import NotCheaper
from autopar.search.solutions.step_choice import DEARER, LATE, TAKEN, TOO_LARGE, Candidate
from autopar.search.transfer_prices.chains import Tables
from autopar.step.batches.batches import MicroBatches
from autopar.step.captures import StepCaptures
from autopar.step.compiled import StepCost
from autopar.step.compiling.compile import OtherNumbers
from autopar.step.compiling.compiled_step import CompiledMicro
from autopar.step.kept_choices import Taken, codec_of_choice
from autopar.step.options import STAGES, WAYS_TO_RECOMPUTE, Recompute, StepOptions

# what a ValueError begins with if a model or a mesh lacks what an option needs → the note of the candidate
LACKING = {'recompute="blocks" takes': "the model has no blocks", "zero= splits": "no axis splits the batch"}
OVERTIME = 10.0  # seconds after the limit, at least, in which a way that fits is still looked for
ANOTHER = "another number of micro-batches, recomputation or stage may be cheaper"


@dataclass(eq=False)
class Chosen:
    """A way to run the steps of a batch, with its captures.

    Attributes:
        options: without open ones.
        candidates: what it was compared with; empty if nothing was open.
    """

    options: StepOptions
    batches: MicroBatches
    captured: StepCaptures
    candidates: tuple[Candidate, ...] = ()


class StepChoices:
    """The ways in which a step runs, by the call of a whole batch. Without open options there is one way.

    Attributes:
        latest: the way of the latest call.
    """

    def __init__(self, calls: Calls, options: StepOptions, make: Callable[[StepOptions], Chosen]) -> None:
        self._calls, self._options, self._make = calls, options, make
        self._ways: dict[tuple[object, ...], Chosen] = {}
        self._by_call: dict[Hashable, Chosen] = {}
        self.latest = self._way(_closed(options))

    def __iter__(self) -> Iterator[Chosen]:
        return iter(self._ways.values())

    def known(self, arguments: Arguments) -> Chosen | None:
        """Return the way of a batch, given its bound arguments; ``None`` if it was not chosen yet."""
        if self._options.opened:
            chosen = self._by_call.get(self._key(arguments))
            if chosen is None:
                return None
            self.latest = chosen
        return self.latest

    def choose(self, arguments: Arguments) -> Chosen:
        """Choose the way of a batch. Nothing moves. All ranks call it.

        Raises:
            MemoryLimitError: none of the candidates fits.
        """
        taken = self._taken(arguments)
        chosen, micro = replace(self._way(taken.options), candidates=taken.candidates), taken.micro
        inputs = self._calls.inputs(chosen.batches(arguments)[0])
        call = chosen.captured.call(inputs, model_state(self._calls.module))
        if not call.known:
            chosen.captured.keep(call, micro)
        self._by_call[self._key(arguments)] = self.latest = chosen
        return chosen

    def _taken(self, arguments: Arguments) -> Taken:
        """Return the cheapest way: from the cache, or by a comparison."""
        way = self._way(_closed(self._options))
        compiler = way.captured.compiler()

        def make(compiler: Compiler) -> Taken:
            ranks, check = compiler.planner.agreement, compiler.check
            return _Comparison(self._calls, self._options, self._way, arguments, ranks, check).best()

        def codec() -> Codec[Taken]:
            inputs = self._calls.inputs(way.batches(arguments)[0])
            call = way.captured.call(inputs, model_state(self._calls.module))
            numbered = replace(compiler, numbers=call.numbers)

            def codec_of(options: StepOptions) -> Codec[CompiledMicro]:
                way = self._way(options)
                own = self._calls.inputs(way.batches(arguments)[0])
                return way.captured.codec_of_choice(numbered, own, call, self._options)

            return codec_of_choice(self._options, way.options, codec_of)

        taken, digest = compiler.once(make, codec)
        micro = replace(taken.micro, reports=(*taken.micro.reports, *taken.reports), digest=digest)
        return replace(taken, micro=micro)

    def _key(self, arguments: Arguments) -> Hashable:
        state = model_state(self._calls.module)
        return self._calls.key(self._calls.inputs(arguments), state)

    def _way(self, options: StepOptions) -> Chosen:
        key = options.microbatches, options.recompute, options.zero
        if key not in self._ways:
            self._ways[key] = self._make(options)
        return self._ways[key]


def _closed(options: StepOptions) -> StepOptions:
    """Return options with the default in the place of open ones."""
    return replace(
        options,
        microbatches=1 if options.microbatches == SEARCH else options.microbatches,
        recompute=None if options.recompute == SEARCH else options.recompute,
        zero=0 if options.zero == SEARCH else options.zero,
        compared=options.opened,
    )


@dataclass
class _Best:
    """The cheapest candidate so far."""

    way: Chosen
    micro: CompiledMicro
    cost: StepCost
    row: int


@dataclass
class _Comparison:
    """Looks at the candidates of a batch one by one.

    Attributes:
        ranks: those that make the same comparison; ``None`` in a process that does it alone.
        check: looks at each capture.
    """

    calls: Calls
    options: StepOptions
    way: Callable[[StepOptions], Chosen]
    arguments: Arguments
    ranks: Agreement | None
    check: Check | None
    rows: list[Candidate] = field(default_factory=list)
    winner: _Best | None = None
    error: MemoryLimitError | None = None
    tables: Tables = field(default_factory=dict)

    def best(self) -> Taken:
        self.began = time.monotonic()
        compiler = self.way(_closed(self.options)).captured.compiler()
        self.planner, self.searched = compiler.planner, compiler.searches
        programs = self._programs()
        self.counts = [count for count, _ in programs]
        for count, recompute in programs:
            self._compare(replace(self.options, microbatches=count, recompute=recompute, compared=self.options.opened))
        if self.winner is None:
            assert self.error is not None
            tried, late = (sum(row.note == note for row in self.rows) for note in (TOO_LARGE, LATE))
            ways = f"none of {tried} ways" if tried > 1 else "the first way" if late else "the only way"
            fits = "fits" if tried > 1 else "does not fit"
            left = f", and {late} more were not searched in the time limit" * bool(late)
            nearest = "; the one that comes nearest" * (tried > 1)
            error = MemoryLimitError(f"{ways} to run the step {fits}{left}{nearest}:\n{self.error}")
            error.least, error.bytes = self.error.least, self.error.bytes
            raise error
        self.rows[self.winner.row] = replace(self.rows[self.winner.row], note=TAKEN)
        return Taken(self.winner.way.options, self._certified(self.winner), tuple(self.rows))

    def _programs(self) -> list[tuple[int, Recompute]]:
        """Return the numbers of micro-batches and the ways to recompute, in the order in which they are tried."""
        options, given = self.options, self.planner.given
        if given is not None and given.step is not None:
            counts: list[int] = [given.step.microbatches]
            ways: list[Recompute] = [given.step.recompute]
        else:
            counts = MicroBatches(self.calls.mesh, 2, self.calls.binding.of_the_batch).counts(self.arguments)
            ways = [*WAYS_TO_RECOMPUTE]
        if options.microbatches != SEARCH:
            counts = [options.count]
        if options.recompute != SEARCH:
            ways = [options.recompute]
        return [(count, way) for count in counts for way in ways]

    def _compare(self, options: StepOptions) -> None:
        """Compare the stages of ZeRO, or the one that is given, of a program."""
        if options.zero != SEARCH:
            self._try(options)
        elif not self.searched:
            for stage in STAGES if self.calls.mesh.size > 1 else STAGES[:1]:
                self._try(replace(options, zero=stage))
        elif not self._try(options):  # the stages are plans of the search, but it has no proof
            least = self.rows[-1].least
            for stage in STAGES:
                self._try(replace(options, zero=stage))
                self.rows[-1] = replace(self.rows[-1], least=max(self.rows[-1].least, least))

    def _try(self, options: StepOptions) -> bool:
        """Try a candidate. Return whether it is proven what its cheapest plan costs, or that it is not cheaper."""
        row = Candidate(options.count, options.recompute, options.zero)
        left = self.planner.time_limit - self._elapsed()
        if left <= 0 and not self._is_last_resort(options, -left):
            self.rows.append(replace(row, note=LATE))
            return True
        way, alike = self.way(options), 0 if self.winner is None else self.winner.cost.alike
        inputs = self.calls.inputs(way.batches(self.arguments)[0])
        call = way.captured.call(inputs, model_state(self.calls.module))
        below = math.inf if self.winner is None else float(self.winner.cost.nanoseconds - alike)
        seconds, same = max(left, self.planner.time_limit / 4), self.options.microbatches == SEARCH
        try:
            made = way.captured.tried(
                inputs, call, below, seconds, self.tables, self.ranks, self.check, same_numbers=same
            )
        except NotCheaper as error:
            self.rows.append(replace(row, least=error.least + alike, note=DEARER))
            return True
        except MemoryLimitError as error:
            self._refuse(error)
            self.rows.append(replace(row, least=error.least, note=TOO_LARGE))
            return False
        except OtherNumbers as error:
            self.rows.append(replace(row, least=math.inf, note=str(error).partition(":")[0]))
            return True
        except ValueError as error:
            note = next((note for words, note in LACKING.items() if str(error).startswith(words)), None)
            if note is None:
                raise
            self.rows.append(replace(row, least=math.inf, note=note))
            return True
        cost = made.cost
        peak = cost.bytes
        self.rows.append(replace(row, nanoseconds=cost.nanoseconds, least=cost.least, bytes=peak))
        limit = self.planner.machine.capacity if self.planner.memory is None else self.planner.memory
        if limit is not None and peak > limit:
            self.rows[-1] = replace(self.rows[-1], note=TOO_LARGE)
            exceeded = MemoryLimitError(
                f"the plan takes {bytes_text(peak)} of a rank, {bytes_text(peak - limit)} more than memory={limit:g} "
                f"allows"
            )
            exceeded.bytes = peak
            self._refuse(exceeded)
        elif self.winner is None or cost.nanoseconds < self.winner.cost.nanoseconds:
            self.winner = _Best(way, made.micro, cost, len(self.rows) - 1)
        return cost.proven

    def _is_last_resort(self, options: StepOptions, late: float) -> bool:
        """Return whether a candidate is tried ``late`` seconds after the limit: nothing fits yet, and it may."""
        if not self.rows:
            return True
        is_smallest = options.count == self.counts[-1]
        return self.winner is None and is_smallest and late < max(self.planner.time_limit, OVERTIME)

    def _refuse(self, error: MemoryLimitError) -> None:
        """Keep the error of the candidate that comes nearest to the limit."""
        if self.error is None or error.bytes < self.error.bytes:
            self.error = error

    def _elapsed(self) -> float:
        """Return the seconds since the beginning, by the clock of the first rank."""
        elapsed = time.monotonic() - self.began
        return elapsed if self.ranks is None else self.ranks.gathered(elapsed)[0]

    def _certified(self, best: _Best) -> CompiledMicro:
        """Return the programs of the winner, with the bound of all candidates."""
        found = best.micro.found
        if found is None:
            return best.micro
        least = min(row.least for row in self.rows) - (0 if found.alike is not None else best.cost.alike)
        if least < found.least:
            reason = found.reason if least > found.least - TOLERANCE else ANOTHER
            found = replace(found, least=max(least, 0.0), reason=reason)
        return replace(best.micro, found=replace(found, search_seconds=self._elapsed()))
