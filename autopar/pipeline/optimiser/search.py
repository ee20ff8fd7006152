"""The search for good orders: rules on a grid, then turned one by one; then single tasks of the critical path moved.

What it finds is a function of its arguments alone: chance comes from a seeded generator and the budget counts runs on paper,
no clock is read. All ranks that ask get the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

from autopar.pipeline.bounds import EPSILON, ways
from autopar.pipeline.optimiser.greedy import Rule, follow
from autopar.pipeline.optimiser.orders import FORWARD, FULL, INPUT, WEIGHT, Order, Orders, Paper

DEPTHS = (0.75, 1.0, 1.25, 1.5, 2.0, 3.0)  # micro-batches under way, over what the rule of thumb says
MOST = (1.0, 1.5, 2.0, inf)  # at most so many times that
LEFT = (0, 2, 10**6)  # weight gradients that wait
GAPS = (0.0, 0.5, 1.0)
MEMORY = 64  # of late acceptance: a move is taken if it is no worse than what was so many moves ago
KEPT = 4  # how many of the best orders found by rules are worked on
MOVES = 10  # for each rule tried
RESERVES = (0, 1, 2, 3, 4, 6, 8, 12)  # boundary tensors for which a rank leaves memory free
REFUSALS = 10  # how often memory may say no to what would be the best, before more of it is left free


@dataclass
class Found:
    """The best orders so far.

    Attributes:
        paper: what orders are run on.
        enough: a makespan that cannot be beaten.
        judge: whether orders are within the limit also with the buffers of messages; asked of those that would be the best.
        refusals: how often it may say no.
        best: the shortest makespan.
        orders: makespan and orders, each better than the one before it.
    """

    paper: Paper
    enough: float = 0.0
    judge: Callable[[Orders], bool] | None = None
    refusals: int = 0
    best: float = inf
    orders: list[tuple[float, Orders]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.best <= self.enough * (1 + EPSILON) or (self.judge is not None and not self.refusals)

    def add(self, span: float, orders: Orders) -> None:
        """Keep orders of this makespan if they are the best."""
        if span < self.best:
            if self.judge is not None and not self.judge(orders):
                self.refusals = max(0, self.refusals - 1)
            else:
                self.best = span
                self.orders.append((span, orders))


def search(paper: Paper, starts: Sequence[Orders], enough: float, judge: Callable[[Orders], bool] | None, tries: int, seed: int) -> Found:
    """The best orders that ``tries`` rules and ``MOVES`` times as many moves find; none where memory does not suffice.

    Args:
        starts: orders within the limit, to be bettered too.
        enough: a lower bound.
        judge: see ``Found``; ``None``: there are no buffers, or there is no limit.
    """
    choose = random.Random(seed)
    found = Found(paper, enough, judge)
    largest = max(paper.cost.boundary, default=0.0)
    best, rule, reserve = inf, None, 0.0
    for times in RESERVES if judge is not None else RESERVES[:1]:
        paper.reserve, found.refusals = times * largest, REFUSALS
        span, one = on_grid(found)
        if one is not None and (found.best < best or rule is None):
            best, rule, reserve = found.best, (span, one), paper.reserve
    paper.reserve, found.refusals = reserve, REFUSALS
    if rule is not None:
        by_turns(found, *rule, tries, choose)
    found.refusals = REFUSALS
    for orders in starts:
        found.add(paper.makespan(orders), orders)
    kept = [orders for _, orders in found.orders[-KEPT:][::-1]]
    for orders in kept:
        found.refusals = REFUSALS
        by_moves(found, orders, MOVES * tries // len(kept), choose)
    return found


def on_grid(found: Found) -> tuple[float, Rule | None]:
    """All rules on the grid; the makespan and the rule of the best of them, within the limit or not."""
    best: tuple[float, Rule | None] = inf, None
    for rule in grid(found.paper):
        if found.done:
            break
        if (made := follow(rule, found.paper.cost, found.paper.batches, found.paper.reserve)) is not None:
            found.add(*made)
            if made[0] < best[0]:
                best = made[0], rule
    return best


def by_turns(found: Found, span: float, rule: Rule, tries: int, choose: random.Random) -> None:
    """A rule changed in one place at a time."""
    for _ in range(tries):
        if found.done:
            return
        changed = turned(rule, choose)
        if (made := follow(changed, found.paper.cost, found.paper.batches, found.paper.reserve)) is not None:
            found.add(*made)
            if made[0] <= span:
                span, rule = made[0], changed


def grid(paper: Paper) -> Iterator[Rule]:
    """Rules in which all ranks go by the same numbers, times what each needs for its messages to come round."""
    cost, way = paper.cost, ways(paper.cost)
    ranks = len(cost.stages_of)
    period = max(sum(cost.forward[s] + cost.backward[s] + cost.weight[s] for s in own) for own in cost.stages_of) or 1.0
    trips = [sum(cost.forward[s] + way.turn[s] + cost.backward[s] for s in own) / period for own in cost.stages_of]
    places = [float(sum(len(cost.rank_of) - s for s in own)) / len(own) for own in cost.stages_of]
    chunked = len(cost.rank_of) > ranks
    for base in (places, trips):
        for depth in DEPTHS:
            ahead = tuple(max(1, ceil(depth * one - EPSILON)) for one in base)
            for most in MOST:
                top = tuple(10**6 if most == inf else max(len(own), ceil(most * one)) for one, own in zip(ahead, cost.stages_of, strict=True))
                for left in LEFT:
                    for gap in GAPS if left else GAPS[:1]:
                        for deep in (True, False) if chunked else (True,):
                            yield Rule(ahead, top, (left,) * ranks, gap, 0.0, deep, True)


def turned(rule: Rule, choose: random.Random) -> Rule:
    rank = choose.randrange(len(rule.ahead))
    kind = choose.randrange(8)
    if kind < 2:
        return rule.with_one("ahead", rank, max(0, rule.ahead[rank] + choose.choice((-2, -1, 1, 2))))
    if kind < 4:
        old = rule.most[rank] if rule.most[rank] < 10**6 else rule.ahead[rank] + 2
        return rule.with_one("most", rank, max(1, old + choose.choice((-1, 1, 2))))
    if kind < 6:
        return rule.with_one("left", rank, choose.choice((0, 1, 2, 3, 4, 6, 10**6)))
    if kind == 6:
        return replace(rule, gap=choose.choice((0.0, 0.25, 0.5, 0.75, 1.0)))
    return replace(rule, patience=choose.choice((0.0, 0.25, 0.5, 1.0)))


def by_moves(found: Found, start: Orders, tries: int, choose: random.Random) -> None:
    """Late acceptance (Burke and Bykov 2017): a task of the critical path is moved to another place of its rank's order."""
    paper = found.paper
    now = [list(order) for order in start]
    span = paper.makespan(now)
    before = [span] * MEMORY
    critical = critical_path(now, paper)
    for count in range(tries):
        if found.done:
            return
        rank, place = critical[choose.randrange(len(critical))]
        order = moved(now[rank], place, choose)
        if order is None or not valid(order, rank, paper):
            continue
        old, now[rank] = now[rank], order
        new = paper.makespan(now)
        if new <= before[count % MEMORY] or new <= span:
            if new < found.best:
                found.add(new, [list(one) for one in now])
            span = new
            critical = critical_path(now, paper)
        else:
            now[rank] = old
        before[count % MEMORY] = min(before[count % MEMORY], span)


