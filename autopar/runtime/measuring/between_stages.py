"""Make messages between the stages of a pipeline ready to be timed: there and back, of which half counts.

rank 0                       rank 1
send 32,768 bytes     →      receive
receive               ←      send 32,768 bytes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from autopar.runtime.lowering.point_to_point import MessageEnd, start
from autopar.runtime.measuring.clock import Call

TAG = 1  # no other message is under way while calls are timed


@dataclass(frozen=True)
class BetweenStages:
    """The messages of one pass between two neighbouring stages, of all their ranks.

    Attributes:
        call: the messages, as text.
        price: their seconds by the machine's figures.
        times: phase → how often a step sends them.
        sends: rank → receiver → bytes.
    """

    call: str
    price: float
    times: Mapping[str, int]
    sends: Mapping[int, Mapping[int, int]] = field(repr=False)

    def ready(self, rank: int, device: torch.device) -> Call:
        """Return a rank's part of the messages there and back; all ranks call it together."""
        sent = self._memory(self.sends.get(rank, {}), device)
        received = self._memory({other: to[rank] for other, to in self.sends.items() if rank in to}, device)
        there = [MessageEnd(True, *end) for end in sent.items()] + [MessageEnd(False, *end) for end in received.items()]
        back = [MessageEnd(not message.is_send, *message[1:]) for message in there]

        def call() -> None:
            for messages in (there, back):
                if messages:
                    start(messages, tag=TAG).wait()

        return call

    @staticmethod
    def _memory(bytes: Mapping[int, int], device: torch.device) -> dict[int, torch.Tensor]:
        return {other: torch.zeros(size, dtype=torch.uint8, device=device) for other, size in bytes.items()}
