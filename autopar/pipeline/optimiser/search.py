"""Search for good orders: try rules on a grid, vary the best rule, then move single tasks of the critical path.

The result depends only on the arguments: random choices come from a seeded generator, and the budget counts runs, not
time. So all ranks that search get the same result.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf

from autopar.pipeline.bounds import EPSILON, Costs, load, shortest_times
from autopar.pipeline.optimiser.greedy import PriorityRule, follow
from autopar.pipeline.optimiser.orders import FORWARD, FULL, INPUT, WEIGHT, Order, Orders, Paper
from autopar.pipeline.optimiser.peaks import Peaks

DEPTHS = (0.75, 1.0, 1.25, 1.5, 2.0, 3.0)  # micro-batches in flight, as multiples of the rule of thumb
MOST = (1.0, 1.5, 2.0, inf)  # the most micro-batches in flight, as multiples of that
LEFT = (0, 2, 10**6)  # weight gradients that may wait
GAPS = (0.0, 0.5, 1.0)
FILLING_GAPS = (0.0, 0.25)
MEMORY = 64  # of late acceptance: a move is accepted if the result is no longer than so many moves ago
KEPT = 4  # how many of the best orders found by rules are improved by moves
MOVES = 10  # moves for each rule tried
WORK = 400_000  # a schedule of so many tasks or more is tried once; one of half as many, twice
# rules are also tried with less memory: for the activations of so many micro-batches per rank
FRACTIONS = (1.0, 1.5, 2.0)
ATTEMPTS = 4  # how often a rule is followed with less room, until its messages fit


@dataclass
class BestOrders:
    """The best orders so far.

    Attributes:
        paper, peaks: they run orders, and compute their memory.
        enough: a length that cannot be beaten.
        best: the shortest length: the makespan, or the longest span of a rank, by the objective.
        orders: lengths and orders, each better than the one before it.
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
        """Add orders within the limit, if they are shorter than all before."""
        if length < self.best:
            self.best = length
            self.orders.append((length, orders))


@dataclass(frozen=True)
class RuleResult:
    """The result of following a rule: the length and the orders.

    Attributes:
        room: the room for activations on each rank, with which the rule keeps the limit including buffers of messages.
        length: the makespan, or the longest span of a rank, by the objective.
    """

    rule: PriorityRule
    room: Sequence[float]
    length: float
    orders: Orders


