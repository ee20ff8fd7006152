"""Say what each rank runs and in which order, as data: programs, stage by stage and micro-batch by micro-batch."""

from autopar.timetable.entry import Entry
from autopar.timetable.timetable import Position, Timetable

__all__ = ["Entry", "Position", "Timetable"]
