"""Random models on random meshes under random plans: equal to one device, or refused with the reason.

Each case is a model of up to a dozen lines, some with Python attributes that change between calls, run in float64 on
one device and on the simulated ranks: outputs, gradients and buffers agree to 1e-10, or an error names the op or the
value, the user's line and the remedy. ``sensitive`` are those where rounding alone changes the numbers by more; they
agree as far as eager agrees with itself. Then what one rank's collectives send is changed, a few times for each case,
and each change is to be refused. Case k is made by ``random.Random(seed + k)``; those that eager refuses are passed
over. The smallest case of each kind of failure is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections import Counter

import torch
from fuzz_axes import AXES, on_axis
from model_cases import FAILED, Case, Outcome, check
from random_models import random_case
from smaller_cases import smallest

from autopar.runtime.simulation.effects import adding_orders


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="that of the first case")
    parser.add_argument(
        "--mutations",
        type=int,
        default=4,
        help="changes of what one rank's collectives send, each of which is to be refused",
    )
    parser.add_argument("--axis", choices=AXES, help="adds what reports of others were about; sums in random orders")
    parser.add_argument(
        "--shrink", type=float, default=30.0, help="seconds to look for the smallest case of each failure"
    )


def run(options: argparse.Namespace) -> str:
    torch.set_num_threads(1)
    start = time.perf_counter()
    found: list[tuple[int, Case, Outcome]] = []
    passed_over = 0
    seed = options.seed
    while len(found) < options.cases:
        r = random.Random(seed)
        drawn: Case | None = random_case(r)
        if options.axis and drawn is not None:
            drawn = on_axis(options.axis, drawn, r)
        if drawn is None:
            seed += 1
            continue
        case = drawn
        with adding_orders(seed) if options.axis else contextlib.nullcontext():
            outcome = check(case, options.mutations)
        if outcome.kind == "invalid":
            passed_over += 1
        else:
            found.append((seed, case, outcome))
            if len(found) % 250 == 0:
                print(
                    f"{len(found)} cases, {sum(one.kind == FAILED for _, _, one in found)} failed",
                    file=sys.stderr,
                    flush=True,
                )
        seed += 1
    seconds = time.perf_counter() - start
    kinds = Counter(outcome.kind for _, _, outcome in found)
    ops = Counter(op for _, _, outcome in found for op in outcome.ops)
    whole, tried = ({op for _, _, outcome in found for op in getattr(outcome, kind)} for kind in ("whole", "tried"))
    inserted = Counter(name for _, _, outcome in found for name in outcome.transfers)
    meshes = Counter(" ".join(f"{axis}={size}" for axis, size in case.mesh.items()) for _, case, _ in found)
    axes = Counter(len(case.mesh) for _, case, _ in found)
    lines = [
        f"{len(found)} cases in {seconds:.0f} s, {seconds / len(found) * 1e3:.0f} ms each; {passed_over} that eager "
        f"refuses passed over",
        *(f"{kind:10}{kinds[kind]:6}" for kind in ("equal", "sensitive", "refused", FAILED)),
        f"{len(ops)} overloads in {len({op.split('.')[1] for op in ops})} ops, of which {len(tried)} had a rule found "
        f"by running them and {len(whole)} were computed whole",
        f"found by running: {', '.join(sorted(tried)) or 'none'}; computed whole: {', '.join(sorted(whole)) or 'none'}",
        f"transfers in {sum(bool(outcome.transfers) for _, _, outcome in found)} cases: "
        + ", ".join(f"{n} {name}" for name, n in inserted.most_common()),
        f"{len(meshes)} meshes: "
        + ", ".join(f"{count} cases with {n} ax{'es' if n > 1 else 'is'}" for n, count in sorted(axes.items())),
        f"{sum(len(case.lines) for _, case, _ in found) / len(found):.1f} lines a model, "
        f"{sum(len(case.init) for _, case, _ in found) / len(found):.1f} parameters and layers",
    ]
    for kind in ("refused", FAILED):
        by_reason: dict[str, list[tuple[int, Case, Outcome]]] = {}
        for one in found:
            if one[2].kind == kind:
                by_reason.setdefault(one[2].reason, []).append(one)
        if by_reason:
            lines += ["", f"{kind}:"]
        for reason, cases in sorted(by_reason.items(), key=lambda item: -len(item[1])):
            seeds = [str(seed) for seed, _, _ in cases[:4]] + ["…"] * (len(cases) > 4)
            lines.append(f"{len(cases):5}  {reason}  (seeds {', '.join(seeds)})")
            if kind == FAILED:
                case = smallest(cases[0][1], options.shrink)
                lines += ["", case.literal(), "", case.script(), check(case).text, ""]
    return "\n".join(lines) + "\n"
