"""A folder of entries: what is read was written whole; what is corrupt, foreign or not trusted is no entry."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from autopar.cache import folder as module
from autopar.cache.folder import ABOUT, Folder, Unusable, default_folder, folder_of, size_of

KEY, FACTS, TEXTS = "a" * 32, {"kind": "call"}, {"made.json": '{"x":1}', "guards.json": "[]"}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "cache")


def only(folder: Folder) -> Path:
    (path,) = folder.entries()
    return path


def test_an_entry_is_read_as_it_was_written(folder: Folder) -> None:
    assert folder.write(KEY, FACTS, TEXTS) == ""
    entry = folder.read(only(folder))
    assert entry.texts == TEXTS and entry.about == FACTS
    assert folder.variants(KEY) == [entry.path]
    assert [path.name for path in folder.root.iterdir()] == [KEY]  # nothing is left beside it


def test_an_entry_that_is_there_stays(folder: Folder) -> None:
    folder.write(KEY, FACTS, TEXTS)
    before = (only(folder) / ABOUT).stat().st_ino
    assert folder.write(KEY, FACTS, TEXTS) == ""
    assert (only(folder) / ABOUT).stat().st_ino == before
    folder.write(KEY, FACTS, {**TEXTS, "made.json": "2"})
    assert len(folder.variants(KEY)) == 2


@pytest.mark.parametrize("name", [ABOUT, *TEXTS])
def test_every_flipped_byte_and_every_truncation_is_found(folder: Folder, name: str) -> None:
    folder.write(KEY, FACTS, TEXTS)
    file = only(folder) / name
    content = file.read_bytes()
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        file.write_bytes(bytes(changed))
        try:
            entry = folder.read(only(folder))
        except Unusable:
            continue
        assert (entry.about, entry.texts) == (FACTS, TEXTS)  # white space of about.json
    for length in range(len(content)):
        file.write_bytes(content[:length])
        with pytest.raises(Unusable):
            folder.read(only(folder))
    file.unlink()
    with pytest.raises(Unusable, match="cannot be read: No such file"):
        folder.read(only(folder))


@pytest.mark.parametrize("content", ["[]", "{}", '{"files": 1, "facts": {}, "digest": ""}', "null", "[" * 100000])
def test_foreign_files_are_no_entries(folder: Folder, content: str) -> None:
    folder.write(KEY, FACTS, TEXTS)
    (only(folder) / ABOUT).write_text(content)
    with pytest.raises(Unusable, match="corrupt"):
        folder.read(only(folder))


def test_a_name_that_leads_out_of_the_entry_is_corrupt(folder: Folder, tmp_path: Path) -> None:
    folder.write(KEY, FACTS, TEXTS)
    (tmp_path / "cache" / "secret").write_text("1")
    texts = {"../../../secret": module.digest_of(b"1")}
    about = {"facts": FACTS, "files": texts, "digest": module.digest_of(module._about_text(FACTS, texts))}
    (only(folder) / ABOUT).write_text(json.dumps(about))
    with pytest.raises(Unusable, match="corrupt"):
        folder.read(only(folder))


def test_links_and_pipes_are_not_read(folder: Folder, tmp_path: Path) -> None:
    folder.write(KEY, FACTS, TEXTS)
    path = only(folder)
    file = path / "made.json"
    (tmp_path / "elsewhere").write_text(TEXTS["made.json"])
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unusable, match="cannot be read"):
        folder.read(path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(Unusable, match="is no file"):
        folder.read(path)
    link = path.with_name("b" * 16)
    link.symlink_to(path)
    with pytest.raises(Unusable, match="is no folder"):
        folder.read(link)


def test_a_loop_of_links_is_a_folder_without_entries(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    folder = Folder(loop)
    assert "cannot be read" in folder.why_untrusted()
    assert folder.entries() == [] and folder.variants(KEY) == []
    assert "loop" in folder.write(KEY, FACTS, TEXTS)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    folder = Folder(tmp_path / "cache")
    assert folder.why_untrusted().endswith("is no folder")
    assert str(folder.path) in folder.write(KEY, FACTS, TEXTS)


def test_entries_of_others_are_trusted_only_where_not_everyone_writes(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write(KEY, FACTS, TEXTS)
    owner = os.lstat(only(folder)).st_uid
    real = os.lstat

    def of_another(path: Any, **kwargs: Any) -> os.stat_result:
        about = list(real(path, **kwargs))
        about[stat.ST_UID] = 12345
        return os.stat_result(about)

    monkeypatch.setattr(os, "lstat", of_another)
    assert folder.read(only(folder)).texts == TEXTS  # a folder of a team
    folder.path.chmod(0o777)
    with pytest.raises(Unusable, match=r"another user wrote .* anyone can write"):
        folder.read(only(folder))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert folder.read(only(folder)).texts == TEXTS
    assert owner != 12345


def test_a_folder_is_for_its_user_alone(folder: Folder) -> None:
    folder.write(KEY, FACTS, TEXTS)
    assert stat.S_IMODE(only(folder).stat().st_mode) == 0o700


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_full_or_closed_disk_is_a_line(folder: Folder, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    assert os.strerror(code) in folder.write(KEY, FACTS, TEXTS)
    monkeypatch.undo()
    assert folder.entries() == []
    assert not folder.root.exists() or all(path.name == KEY for path in folder.root.iterdir())
    assert folder.write(KEY, FACTS, TEXTS) == ""


def test_many_writers_and_readers_at_once(folder: Folder) -> None:
    failed: list[str] = []

    def work(number: int) -> None:
        for k in range(20):
            texts = {**TEXTS, "made.json": json.dumps([k % 3, "x" * 5000])}
            if why := folder.write(KEY, FACTS, texts):
                failed.append(why)
            for path in folder.variants(KEY):
                if json.loads(folder.read(path).texts["made.json"])[1] != "x" * 5000:
                    failed.append("half an entry")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(folder.variants(KEY)) == 3


def test_entries_that_were_used_longest_ago_make_room(tmp_path: Path) -> None:
    folder = Folder(tmp_path, limit=10**9)
    for number in range(4):
        folder.write(f"{number}" * 32, FACTS, TEXTS)
        os.utime(only_of(folder, number), (number + 1, number + 1))
    folder.read(only_of(folder, 0))  # it is used now
    size = size_of(only_of(folder, 0))
    Folder(tmp_path, limit=2 * size + size // 2).make_room()
    assert sorted(path.parent.name[0] for path in folder.entries()) == ["0", "3"]


def only_of(folder: Folder, number: int) -> Path:
    (path,) = folder.variants(f"{number}" * 32)
    return path


def test_what_a_killed_process_left_is_removed_after_a_day(folder: Folder) -> None:
    folder.write(KEY, FACTS, TEXTS)
    left, new = folder.root / ".new-left", folder.root / ".new-new"
    for path in (left, new):
        path.mkdir()
    os.utime(left, (1, 1))
    folder.make_room()
    assert not left.exists() and new.exists() and len(folder.entries()) == 1


def test_only_entries_are_removed(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    folder.write(KEY, FACTS, TEXTS)
    folder.remove(tmp_path / "mine")
    assert (tmp_path / "mine").exists()
    assert folder.size() > 0 and folder.clear() == 1 and folder.size() == 0


def test_the_folder_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "own"))
    assert default_folder() == tmp_path / "own"
    monkeypatch.setenv("AUTOPAR_CACHE", "")
    assert default_folder() is None and folder_of(None) is None
    monkeypatch.delenv("AUTOPAR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder_of(None) == Folder(tmp_path / "autopar") == folder_of(True)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home" / ".cache" / "autopar"
    assert folder_of(False) is None and folder_of("") is None
    assert folder_of("here") == Folder(Path("here").absolute())


def test_what_is_no_folder_is_refused() -> None:
    with pytest.raises(TypeError, match="cache=3 is no folder; give a path, or False for no cache"):
        folder_of(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has a null byte, and names no folder; give a path"):
        folder_of("a\0b")


def test_a_name_that_is_too_long_keeps_nothing(tmp_path: Path) -> None:
    assert Folder(tmp_path / ("a" * 300)).write("k", {}, {}).startswith("File name too long")
