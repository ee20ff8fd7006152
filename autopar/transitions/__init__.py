"""Transitions: the sequence of transfers from one Layout to another that brings the worst rank the fewest bytes.

Between splits no search is needed. What a rank needs and does not hold is a lower bound, and one ``redistribute`` (on one
mesh) or one ``send`` and ``recv`` (between two) reaches it; a chain of slices, all-to-alls and gathers is taken where it
reaches it too, as it does wherever no axis has to make room for another. Only two things are chosen: to what splits a
pending value is reduced on the way, and of what splits a pending one is made. Results are cached by content.
"""

from autopar.transitions.plan import cost, transitions
from autopar.transitions.way import TransferStep

__all__ = ["TransferStep", "cost", "transitions"]
