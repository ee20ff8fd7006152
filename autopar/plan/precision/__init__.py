"""Mixed precision as data: in which dtype each op runs, policy by policy."""

from autopar.plan.precision.policy import POLICIES, Kind, PrecisionPolicy, policy_of

__all__ = ["POLICIES", "Kind", "PrecisionPolicy", "policy_of"]
