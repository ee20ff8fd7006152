"""Write and read schedules as text: a table, JSON, and the actions of torch.distributed.pipelining."""

from autopar.pipeline.formats.actions import from_csv, to_csv
from autopar.pipeline.formats.document import from_json, to_json
from autopar.pipeline.formats.table import table

__all__ = ["from_csv", "from_json", "table", "to_csv", "to_json"]