def search(paper: Paper, peaks: Peaks, starts: Sequence[Orders], enough: float, tries: int, seed: int) -> BestOrders:
    """Return the best orders found by ``tries`` rules and ``MOVES`` times as many moves; maybe none.

    There are fewer moves for a large schedule.

    Args:
        starts: orders to be improved too, if they are within the limit.
        enough: a lower bound.
    """
    choose = random.Random(seed)
    best_orders = BestOrders(paper, peaks, enough)
    most = max(1, WORK // (3 * paper.batches * len(paper.cost.rank_of)))
    tries = min(tries, most)
    best = None
    for room, part in activation_rooms(paper.cost):
        attempt = best_of_rules(
            best_orders,
            room,
            [*filling_rules(paper.cost), *sample_rules(list(grid_rules(paper.cost)), max(1, most // part))],
        )
        if attempt is not None and (best is None or attempt.length < best.length):
            best = attempt
    if best is not None:
        vary_rule(best_orders, best, tries, choose)
    for orders in starts:
        if peaks.within(orders):
            best_orders.add(paper.length(orders), orders)
    improved = [orders for _, orders in best_orders.orders[-KEPT:][::-1]]
    for orders in improved:
        improve_by_moves(best_orders, orders, MOVES * tries // len(improved), choose)
    return best_orders


def activation_rooms(cost: Costs) -> Iterator[tuple[list[float], int]]:
    """Yield rooms for activations, from all memory to less, and the share of rules to try for each.

    More memory never gives a worse result.
    """
    yield cost.room, 1
    for fraction in FRACTIONS:
        batches = floor(fraction * len(cost.stages_of))
        less = [
            min(room, batches * sum(cost.activation[s] for s in rank_stages))
            for room, rank_stages in zip(cost.room, cost.stages_of, strict=True)
        ]
        if any(a < b * (1 - EPSILON) for a, b in zip(less, cost.room, strict=True)):
            yield [min(room, smaller * (1 + EPSILON)) for room, smaller in zip(cost.room, less, strict=True)], 4


def sample_rules(rules: list[PriorityRule], most: int) -> list[PriorityRule]:
    """Return all rules, or a random sample of ``most``, the same at every call.

    Every other rule of a grid might be one-sided.
    """
    if len(rules) <= most:
        return rules
    return [rules[i] for i in sorted(random.Random(0).sample(range(len(rules)), most))]


def try_rule(best_orders: BestOrders, rule: PriorityRule, room: Sequence[float], length: float) -> RuleResult | None:
    """Follow a rule and return its result within the limit; ``None`` if it is longer than ``length``.

    If memory with the buffers of messages exceeds the limit, the next attempt has less room for activations.
    """
    for _ in range(ATTEMPTS):
        followed = follow(rule, best_orders.paper.cost, best_orders.paper.batches, room)
        if followed is None or followed[0] > length:
            return None
        excess = best_orders.peaks.excess(followed[1]) if best_orders.peaks.buffers else ()
        if not any(excess):
            return RuleResult(rule, room, *followed)
        room = [available - more for available, more in zip(room, excess, strict=True)]
    return None


def best_of_rules(best_orders: BestOrders, room: Sequence[float], rules: Sequence[PriorityRule]) -> RuleResult | None:
    """Return the first of the best of some rules."""
    best = None
    for rule in rules:
        if best_orders.done:
            break
        attempt = try_rule(best_orders, rule, room, inf if best is None else best.length)
        if attempt is not None and (best is None or attempt.length < best.length):
            best = attempt
            best_orders.add(attempt.length, attempt.orders)
    return best


def vary_rule(best_orders: BestOrders, best: RuleResult, tries: int, choose: random.Random) -> None:
    """Change a rule in one place at a time; if messages use memory, also change the room that is left for them."""
    largest = max(best_orders.paper.cost.boundary, default=0.0)
    for _ in range(tries):
        if best_orders.done:
            return
        rule, room = best.rule, best.room
        if best_orders.peaks.buffers and choose.random() < 0.2:
            rank = choose.randrange(len(room))
            more = room[rank] + choose.choice((-1, 1, 2)) * largest
            room = [*room[:rank], min(more, best_orders.paper.cost.room[rank]), *room[rank + 1 :]]
        else:
            rule = changed_rule(rule, choose)
        if (attempt := try_rule(best_orders, rule, room, best.length)) is not None:
            best = attempt
            best_orders.add(attempt.length, attempt.orders)


def filling_rules(cost: Costs) -> Iterator[PriorityRule]:
    """Yield a few rules that are always tried, because they fill the time before the first backward.

    A rank has as many forwards in flight as fit before its first backward can arrive, and computes weight gradients
    where it would wait.
    """
    shortest = shortest_times(cost)
    chunks, passes = [len(stages) for stages in cost.stages_of], []
    for stages in cost.stages_of:
        first, last = stages[0], stages[-1]
        mean = sum(cost.forward[s] for s in stages) / len(stages)
        until = sum(cost.forward[s] + cost.transfer[s] for s in range(first, last))
        until = until + cost.forward[last] + shortest.turn[last]
        passes.append(ceil(until / mean - EPSILON) if mean else len(stages))
    for more in (-1, 0, 1):
        most = tuple(max(least, number + more) for least, number in zip(chunks, passes, strict=True))
        for gap in FILLING_GAPS:
            yield PriorityRule(most, most, (10**6,) * len(chunks), gap)


def grid_rules(cost: Costs) -> Iterator[PriorityRule]:
    """Yield rules in which all ranks use the same numbers, as multiples of the number each rank needs.

    A rank needs as many as keep it busy until its messages come back.
    """
    shortest = shortest_times(cost)
    stages, ranks = len(cost.rank_of), len(cost.stages_of)
    period = max(load(cost, rank_stages, 1) for rank_stages in cost.stages_of) or 1.0
    trips = [sum(shortest.trip[s] for s in rank_stages) / period for rank_stages in cost.stages_of]
    places = [float(sum(stages - s for s in rank_stages)) / len(rank_stages) for rank_stages in cost.stages_of]
    for base in (places, trips):
        for depth in DEPTHS:
            ahead = tuple(max(1, ceil(depth * number - EPSILON)) for number in base)
            for most in MOST:
                top = tuple(
                    10**6 if most == inf else max(len(own), ceil(most * number))
                    for number, own in zip(ahead, cost.stages_of, strict=True)
                )
                for left in LEFT:
                    for gap in GAPS if left else GAPS[:1]:
                        for deep in (True, False) if stages > ranks else (True,):
                            yield PriorityRule(ahead, top, (left,) * ranks, gap, 0.0, deep, True)


def changed_rule(rule: PriorityRule, choose: random.Random) -> PriorityRule:
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


def improve_by_moves(best_orders: BestOrders, start: Orders, tries: int, choose: random.Random) -> None:
    """Improve orders by late acceptance: move a task of the critical path within its rank's order.

    Late acceptance: Burke and Bykov 2017.
    """
    paper = best_orders.paper
    now = [list(order) for order in start]
    length = paper.length(now)
    before = [length] * MEMORY
    critical = critical_path(now, paper)
    for count in range(tries):
        if best_orders.done:
            return
        rank, place = critical[choose.randrange(len(critical))]
        order = with_task_moved(now[rank], place, choose)
        if order is None or not (is_valid(order) and best_orders.peaks.fits(order, rank)):
            continue
        old, now[rank] = now[rank], order
        new = paper.length(now)
        if (new <= before[count % MEMORY] or new <= length) and (
            not best_orders.peaks.buffers or best_orders.peaks.within(now)
        ):
            best_orders.add(new, [list(order) for order in now])
            length = new
            critical = critical_path(now, paper)
        else:
            now[rank] = old
        before[count % MEMORY] = min(before[count % MEMORY], length)


def with_task_moved(order: Order, place: int, choose: random.Random) -> Order | None:
    """Return the order with one task moved, mostly to a near place; ``None`` if nothing changes."""
    far = 1
    while choose.random() < 0.6:
        far *= 2
    to = place + choose.choice((-1, 1)) * choose.randint(1, far)
    if not 0 <= to < len(order) or order[to] == order[place]:
        return None
    new = order[:place] + order[place + 1 :]
    new.insert(to, order[place])
    return new


def is_valid(order: Order) -> bool:
    """Return whether an order is valid.

    Each backward comes after its forward, and each weight gradient after its backward.
    """
    count: dict[int, int] = {}
    for code in order:
        count[code] = n = count.get(code, 0) + 1
        kind = code & 3
        if kind in (INPUT, FULL):
            if n + count.get(code + (FULL - INPUT if kind == INPUT else INPUT - FULL), 0) > count.get(code - kind, 0):
                return False
        elif kind == WEIGHT and n > count.get(code - 1, 0):
            return False
    return True


def critical_path(orders: Orders, paper: Paper) -> list[tuple[int, int]]:
    """Return (rank, place) of the tasks on the critical path of the last run, from the last to the first.

    Each of them ends when the next one begins.
    """
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
    last, path = len(paper.cost.rank_of) - 1, []
    while place >= 0:
        path.append((rank, place))
        if (cause := paper.causes[rank][place]) is None:
            place -= 1
            continue
        code, n = cause
        if code & 3 == FORWARD:
            source = code - 4
        elif code >> 2 == last:
            source = 4 * last + FORWARD
        else:
            source = 4 * (code >> 2) + 4 + INPUT
        rank, place = where[source, n]
    return path


def with_joined_backwards(orders: Orders, paper: Paper) -> Orders:
    """Return orders with unsplit backwards, if that costs no time.

    The weight gradient then follows its backward at once, or takes no time.
    """
    length, weight = paper.length(orders), paper.cost.weight
    orders = [
        [
            code + FULL - INPUT if code & 3 == INPUT and not weight[code >> 2] else code
            for code in order
            if code & 3 != WEIGHT or weight[code >> 2]
        ]
        for order in orders
    ]
    for rank in range(len(orders)):
        place, left = 0, dict.fromkeys(paper.cost.stages_of[rank], 0)
        while place + 1 < len(order := orders[rank]):
            stage, kind = divmod(order[place], 4)
            if kind == INPUT and not left[stage] and order[place + 1] == 4 * stage + WEIGHT:
                orders[rank] = [*order[:place], 4 * stage + FULL, *order[place + 2 :]]
                if paper.length(orders) > length:
                    orders[rank] = order
                    left[stage] += 1
            elif kind in (INPUT, WEIGHT):
                left[stage] += 1 if kind == INPUT else -1
            place += 1
    return orders
