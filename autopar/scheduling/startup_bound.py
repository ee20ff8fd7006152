"""Bound the seconds of one stream of collectives from below, where each message pays a start-up cost θ.

Collective i is released at head(i), sends for flow(i) seconds, and must end tail(i) before the makespan T. It may be
cut into chunks, and chunks of several collectives may share a message, which takes θ and then the flow of its parts. A
message begins when all of its parts are released. Do not tell collectives apart, and let W be the sum of all flow. Then

* F(t) is the most flow that messages send until t. A message that begins at r sends no more than R(r), the flow of all
  collectives that are released by then. So F(t) = max over heads r <= t of min(R(r), F(r) + max(0, t - r - θ)). It is
  enough that messages begin at heads: one that begins between two heads could begin at the earlier one and send as
  much;
* G(s) is the same backwards, with tails: the most flow of messages that begin at T - s or later.

Take any time t, and the message that is under way at t, if there is one. If it has paid θ by then, cut it at t: the
flow that it sends before t counts in F(t), and the rest is a message that begins at t - θ, pays θ and sends from t on,
with the same end. If it has not, it sends nothing before t, and begins after t - θ. So the flow that is not sent until
t is sent by messages that begin at t - θ or later, and W <= F(t) + G(T - t + θ). This holds for every t:

    T >= max over t of t - θ + (the smallest s with G(s) >= W - F(t))

With θ = 0 it is weaker than Jackson's bound, which tells collectives apart. Jackson's bound leaves out that each
message pays θ, and that the first and the last messages must be small: few collectives are released before the first
ones, and long tails follow the last ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import numpy.typing

Numbers = numpy.typing.NDArray[numpy.float64]

MOST = 512  # heads, or tails; more are rounded down to these, and the bound stays a lower bound
ROUNDING = 1e-12  # of the flow: sums of floats are not exact


def startup_bound(heads: Sequence[float], flows: Sequence[float], tails: Sequence[float], startup: float) -> float:
    """Return a lower bound of the seconds of all schedules of these collectives on one stream; 0 without collectives.

    Args:
        heads, flows, tails: seconds of each collective.
        startup: θ, the least seconds that a message pays.
    """
    flow = numpy.asarray(flows, float)
    whole = float(flow.sum())
    if not whole:
        return 0.0
    before, after = _Sent(numpy.asarray(heads, float), flow, startup), _Sent(numpy.asarray(tails, float), flow, startup)
    longest = 0.0
    for time in numpy.concatenate([before.begins, before.begins + startup, before.grows()]):
        left = whole - before.until(time)
        if left > ROUNDING * whole:
            longest = max(longest, float(time) - startup + after.needs(left))
    return longest


class _Sent:
    """The most flow that messages send until a time: F, or G with tails.

    Attributes:
        begins: the times at which messages may begin, ascending.
        released: for each of them, the flow of all collectives that are released by then.
        sent: for each of them, the most flow that has been sent.
    """

    def __init__(self, times: Numbers, flow: Numbers, startup: float) -> None:
        self.startup = startup
        self.begins, which = numpy.unique(times, return_inverse=True)
        if len(self.begins) > MOST:
            kept = numpy.linspace(0, len(self.begins) - 1, MOST).astype(int)
            which = numpy.searchsorted(kept, which, side="right") - 1
            self.begins = self.begins[kept]
        self.released = numpy.bincount(which, weights=flow, minlength=len(self.begins)).cumsum()
        self.sent = numpy.zeros(len(self.begins))
        for k in range(1, len(self.begins)):
            self.sent[k] = max(self.sent[k - 1], self._until(self.begins[k], k))

    def _until(self, time: float, count: int) -> float:
        """Return the most flow that is sent until a time by messages that begin at the first ``count`` begins."""
        grown = self.sent[:count] + numpy.maximum(0.0, time - self.begins[:count] - self.startup)
        return float(numpy.minimum(self.released[:count], grown).max(initial=0.0))

    def until(self, time: float) -> float:
        """Return the most flow that is sent until a time."""
        return self._until(time, int(numpy.searchsorted(self.begins, time, side="right")))

    def grows(self) -> Numbers:
        """Return for each begin but the first when a message from it has sent more than all that was released before.

        F may be flat until then.
        """
        return self.begins[1:] + self.startup + numpy.maximum(0.0, self.released[:-1] - self.sent[1:])

    def needs(self, flow: float) -> float:
        """Return the earliest time until which so much flow can be sent."""
        rounded = flow - ROUNDING * self.released[-1]  # a small rest of large sums has their rounding
        can = (self.released >= rounded) & (self.sent < flow)
        return float((self.begins[can] + self.startup + flow - self.sent[can]).min(initial=numpy.inf))
