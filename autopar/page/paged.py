"""Give a call or a step its page and its figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.costs.machine import Machine
from autopar.errors import shown
from autopar.notebook import as_html
from autopar.page.figures import figures_of
from autopar.page.in_notebook import modules_as_html
from autopar.page.subject import Alternative, Subject
from autopar.page.write import write_page
from autopar.search.solutions.tables import Explanation


class Paged:
    """What has a page; a subclass says what is on it."""

    def page_subject(self, machine: Machine | str | Path | None = None) -> Subject:
        """Return what the page shows, as data."""
        raise NotImplementedError

    def page(
        self, path: str | os.PathLike[str], *, machine: Machine | str | Path | None = None,
        alternatives: Sequence[Alternative] = (), explained: Sequence[Explanation] = (), timeline: Any = None,
    ) -> None:  # fmt: skip
        """Write one HTML file that shows the plan, its transfers, its memory and its timeline; it needs no network.

            step.capture(batch)
            step.page("step.html")

        Args:
            machine: a machine, its name, or its file, whose seconds are shown; by default that of the plan.
            alternatives: other plans whose prices stand beside this one.
            explained: what each layout of some values would cost, as ``solution.explain("lm_head.weight")`` returns it.
                Each takes about as long as the search.
            timeline: what ``step.timeline(batch)`` returned, to show what ran below what was computed.

        Raises:
            RuntimeError: nothing has been captured yet.
            FileNotFoundError, IsADirectoryError: the file cannot be written there.
            TypeError: an option is something else.
        """
        _check("alternatives", alternatives, Alternative, 'autopar.page.Alternative("megatron", seconds)')
        _check("explained", explained, Explanation, 'solution.explain("lm_head.weight")')
        if timeline is not None and not hasattr(timeline, "recorded"):
            raise TypeError(f"timeline={shown(timeline)} is no timeline; give what step.timeline(batch) returned")
        subject = replace(self.page_subject(machine), alternatives=tuple(alternatives), explained=tuple(explained))
        if timeline is not None:
            subject = replace(subject, recorded=timeline.recorded)
        write_page(subject, path)

    def _repr_html_(self) -> str:
        try:
            subject = self.page_subject()
        except RuntimeError:  # nothing has been captured yet
            return as_html(repr(self))
        return modules_as_html(subject)

    def figures(self, machine: Machine | str | Path | None = None) -> dict[str, Any]:
        """Return the figures of the page as data that JSON can hold.

        The keys are ``title seconds bound gap memory transfers modules machine``. Times are in seconds, sizes in bytes.

        Raises:
            RuntimeError: nothing has been captured yet.
        """
        return figures_of(self.page_subject(machine))


def _check(name: str, given: object, kind: type, example: str) -> None:
    """Raise ``TypeError`` if an option is no sequence of such objects."""
    if not isinstance(given, Sequence) or not all(isinstance(each, kind) for each in given):
        raise TypeError(f"{name}={shown(given)} is no list of what {example} gives")
