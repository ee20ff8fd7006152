"""The passes, in the order they run: each takes a program of one level and gives one of the same or the next.

``PIPELINE`` is the whole order; capture comes before it, ``localize`` (one program a class of ranks) after it.
"""

from autopar.passes.defer import Defer
from autopar.passes.expand import Expand
from autopar.passes.fold import Fold
from autopar.passes.follow import Follow
from autopar.passes.lift import Lift
from autopar.passes.manager import Pass, run_passes
from autopar.passes.place import Place
from autopar.passes.reshard import Reshard
from autopar.passes.share import Share

PIPELINE: tuple[type[Pass], ...] = (Expand, Place, Follow, Lift, Defer, Reshard, Fold, Share)

__all__ = ["PIPELINE", "Defer", "Expand", "Fold", "Follow", "Lift", "Pass", "Place", "Reshard", "Share", "run_passes"]