def moved(order: Order, place: int, choose: random.Random) -> Order | None:
    """The order with one task elsewhere, mostly near; ``None`` where that is the same."""
    far = 1
    while choose.random() < 0.6:
        far *= 2
    to = place + choose.choice((-1, 1)) * choose.randint(1, far)
    if not 0 <= to < len(order) or order[to] == order[place]:
        return None
    new = order[:place] + order[place + 1 :]
    new.insert(to, order[place])
    return new


def valid(order: Order, rank: int, paper: Paper) -> bool:
    """Each backward has its forward before it, each weight gradient its backward, and all fits."""
    count: dict[int, int] = {}
    for code in order:
        count[code] = n = count.get(code, 0) + 1
        of = code & 3
        if of in (INPUT, FULL):
            if n + count.get(code + (FULL - INPUT if of == INPUT else INPUT - FULL), 0) > count.get(code - of, 0):
                return False
        elif of == WEIGHT and n > count.get(code - 1, 0):
            return False
    return paper.fits(order, rank)


def critical_path(orders: Orders, paper: Paper) -> list[tuple[int, int]]:
    """Rank and place of the tasks of the run just made that end where the next begins, from the last that ends."""
    where: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, order in enumerate(orders):
        count: dict[int, int] = {}
        for place, code in enumerate(order):
            if code & 3 != WEIGHT:
                key = code - 2 if code & 3 == FULL else code
                count[key] = n = count.get(key, -1) + 1
                where[key, n] = rank, place
    rank = max(range(len(orders)), key=lambda one: paper.ends[one][-1])
    place = len(orders[rank]) - 1
    last, found = len(paper.cost.rank_of) - 1, []
    while place >= 0:
        found.append((rank, place))
        if (cause := paper.causes[rank][place]) is None:
            place -= 1
            continue
        code, n = cause
        if code & 3 == FORWARD:
            made = code - 4
        elif code >> 2 == last:
            made = 4 * last + FORWARD
        else:
            made = 4 * (code >> 2) + 4 + INPUT
        rank, place = where[made, n]
    return found


def joined(orders: Orders, paper: Paper) -> Orders:
    """The orders with backwards that are not split, where that costs no time: the weight gradient follows at once, or takes none."""
    span, weight = paper.makespan(orders), paper.cost.weight
    orders = [
        [code + FULL - INPUT if code & 3 == INPUT and not weight[code >> 2] else code for code in order if code & 3 != WEIGHT or weight[code >> 2]]
        for order in orders
    ]
    for rank in range(len(orders)):
        place, left = 0, dict.fromkeys(paper.cost.stages_of[rank], 0)
        while place + 1 < len(order := orders[rank]):
            stage, of = divmod(order[place], 4)
            if of == INPUT and not left[stage] and order[place + 1] == 4 * stage + WEIGHT:
                orders[rank] = [*order[:place], 4 * stage + FULL, *order[place + 2 :]]
                if paper.makespan(orders) > span:
                    orders[rank] = order
                    left[stage] += 1
            elif of in (INPUT, WEIGHT):
                left[stage] += 1 if of == INPUT else -1
            place += 1
    return orders
