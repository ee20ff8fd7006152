"""Compare Zero Bubble's published bubble rates (ZB-2p) with those of ``optimise(objective="span")``.

The rates are those of the longest span of a rank. Times are the published ones in ms. Memory is as published: each rank
has room for 2p activations; an activation takes 34 h + 5 a s bytes of a token (hidden size h, heads a, sequence 1024),
and what is kept of it for the weight gradient 32 h. Bound: the rate below which no schedule within this memory is;
where found is equal to it, that is proven to be the best.
"""

from __future__ import annotations

import argparse
import sys
import time

from profilers import positive

from autopar.pipeline import Sizes, Times, optimise

LINES = [optimise]
PUBLISHED = (  # model; p, m; F, B, W, c; h, a; ZB-2p
    ("1.5B", 8, 24, (18.522, 18.086, 9.337, 0.601), 2304, 24, 0.0433),
    ("1.5B", 8, 32, (18.513, 18.086, 9.331, 0.626), 2304, 24, 0.0039),
    ("1.5B", 8, 64, (18.546, 18.097, 9.321, 0.762), 2304, 24, 0.0026),
    ("6.2B", 8, 24, (29.718, 29.444, 19.927, 0.527), 4096, 32, 0.0029),
    ("6.2B", 8, 32, (29.802, 29.428, 19.530, 0.577), 4096, 32, 0.0022),
    ("6.2B", 8, 64, (29.935, 29.621, 19.388, 0.535), 4096, 32, 0.0010),
    ("14.6B", 16, 48, (11.347, 11.248, 8.132, 0.377), 5120, 40, 0.0066),
    ("14.6B", 16, 64, (11.307, 11.254, 8.101, 0.379), 5120, 40, 0.0054),
    ("14.6B", 16, 128, (11.325, 11.308, 8.109, 0.378), 5120, 40, 0.0028),
    ("28.3B", 32, 96, (10.419, 10.207, 7.715, 0.408), 6144, 48, 0.0038),
    ("28.3B", 32, 128, (10.408, 10.204, 7.703, 0.408), 6144, 48, 0.0029),
    ("28.3B", 32, 256, (10.402, 10.248, 7.698, 0.460), 6144, 48, 0.0018),
)
SEQUENCE = 1024


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tries", type=positive, default=1000)


def run(options: argparse.Namespace) -> str:
    lines = [
        f"{'model':6}{'p':>4}{'m':>5}{'published':>11}{'found':>9}{'bound':>9}{'best fixed':>12}{'peak':>7}"
        f"{'seconds':>9}"
    ]
    for model, ranks, batches, times, hidden, heads, rate in PUBLISHED:
        print(f"{model}, m = {batches}", file=sys.stderr, flush=True)
        sizes = Sizes(for_weights=32 * hidden / (34 * hidden + 5 * heads * SEQUENCE))
        start = time.process_time()
        found = optimise(
            Times(*times), ranks, batches, sizes=sizes, limit=2 * ranks, tries=options.tries, objective="span"
        )
        seconds, ideal = time.process_time() - start, batches * sum(times[:3])
        assert found.best_fixed is not None
        lines.append(
            f"{model:6}{ranks:4}{batches:5}{rate:11.4f}{found.simulation.span_bubble_rate:9.4f}"
            f"{1 - ideal / found.bound:9.4f}{1 - ideal / found.best_fixed[1]:12.4f}{max(found.simulation.peak):7.2f}"
            f"{seconds:9.1f}"
        )
    return "\n".join(lines)
