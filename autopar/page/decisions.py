"""Sort the notes of all passes by what they say: what was refused, computed whole, discovered, or decided."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autopar.report.passes import Reports

TOPICS = (  # topic, and the words of its notes; the first that fits
    ("refused or left out", r"refus|not planned|cannot|left out|not supported|is not checked|were not|no recapture"),
    ("computed whole", r"\bwhole\b|splits nothing|same work|all ranks|every rank"),
    ("discovered", r"discover|found by|proven|had no rule|rule was found"),
    ("decided for you", r""),
)


def decisions(reports: Reports, notes: Sequence[str]) -> list[dict[str, object]]:
    """Return for each topic that has notes: ``topic``, and ``notes`` as pairs of the pass and the sentence."""
    found: dict[str, list[tuple[str, str]]] = {topic: [] for topic, _ in TOPICS}
    said = [(report.name, note) for report in reports for note in report.notes] + [("", note) for note in notes]
    for name, note in dict.fromkeys(said):
        topic = next(topic for topic, words in TOPICS if re.search(words, note))
        found[topic].append((name, note))
    return [{"topic": topic, "notes": rows} for topic, rows in found.items() if rows]
