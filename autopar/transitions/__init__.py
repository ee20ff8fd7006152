"""Find the sequence of transfers from one Layout to another that brings the worst rank the fewest bytes.

Between splits no search is needed. What a rank needs and does not hold is a lower bound, and one ``redistribute`` (on
one mesh) or one ``send`` and ``recv`` (between two meshes) reaches it. A chain of slices, all-to-alls and gathers is
preferred if it reaches the bound too, which it does unless one axis has to make room for another. Only two things are
searched: the splits to which a pending value is reduced first, and the splits from which a new pending value is made.
Results are cached by content.
"""

from autopar.transitions.chain import TransferStep
from autopar.transitions.plan import cost, duration, price, transitions

__all__ = ["TransferStep", "cost", "duration", "price", "transitions"]
