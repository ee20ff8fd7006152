"""Run ``autopar cache``: list what is kept for the next start, or remove it."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from rich.table import Column
from rich.text import Text

from autopar.cache.folder import Folder, Unusable, folder_of, size_of
from autopar.cli.output import OutputOptions, output_of
from autopar.cli.plan.show import table_of
from autopar.cli.status import DONE, status_of
from autopar.cli.train.refused import Refused
from autopar.search.certificate import bytes_text


def listed(given: str | None, options: OutputOptions) -> int:
    """Print the entries of a folder; return the exit status."""

    def follow() -> int:
        folder, output = _folder(given), output_of(options)
        rows = []
        for path in folder.entries():
            with contextlib.suppress(FileNotFoundError):  # another job has removed it
                rows.append(_row(path, folder))
        table = table_of("entry", "of", Column("bytes", justify="right"), Column("used", justify="right"))
        for row in rows:
            table.add_row(*map(Text, (row["entry"], row["of"], bytes_text(row["bytes"]), _ago(row["seconds"]))))
        if rows:
            output.text.print(table)
        total = sum(row["bytes"] for row in rows)
        output.text.print(f"{len(rows)} entries, {bytes_text(total)} of {bytes_text(folder.limit)}, in {folder.path}",
                          soft_wrap=True)  # fmt: skip
        output.give({"folder": str(folder.path), "bytes": total, "limit": folder.limit, "entries": rows})
        return DONE

    return status_of(follow)


def cleared(given: str | None, options: OutputOptions) -> int:
    """Remove the entries of a folder; return the exit status."""

    def follow() -> int:
        folder, output = _folder(given), output_of(options)
        count = folder.clear()
        output.text.print(f"removed {count} entries from {folder.path}", soft_wrap=True)
        output.give({"folder": str(folder.path), "removed": count})
        return DONE

    return status_of(follow)


def _folder(given: str | None) -> Folder:
    folder = folder_of(given)
    if folder is None:
        raise Refused("the cache is switched off, because AUTOPAR_CACHE is empty; name a folder with --cache")
    if why := folder.why_untrusted():
        raise Refused(f"{why}; name another folder with --cache")
    return folder


def _row(path: Any, folder: Folder) -> dict[str, Any]:
    seconds = time.time() - path.lstat().st_mtime
    try:
        kind = str(folder.read(path, touch=False).about.get("kind"))
    except Unusable as error:
        kind = str(error)
    return {"entry": path.parent.name[:12], "of": kind, "bytes": size_of(path), "seconds": round(seconds)}


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
