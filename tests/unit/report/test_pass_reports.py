"""Reports of passes are found by position and by name."""

from __future__ import annotations

import re

import pytest

from autopar.report.passes import PassReport, Reports


def test_a_pass_is_found_by_its_name() -> None:
    reports = Reports([PassReport(name, 0.0, 0, 0, 0, {}) for name in ("place", "reshard")])
    assert reports["reshard"] is reports[1]
    with pytest.raises(KeyError, match=re.escape("no pass 'nope' has run; there are: place, reshard")):
        reports["nope"]
