"""Decide by policies in which dtype each op runs with mixed precision."""

from autopar.plan.precision.policy import POLICIES, Kind, PrecisionPolicy, policy_of

__all__ = ["POLICIES", "Kind", "PrecisionPolicy", "policy_of"]
