"""Keep entries in a folder: written whole or not at all, checked when they are read, the oldest ones removed.

    FOLDER/v1/<key>/<variant>/about.json       the facts of the key, and the digest of each other file
                              guards.json …

An entry is written beside its place, and renamed. Two jobs that write at once may leave two entries of one key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# -- refused -----------------------------------------------------------------------------------------------------------
#
# Say why something is not kept for other processes.


class NotCached(Exception):
    """It cannot be kept, or compared with what another process has."""


@contextlib.contextmanager
def failures_as_refused() -> Iterator[None]:
    """Raise ``NotCached`` for any error: what looks at the user's objects may fail, and must not end a run."""
    try:
        yield
    except NotCached:
        raise
    except Exception as error:
        raise NotCached(f"{type(error).__name__}: {error}") from error


# -- folder ------------------------------------------------------------------------------------------------------------


VERSION = "v1"
ABOUT = "about.json"
LIMIT = 2 * 10**9  # bytes of all entries; those that were used longest ago are removed
LARGEST = 10**9  # of a file that is read
OLD = 24 * 3600.0  # seconds after which what a killed process has left is removed


class Unusable(Exception):
    """An entry cannot be used; the text says why."""


@dataclass(frozen=True)
class Entry:
    """One entry of a folder.

    Attributes:
        path: its folder.
        about: the facts of its key, as they were written.
        texts: name of a file → its JSON.
    """

    path: Path
    about: Mapping[str, Any]
    texts: Mapping[str, str]


