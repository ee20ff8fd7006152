"""Compare the calls of this rank with those of the other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from autopar.capture.guards import Guards
from autopar.model.inputs import CallInputs
from autopar.runtime.processes.agreement import Agreement

ALIKE = "let all ranks have the same there, by one seed for example, or draw or read it once and pass it to forward"


class CallAgreement:
    """The ranks agree on each call before its first collective. On one rank there is nothing to agree on.

    Attributes:
        ranks: compares what this rank does with the others; ``None`` on one rank.
    """

    def __init__(self, ranks: Agreement | None) -> None:
        self.ranks = ranks

    def announce(self, call: str, inputs: Sequence[CallInputs] = (), numbers: str = "", remedy: str = "") -> None:
        """Send the other ranks a digest of the call that this rank makes.

        They compare it with theirs before the first collective of the call.

        Args:
            call: a description that is the same on all ranks that make the same call.
            inputs: the inputs of the call, or of all its micro-batches.
            numbers: a description of the numbers that change from call to call.
            remedy: what to do if another rank makes another call; there is a general one.
        """
        if self.ranks is not None:
            self.ranks.begin(
                call + numbers,
                [brought for call_inputs in inputs for brought in call_inputs.brought()],
                call,
                remedy=remedy,
            )

    def wait(self) -> None:
        """Wait for the calls of the other ranks. ``RuntimeError`` if one of them makes another call."""
        if self.ranks is not None:
            self.ranks.finish()

    def compare_programs(self, text: str, guards: Guards) -> None:
        """Check that all ranks captured one program from the same values. All ranks call it.

        ``RuntimeError`` if another rank has captured another program, or its forward has read other values.
        """
        if self.ranks is not None:
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            self.ranks.compare(digest, {guard.place.words: guard.text for guard in guards.entries})
            kept = ", ".join(guards.ran.changed)
            remedy = f'first_values="keep" keeps what each rank has at its first call: {kept}; {ALIKE}' if kept else ""
            self.ranks.begin(f"capture a program with the digest {digest}", remedy=remedy)
            self.ranks.finish()
