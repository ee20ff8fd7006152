"""Define the options of the stages of a pipeline, which several commands have."""

from __future__ import annotations

from autopar.cli.commands.option_table import OptionRow
from autopar.cli.train.options import SCHEDULE
from autopar.pipeline.policies import POLICIES

STAGES = (
    OptionRow(
        "schedule",
        "POLICY",
        f"With an axis pp, the schedule of the pipeline: {', '.join(POLICIES)}.",
        f"{SCHEDULE} with pp",
    ),
    OptionRow("chunks", "NUMBER", "Stages on a rank, where the schedule leaves it open.", "that of the schedule"),
)