@dataclass(frozen=True)
class Folder:
    """A folder of entries. None of its methods raises an ``OSError``.

    Attributes:
        limit: the most bytes of all entries.
    """

    path: Path
    limit: int = LIMIT

    @property
    def root(self) -> Path:
        return self.path / VERSION

    def why_untrusted(self) -> str:
        """Return why nothing is read from the folder; empty if it is."""
        try:
            about = os.stat(self.path)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"the folder {self.path} cannot be read: {error.strerror}"
        if not stat.S_ISDIR(about.st_mode):
            return f"{self.path} is no folder"
        return ""

    def variants(self, key: str) -> list[Path]:
        """Return the folders of the entries of a key, from the one used last."""
        try:
            found = [Path(each.path) for each in os.scandir(self.root / key) if not each.name.startswith(".")]
            return sorted(found, key=lambda path: path.lstat().st_mtime, reverse=True)
        except OSError:
            return []

    def read(self, path: Path, *, touch: bool = True) -> Entry:
        """Return an entry, checked. ``touch``: it counts as used now.

        Raises:
            Unusable: it is corrupt, of another format, or another user may have written it.
        """
        try:
            self._check_owner(path)
            about = json.loads(self._content(path / ABOUT))
            digests = about["files"]
            if about["digest"] != digest_of(_about_text(about["facts"], digests)):
                raise Unusable(f"{path / ABOUT} is corrupt")
            texts = {}
            for name, digest in digests.items():
                content = self._content(path / name)
                if os.sep in name or digest_of(content) != digest:
                    raise Unusable(f"{path / name} is corrupt")
                texts[name] = content.decode()
        except OSError as error:
            name = error.filename if isinstance(error.filename, str) else path
            raise Unusable(f"{name} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Unusable(f"{path} is corrupt") from None
        if touch:
            with contextlib.suppress(OSError):
                os.utime(path)
        return Entry(path, about["facts"], texts)

    def _check_owner(self, path: Path) -> None:
        """Refuse an entry that is no folder, or that another user wrote where anyone can write."""
        about, whole = os.lstat(path), os.stat(self.path)
        if not stat.S_ISDIR(about.st_mode):
            raise Unusable(f"{path} is no folder")
        own = about.st_uid in (os.getuid(), 0) if hasattr(os, "getuid") else True
        if not own and (whole.st_mode & stat.S_IWOTH or about.st_mode & stat.S_IWOTH):
            raise Unusable(f"another user wrote {path}, and anyone can write into {self.path}")

    def _content(self, path: Path) -> bytes:
        """Return the bytes of a regular file; a link is not followed."""
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(handle, "rb") as file:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode):
                raise Unusable(f"{path} is no file")
            if about.st_size > LARGEST:
                raise Unusable(f"{path} is too large")
            return file.read()

    def remove(self, path: Path) -> None:
        """Remove an entry that cannot be used, so that a good one can take its place."""
        if self.root in path.parents:
            with contextlib.suppress(OSError):
                aside = tempfile.mkdtemp(prefix=".removed-", dir=self.root)
                os.rename(path, Path(aside) / "entry")
                shutil.rmtree(aside, ignore_errors=True)

    def write(self, key: str, facts: Mapping[str, Any], texts: Mapping[str, str]) -> str:
        """Write an entry. Returns why that was not possible; empty if it was, or if there is such an entry.

        Args:
            texts: name of a file → its JSON.
        """
        contents = {name: text.encode() for name, text in texts.items()}
        digests = {name: digest_of(content) for name, content in contents.items()}
        digest = digest_of(_about_text(facts, digests))
        about = {"facts": facts, "files": digests, "digest": digest}
        contents[ABOUT] = json.dumps(about, indent=1).encode()
        aside = ""
        try:
            (self.root / key).mkdir(parents=True, exist_ok=True, mode=0o700)
            aside = tempfile.mkdtemp(prefix=".new-", dir=self.root)
            for name, content in contents.items():
                with open(Path(aside, name), "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            variant = self.root / key / digest[:16]
            if not variant.exists():
                os.rename(aside, variant)
            self.make_room()
        except OSError as error:
            if os.path.exists(self.root / key / digest[:16]):
                return ""  # another job was faster
            return f"{error.strerror or error} ({self.path})"
        finally:
            if aside:
                shutil.rmtree(aside, ignore_errors=True)
        return ""

    # -- the whole folder --------------------------------------------------------------------------------------------

    def entries(self) -> list[Path]:
        """Return the folders of all entries, from the one used last."""
        found: list[tuple[float, Path]] = []
        for key in _inside(self.root):
            for path in [] if key.name.startswith(".") else _inside(key):
                with contextlib.suppress(OSError):
                    found.append((path.lstat().st_mtime, path))
        return [path for _, path in sorted(found, reverse=True)]

    def size(self) -> int:
        """Return the bytes of all entries."""
        return sum(map(size_of, self.entries()))

    def clear(self) -> int:
        """Remove all entries. Returns how many are gone."""
        count = len(self.entries())
        shutil.rmtree(self.root, ignore_errors=True)
        return count - len(self.entries())

    def make_room(self) -> None:
        """Remove the entries that were used longest ago, until the others are within the limit."""
        left = self.limit
        for path in self.entries():
            left -= size_of(path)
            if left < 0:
                self.remove(path)
        for path in _inside(self.root):
            with contextlib.suppress(OSError):
                if path.name.startswith(".") and path.lstat().st_mtime < time.time() - OLD:
                    shutil.rmtree(path, ignore_errors=True)


def size_of(path: Path) -> int:
    """Return the bytes of an entry."""
    total = 0
    for file in _inside(path):
        with contextlib.suppress(OSError):
            total += file.lstat().st_size
    return total


def _inside(path: Path) -> Iterator[Path]:
    try:
        yield from [Path(each.path) for each in os.scandir(path)]
    except OSError:
        return


def _about_text(facts: Mapping[str, Any], digests: Mapping[str, str]) -> bytes:
    return json.dumps([facts, digests], sort_keys=True).encode()


def digest_of(content: bytes) -> str:
    """Return the digest of a file."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def default_folder() -> Path | None:
    """Return the user's cache folder: ``AUTOPAR_CACHE``, or the usual place; ``None`` if it is switched off."""
    if (given := os.environ.get("AUTOPAR_CACHE")) is not None:
        return Path(given).expanduser() if given.strip() else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "autopar"
    except RuntimeError:  # there is no home
        return None


def folder_of(given: str | Path | bool | None) -> Folder | None:
    """Return the folder that ``cache=`` names; ``None`` if it is switched off.

    Raises:
        TypeError: it is no path.
        ValueError: it has a null byte.
    """
    if given is None or given is True:
        path = default_folder()
    elif given is False or (isinstance(given, str) and not given.strip()):
        path = None
    elif isinstance(given, (str, os.PathLike)):
        path = Path(given).expanduser()
    else:
        raise TypeError(f"cache={given!r} is no folder; give a path, or False for no cache")
    if path is not None and "\0" in str(path):
        raise ValueError(f"cache={given!r} has a null byte, and names no folder; give a path")
    return None if path is None else Folder(path.absolute())
