"""The search for good orders: rules on a grid, then turned one by one; then single tasks of the critical path moved.

What it finds is a function of its arguments alone: chance comes from a seeded generator and the budget counts runs on paper,
no clock is read. All ranks that ask get the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf

from autopar.pipeline.bounds import EPSILON, Costs, ways
from autopar.pipeline.optimiser.greedy import PriorityRule, follow
from autopar.pipeline.optimiser.orders import FORWARD, FULL, INPUT, WEIGHT, Order, Orders, Paper
from autopar.pipeline.optimiser.peaks import Peaks

DEPTHS = (0.75, 1.0, 1.25, 1.5, 2.0, 3.0)  # micro-batches under way, over what the rule of thumb says
MOST = (1.0, 1.5, 2.0, inf)  # at most so many times that
LEFT = (0, 2, 10**6)  # weight gradients that wait
GAPS = (0.0, 0.5, 1.0)
FILLING_GAPS = (0.0, 0.25)
MEMORY = 64  # of late acceptance: a move is taken if it is no worse than what was so many moves ago
KEPT = 4  # how many of the best orders found by rules are worked on
MOVES = 10  # for each rule tried
WORK = 400_000  # tasks: with so many or more, a schedule is tried once; half as many, twice
FRACTIONS = (1.0, 1.5, 2.0)  # of the activations of as many micro-batches as there are ranks: memory that rules are also tried in
ATTEMPTS = 4  # how often a rule is followed in less room, until messages have theirs


@dataclass
class Found:
    """The best orders so far.

    Attributes:
        paper, peaks: what orders are run on, and what tells their memory.
        enough: a length that cannot be beaten.
        best: the shortest length: the makespan, or the longest span of a rank, by the objective.
        orders: length and orders, each better than the one before it.
    """

    paper: Paper
    peaks: Peaks
    enough: float = 0.0
    best: float = inf
    orders: list[tuple[float, Orders]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.best <= self.enough * (1 + EPSILON)

    def add(self, length: float, orders: Orders) -> None:
        """Keep orders within the limit if none so far are as short."""
        if length < self.best:
            self.best = length
            self.orders.append((length, orders))


@dataclass(frozen=True)
class Try:
    """A rule, the room for activations on each rank in which it is within the limit with its messages, and what it makes."""

    rule: PriorityRule
    room: Sequence[float]
    length: float
    orders: Orders


def search(paper: Paper, peaks: Peaks, starts: Sequence[Orders], enough: float, tries: int, seed: int) -> Found:
    """The best orders that ``tries`` rules and ``MOVES`` times as many moves find, fewer of a large schedule; maybe none.

    Args:
        starts: orders to be bettered too, where they are within the limit.
        enough: a lower bound.
    """
    choose = random.Random(seed)
    found = Found(paper, peaks, enough)
    most = max(1, WORK // (3 * paper.batches * len(paper.cost.rank_of)))
    tries = min(tries, most)
    best = None
    for room, part in rooms(paper.cost):
        one = on_grid(found, room, [*filling(paper.cost), *some_of(list(grid(paper)), max(1, most // part))])
        if one is not None and (best is None or one.length < best.length):
            best = one
    if best is not None:
        by_turns(found, best, tries, choose)
    for orders in starts:
        if peaks.within(orders):
            found.add(paper.length(orders), orders)
    kept = [orders for _, orders in found.orders[-KEPT:][::-1]]
    for orders in kept:
        by_moves(found, orders, MOVES * tries // len(kept), choose)
    return found


def rooms(cost: Costs) -> Iterator[tuple[list[float], int]]:
    """Room for activations: all there is, and less, so that more memory is not worse; and what part of the rules is for each."""
    yield cost.room, 1
    for fraction in FRACTIONS:
        batches = floor(fraction * len(cost.stages_of))
        less = [min(room, batches * sum(cost.activation[s] for s in own)) for room, own in zip(cost.room, cost.stages_of, strict=True)]
        if any(a < b * (1 - EPSILON) for a, b in zip(less, cost.room, strict=True)):
            yield [min(room, one * (1 + EPSILON)) for room, one in zip(cost.room, less, strict=True)], 4


def some_of(rules: list[PriorityRule], most: int) -> list[PriorityRule]:
    """All, or as many as that: by chance, and the same at every call, since every other one of a grid may be on one side of it."""
    if len(rules) <= most:
        return rules
    return [rules[i] for i in sorted(random.Random(0).sample(range(len(rules)), most))]


def tried(found: Found, rule: PriorityRule, room: Sequence[float], length: float) -> Try | None:
    """What a rule makes within the limit; ``None`` where that is longer than ``length``.

    By what is too much, the buffers of messages included, there is less room for activations the next time.
    """
    for _ in range(ATTEMPTS):
        made = follow(rule, found.paper.cost, found.paper.batches, room)
        if made is None or made[0] > length:
            return None
        excess = found.peaks.excess(made[1]) if found.peaks.buffers else ()
        if not any(excess):
            return Try(rule, room, *made)
        room = [one - more for one, more in zip(room, excess, strict=True)]
    return None


def on_grid(found: Found, room: Sequence[float], rules: Sequence[PriorityRule]) -> Try | None:
    """The first of the best of some rules."""
    best = None
    for rule in rules:
        if found.done:
            break
        one = tried(found, rule, room, inf if best is None else best.length)
        if one is not None and (best is None or one.length < best.length):
            best = one
            found.add(one.length, one.orders)
    return best


def by_turns(found: Found, best: Try, tries: int, choose: random.Random) -> None:
    """A rule changed in one place at a time; where messages take memory, also what is left for them."""
    largest = max(found.paper.cost.boundary, default=0.0)
    for _ in range(tries):
        if found.done:
            return
        rule, room = best.rule, best.room
        if found.peaks.buffers and choose.random() < 0.2:
            rank = choose.randrange(len(room))
            more = room[rank] + choose.choice((-1, 1, 2)) * largest
            room = [min(more, found.paper.cost.room[rank]) if one == rank else old for one, old in enumerate(room)]
        else:
            rule = turned(rule, choose)
        if (one := tried(found, rule, room, best.length)) is not None:
            best = one
            found.add(one.length, one.orders)


def filling(cost: Costs) -> Iterator[PriorityRule]:
    """Few rules that are always tried: as many forwards under way as a rank has time for before its first backward can come, and
    weight gradients where it would wait."""
    way, ranks = ways(cost), len(cost.stages_of)
    mean = [sum(cost.forward[s] for s in own) / len(own) for own in cost.stages_of]
    until = [sum(cost.forward[s] + cost.transfer[s] for s in range(own[0], own[-1])) + cost.forward[own[-1]] + way.turn[own[-1]] for own in cost.stages_of]
    passes = [ceil(time / each - EPSILON) if each else len(own) for time, each, own in zip(until, mean, cost.stages_of, strict=True)]
    for more in (-1, 0, 1):
        most = tuple(max(len(own), number + more) for number, own in zip(passes, cost.stages_of, strict=True))
        for gap in FILLING_GAPS:
            yield PriorityRule(most, most, (10**6,) * ranks, gap)


def grid(paper: Paper) -> Iterator[PriorityRule]:
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
                            yield PriorityRule(ahead, top, (left,) * ranks, gap, 0.0, deep, True)


def turned(rule: PriorityRule, choose: random.Random) -> PriorityRule:
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
    length = paper.length(now)
    before = [length] * MEMORY
    critical = critical_path(now, paper)
    for count in range(tries):
        if found.done:
            return
        rank, place = critical[choose.randrange(len(critical))]
        order = moved(now[rank], place, choose)
        if order is None or not valid(order, rank, paper):
            continue
        old, now[rank] = now[rank], order
        new = paper.length(now)
        if (new <= before[count % MEMORY] or new <= length) and (not found.peaks.buffers or found.peaks.within(now)):
            found.add(new, [list(one) for one in now])
            length = new
            critical = critical_path(now, paper)
        else:
            now[rank] = old
        before[count % MEMORY] = min(before[count % MEMORY], length)


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
    rank = max(range(len(orders)), key=paper.lengths.__getitem__)
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
    length, weight = paper.length(orders), paper.cost.weight
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
                if paper.length(orders) > length:
                    orders[rank] = order
                    left[stage] += 1
            elif of in (INPUT, WEIGHT):
                left[stage] += 1 if of == INPUT else -1
            place += 1
    return orders
