"""Storage keeps objects whole or not at all, and does not take somebody's word for it that they are gone."""

import errno
import os
import re
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem

import unlearnd
from unlearnd.audit import audit
from unlearnd.cli import main
from unlearnd.errors import NotFoundError, RefusedError, StorageError
from unlearnd.storage import Storage


@pytest.fixture
def local(tmp_path: Path) -> Storage:
    storage = Storage(str(tmp_path / "root"))
    storage.create()
    return storage


@pytest.fixture
def memory() -> Iterator[Storage]:
    """A storage that is not a disk: `memory://` stands for everything over a network."""
    # It is shared process-wide, so each test has a root of its own there.
    root = f"memory://unlearnd-{uuid.uuid4().hex}"
    storage = Storage(root)
    storage.create()
    yield storage
    for path in [path for path in MemoryFileSystem.store if path.startswith(root.removeprefix("memory:/"))]:
        del MemoryFileSystem.store[path]


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest) -> Storage:
    """One of each."""
    made: Storage = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 kB, where this machine lets us mount one."""
    where = tmp_path / "disk"
    where.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", where], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a disk")
    yield where
    subprocess.run(["umount", where], check=True)


def test_what_is_written_is_read_again(storage: Storage) -> None:
    storage.write("a/b/c.bin", b"one")
    assert storage.read("a/b/c.bin") == b"one"
    storage.write("a/b/c.bin", b"two, longer")
    assert storage.read("a/b/c.bin") == b"two, longer"
    storage.write("a/empty", b"")
    assert storage.read("a/empty") == b""
    assert storage.list("a") == ["a/b/c.bin", "a/empty"]


def test_many_are_all_there_when_it_returns(storage: Storage) -> None:
    objects = {f"many/{number:03d}": bytes([number]) * number for number in range(100)}
    storage.write_many((name, [data]) for name, data in objects.items())
    assert {name: storage.read(name) for name in storage.list("many")} == objects


def test_reading_what_is_not_there_is_a_not_found_that_names_it(storage: Storage) -> None:
    with pytest.raises(NotFoundError, match="a/missing"):
        storage.read("a/missing")


def test_listing_a_folder_that_is_not_there_finds_nothing(storage: Storage) -> None:
    assert storage.list("nowhere") == []


def test_a_listing_is_of_the_folder_and_not_of_all_that_begin_like_it(storage: Storage) -> None:
    for name in ("m/1/a", "m/10/b", "m/1x", "mm/1/c"):
        storage.write(name, b"x")
    assert storage.list("m/1") == ["m/1/a"]
    assert storage.list("m") == ["m/1/a", "m/10/b", "m/1x"]


def test_destroying_takes_exactly_what_was_named(storage: Storage) -> None:
    for name in ("m/1/a", "m/1/b", "m/2/a"):
        storage.write(name, b"x")
    storage.destroy(["m/1/a", "m/1/never", "nowhere/at/all"])
    assert storage.list("m") == ["m/1/b", "m/2/a"]
    storage.destroy(name for name in ["m/1/b", "m/2/a"])
    assert storage.list("m") == []
    storage.destroy([])


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/etc/passwd", "..", "a/../.."])
def test_a_name_never_leads_out_of_the_root(storage: Storage, tmp_path: Path, name: str) -> None:
    (tmp_path / "out").write_text("not yours")
    does: list[Callable[[], object]] = [
        lambda: storage.write(name, b"x"),
        lambda: storage.read(name),
        lambda: storage.list(name),
        lambda: storage.destroy([name]),
    ]
    for call in does:
        with pytest.raises(StorageError, match="out of the storage root"):
            call()
    assert (tmp_path / "out").read_text() == "not yours"


def test_a_root_that_another_begins_like_is_not_its_inside(tmp_path: Path) -> None:
    (tmp_path / "rooted").mkdir()
    (tmp_path / "root").mkdir()
    with pytest.raises(StorageError, match="out of the storage root"):
        Storage(str(tmp_path / "root")).write("../rooted/x", b"x")


def test_a_local_object_is_for_its_owner_alone(local: Storage, tmp_path: Path) -> None:
    local.write("a/b", b"x")
    for path in (tmp_path / "root", tmp_path / "root" / "a", tmp_path / "root" / "a" / "b"):
        assert path.stat().st_mode & 0o077 == 0


def test_a_write_that_fails_leaves_what_was_there_and_no_part_of_the_new(small_disk: Path) -> None:
    storage = Storage(str(small_disk / "root"))
    storage.create()
    storage.write("a/b", b"before")
    with pytest.raises(StorageError, match="a/b: the disk is full") as caught:
        storage.write("a/b", b"x" * 1_000_000)
    assert isinstance(caught.value.__cause__, OSError)
    assert storage.list("a") == ["a/b"]
    assert storage.read("a/b") == b"before"
    with pytest.raises(StorageError, match="the disk is full"):
        storage.write_many([("c/1", [b"x"]), ("c/2", [b"x" * 1_000_000])])
    assert [path.name for path in (small_disk / "root").rglob("*") if path.is_file() and "part" in path.name] == []


def test_one_failure_among_many_writes_is_told(local: Storage, tmp_path: Path) -> None:
    (tmp_path / "root" / "taken").mkdir()
    (tmp_path / "root" / "taken" / "inside").write_text("")
    with pytest.raises(StorageError, match="taken"):
        local.write_many([(name, [b"x"]) for name in ("fine", "taken", "fine too")])


def test_one_failure_among_many_at_a_time_is_told_by_its_name_and_leaves_no_part(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(str(small_disk / "root"))
    storage.create()
    # The disk has no room for so many that they would be written side by side by themselves.
    monkeypatch.setattr("unlearnd.storage.disk._MANY", 8)
    objects = {"many/large": [b"x" * 1_000_000]} | {f"many/{number:03d}": [b"x"] for number in range(20)}
    with pytest.raises(StorageError, match="many/large: the disk is full"):
        storage.write_many(objects.items())
    assert storage.list("many") == []


def test_several_folders_are_listed_as_one_by_one(storage: Storage) -> None:
    for name in ("a/1", "a/2", "b/1", "ab/1"):
        storage.write(name, b"x")
    assert storage.list_many(["a", "b", "c"]) == [["a/1", "a/2"], ["b/1"], []]
    assert storage.list_many([]) == []


def test_a_reader_never_sees_half_an_object(local: Storage) -> None:
    old, new = b"a" * 2_000_000, b"b" * 2_000_000
    local.write("x", old)
    stop, seen = threading.Event(), set()

    def look() -> None:
        while not stop.is_set():
            seen.add(local.read("x"))

    reader = threading.Thread(target=look)
    reader.start()
    for turn in range(20):
        local.write("x", new if turn % 2 else old)
    stop.set()
    reader.join()
    assert seen <= {old, new}


def test_what_a_killed_writer_left_is_listed_and_can_be_destroyed(local: Storage, tmp_path: Path) -> None:
    local.write("a/b", b"x")
    left = tmp_path / "root" / "a" / ".c.0123abcd.part"
    left.write_bytes(b"half")
    assert local.list("a") == ["a/.c.0123abcd.part", "a/b"]
    local.destroy(["a/.c.0123abcd.part"])
    assert not left.exists()


def test_destroying_says_so_when_something_is_still_there(local: Storage, tmp_path: Path) -> None:
    # A folder where the object was cannot be unlinked: the claim of destruction must not be made.
    (tmp_path / "root" / "a" / "b").mkdir(parents=True)
    with pytest.raises(StorageError, match="a/b"):
        local.destroy(["a/b"])


def test_destroying_looks_again_and_does_not_trust_the_file_system(
    memory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.write("a/b", b"x")
    # A file system that says it removed a file and did not, as caching and versioned ones do.
    monkeypatch.setattr(MemoryFileSystem, "rm_file", lambda *arguments: None)
    with pytest.raises(StorageError, match="still there"):
        memory.destroy(["a/b"])


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no credentials"), OSError(errno.ETIMEDOUT, "timed out"), PermissionError(errno.EACCES, "forbidden")],
    ids=repr,
)
def test_whatever_a_remote_file_system_raises_becomes_a_storage_error(
    memory: Storage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    for name in ("cat_file", "pipe_file", "find", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, name, fail)
    does: list[Callable[[], object]] = [
        lambda: memory.read("a/b"),
        lambda: memory.write("a/b", b"x"),
        lambda: memory.list("a/b"),
        lambda: memory.destroy(["a/b"]),
    ]
    for call in does:
        with pytest.raises(StorageError, match="a/b") as caught:
            call()
        assert str(error.args[-1]) in str(caught.value)


def test_a_file_system_nobody_knows_is_a_storage_error() -> None:
    with pytest.raises(StorageError, match="bogus://x"):
        Storage("bogus://x")


def test_a_local_root_that_is_away_is_an_error_and_is_not_made_anew(local: Storage, tmp_path: Path) -> None:
    local.write("a/b", b"x")
    (tmp_path / "root").rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is it mounted"):
        Storage(str(tmp_path / "root")).check()
    assert not (tmp_path / "root").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "root")
    Storage(str(tmp_path / "root")).check()


def test_an_object_where_a_folder_should_be_is_told(local: Storage) -> None:
    local.write("a", b"x")
    with pytest.raises(StorageError, match="a/b"):
        local.write("a/b", b"x")
    assert os.listdir(local.url) == ["a"]


def test_two_stores_never_share_a_folder_nor_one_within_the_other(
    new_store: Callable[..., Any], tmp_path: Path
) -> None:
    new_store("shop", storage=str(tmp_path / "disk" / "shop"))
    (tmp_path / "disk" / "other").mkdir()
    (tmp_path / "disk" / "other" / "store.json").write_text('{"a": "file of somebody else"}')
    for place in ("disk/shop", "disk/shop/within", "disk/shop/data/deep/within", "disk", "."):
        with pytest.raises(RefusedError, match="belongs to a store already"):
            new_store("second", storage=str(tmp_path / place))
        assert not (tmp_path / "second" / "unlearnd.toml").exists()
    new_store("second", storage=str(tmp_path / "disk" / "other" / "second"))
    new_store("third", storage=str(tmp_path / "disk" / "shop-3"))


@pytest.fixture
def closable(tmp_path: Path) -> Iterator[tuple[Path, Callable[[bool], None]]]:
    """A folder that can be made read-only and writable again: by its mode, or as a disk, since root writes anywhere."""
    where = tmp_path / "disk"
    where.mkdir()
    if os.getuid() == 0:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", where], capture_output=True).returncode:
            pytest.skip("this machine lets nobody mount a disk, and root may write into any folder")

        def close(shut: bool) -> None:
            subprocess.run(["mount", "-o", f"remount,{'ro' if shut else 'rw'}", where], check=True)

        yield where, close
        subprocess.run(["umount", "-l", where], check=True)
    else:

        def close(shut: bool) -> None:
            for path in (where, *where.rglob("*")):
                if path.is_dir():
                    path.chmod(0o500 if shut else 0o700)

        yield where, close
        close(False)


def test_a_disk_that_is_full_is_one_clear_sentence_and_once_there_is_room_nothing_is_lost(
    people: Callable[..., Any], add: Callable[..., Any], fit: Callable[..., Any], tmp_path: Path
) -> None:
    """Ledger and storage on one small disk, with more and more room, until an erasure comes to its end."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a disk")
    try:
        folder = disk / "store"
        with unlearnd.create_store(str(folder)) as store:
            add(store, people(20, 60), shards=1, slices=3)
            fit(store)
        ballast = disk / "ballast"
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
        told = []
        for room in (0, 8_192, 32_768, 65_536, 131_072, 262_144, 524_288):
            ballast.write_bytes(b"")
            ballast.write_bytes(bytes(max(0, free - room)))
            result = CliRunner().invoke(main, ["erase", "--user", "u1", "--store", str(folder)])
            if result.exit_code == 0:
                break
            assert (result.exit_code, result.exception.__class__) == (1, SystemExit), result.output
            assert re.fullmatch(r"unlearnd: [^\n]*(disk is full|No space left)[^\n]*\n", result.stderr), result.stderr
            told.append(room)
        assert told
        assert result.exit_code == 0, result.output
        ballast.unlink()
        with unlearnd.open_store(str(folder)) as store:
            assert (store.where_user("u1"), len(store.receipts())) == ([], 1)
            assert audit(store).level == 4
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("part", ["all of it", "its storage"])
def test_a_folder_that_is_read_only_is_one_clear_sentence_and_loses_nothing(
    part: str,
    closable: tuple[Path, Callable[[bool], None]],
    people: Callable[..., Any],
    add: Callable[..., Any],
    tmp_path: Path,
) -> None:
    disk, close = closable
    folder = disk / "store" if part == "all of it" else tmp_path / "store"
    storage = "storage" if part == "all of it" else str(disk / "storage")
    with unlearnd.create_store(str(folder), storage=storage) as store:
        add(store, people(6, 12), shards=1, slices=1)
    close(True)
    for command in (["erase", "--user", "u1"], ["init", str(disk / "new")], ["requests", "receive", "--user", "u2"]):
        at = [] if command[0] == "init" else ["--store", str(folder)]
        result = CliRunner().invoke(main, [*command, *at])
        assert (result.exit_code, result.stdout) == (1, ""), result.output
        assert result.stderr.startswith("unlearnd: "), result.stderr
        assert result.stderr.count("\n") == 1, result.stderr
        assert re.search(r"cannot be written|[Rr]ead-only|[Pp]ermission|cannot be made", result.stderr), result.stderr
    close(False)
    with unlearnd.open_store(str(folder)) as store:
        assert [outcome.found for outcome in store.erase(["u1"]).outcomes] == [True]
        assert audit(store).failed == ()
