"""The ledger: one schema however it was made, nothing deleted stays readable, leases, packed placements."""

import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import inspect

from unlearnd import migrations
from unlearnd.errors import BusyError, DamagedStoreError, InputError, NotFoundError, StorageError
from unlearnd.leases import hold
from unlearnd.ledger import Ledger, leases, log, points
from unlearnd.ledger.connection import many, stamp
from unlearnd.ledger.database import SCHEMA
from unlearnd.ledger.migrate import migrate
from unlearnd.packing import pack, pack_many, unpack, unpack_flat, unpack_many

NOON = datetime(2026, 3, 14, 12, tzinfo=UTC)


def clock() -> datetime:
    return datetime.now(UTC)


pytestmark = pytest.mark.both_databases


@pytest.fixture
def url(ledger_url: Callable[[str], str]) -> str:
    return ledger_url("ledger")


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    made = Ledger.create(url)
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def file(path: Path) -> Iterator[Ledger]:
    """Return a ledger in SQLite, for what only a file can have."""
    made = Ledger.create(f"sqlite:///{path}")
    yield made
    made.close()


def schema_of(path: Path) -> dict[str, str]:
    """Return every table and index as SQL, without what may differ in spelling."""
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'").fetchall()
    return {name: re.sub(r"[\s\"]+", " ", sql).replace("( ", "(").replace(" )", ")") for name, sql in rows}


def columns_of(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Return every table's columns, foreign keys and unique indices as SQLite understood them."""
    found: dict[str, list[tuple[object, ...]]] = {}
    with closing(sqlite3.connect(path)) as database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            found[table] = [
                *database.execute(f"PRAGMA table_info({table})").fetchall(),
                *database.execute(f"PRAGMA foreign_key_list({table})").fetchall(),
                *sorted(row[1:] for row in database.execute(f"PRAGMA index_list({table})").fetchall()),
            ]
    return found


def described(ledger: Ledger) -> dict[str, object]:
    """Return all that a database says about its tables, whatever it was made by."""
    with ledger.read() as connection:
        found = inspect(connection)
        return {
            table: {
                "columns": [(c["name"], str(c["type"]), c["nullable"]) for c in found.get_columns(table)],
                "key": found.get_pk_constraint(table)["constrained_columns"],
                "foreign": sorted(
                    (*key["constrained_columns"], key["referred_table"]) for key in found.get_foreign_keys(table)
                ),
                "unique": sorted(unique["column_names"] for unique in found.get_unique_constraints(table)),
                "indexes": sorted((i["name"], tuple(i["column_names"])) for i in found.get_indexes(table)),
            }
            for table in found.get_table_names()
            if table != "alembic_version"
        }


# Schema

RELEASED = ("0001",)
"""Schemas of releases, each of which some store may still have."""


def test_migrations_are_one_chain_named_by_their_numbers() -> None:
    folder = Path(migrations.__file__).parent / "versions"
    files = sorted(folder.glob("*.py"))
    chain = [path.name[:4] for path in files]
    assert chain == [f"{number:04}" for number in range(1, len(chain) + 1)]
    told = [re.findall(r'^(?:down_)?revision = "?(\w+)"?$', path.read_text(), re.M) for path in files]
    assert told == [list(pair) for pair in zip(chain, ["None", *chain[:-1]], strict=True)]
    assert chain[-1] == SCHEMA


@pytest.mark.parametrize("released", [None, *RELEASED])
def test_migrations_end_in_the_schema_that_a_new_ledger_has(
    ledger: Ledger, ledger_url: Callable[[str], str], released: str | None
) -> None:
    old = ledger_url("old")
    if released:
        migrate(old, released)
        with pytest.raises(DamagedStoreError, match=f"schema {released}, this release needs {SCHEMA}: run"):
            Ledger.open(old)
    assert migrate(old) == (released, SCHEMA)
    with closing(Ledger.open(old)) as migrated:
        assert described(migrated) == described(ledger)
        assert len(described(ledger)) > 15
        check_append_only(migrated)


@pytest.mark.parametrize("released", RELEASED)
def test_rows_of_an_older_schema_are_there_after_a_migration(url: str, released: str) -> None:
    migrate(url, released)
    with closing(Ledger(url)) as old:
        points.open_ingest(old, "one", "people", NOON)
        leases.take(old, ["a"], "me", 100, 10, [])
        with old.write() as connection:
            log.append(connection, [b"first", b"second"])
        enter(old, [])
        with old.write() as connection:
            connection.exec_driver_sql(
                "INSERT INTO model (name, dataset_id, spec, sliceable, deterministic, seed, declared_at) "
                "SELECT 'm', id, '{}', TRUE, TRUE, 9223372036854775807, '' FROM dataset"
            )
            many(
                connection,
                "INSERT INTO build (id, model_id, started_at, samples, from_scratch, checkpoints, seconds) "
                "SELECT ?, id, '', 1, 2, 3, 0.5 FROM model",
                [("second",), ("first",)],
            )
        root = log.size_and_root(old)
    migrate(url)
    with closing(Ledger.open(url)) as new:
        assert points.unfinished_ingests(new, "people") == ["one"]
        assert leases.look(new, "me") == ({"a"}, False)
        assert log.size_and_root(new) == root
        assert new.peek("SELECT seed FROM model") == 2**63 - 1
        with new.read() as connection:
            kept = connection.exec_driver_sql("SELECT id FROM build ORDER BY number, id").scalars().all()
        # SQLite knew the order in which rows came, and it is kept.
        assert kept == (["second", "first"] if url.startswith("sqlite") else ["first", "second"])


def test_every_kind_of_table_is_made_the_same_by_sqlite_s_migrations(file: Ledger, path: Path) -> None:
    migrated = path.with_name("migrated.sqlite")
    assert migrate(f"sqlite:///{migrated}") == (None, SCHEMA)
    made, grown = schema_of(path), schema_of(migrated)
    assert made.keys() == grown.keys()
    assert columns_of(path).keys() == columns_of(migrated).keys()
    for table, columns in columns_of(path).items():
        if table != "alembic_version":
            assert columns_of(migrated)[table] == columns
    # Tables clustered by their key, which the column lists do not show.
    clustered = {name for name, sql in made.items() if "WITHOUT ROWID" in sql}
    assert (
        clustered
        == {name for name, sql in grown.items() if "WITHOUT ROWID" in sql}
        == {*("users", "holding", "slice", "node", "transition", "suppressed", "notice")}
    )


def test_a_migrated_ledger_opens_and_migrating_again_changes_nothing(url: str) -> None:
    migrate(url)
    with closing(Ledger.open(url)) as ledger:
        before = described(ledger)
        assert migrate(url) == (SCHEMA, SCHEMA)
        assert described(ledger) == before


def test_migrating_a_ledger_in_use_loses_nothing(ledger: Ledger) -> None:
    points.open_ingest(ledger, "one", "people", NOON)
    migrate(ledger.url)
    assert points.unfinished_ingests(ledger, "people") == ["one"]


def test_a_ledger_of_another_schema_is_not_opened(ledger: Ledger) -> None:
    with ledger.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0000'")
    with pytest.raises(DamagedStoreError, match=f"schema 0000, this release needs {SCHEMA}: run `unlearnd migrate`"):
        Ledger.open(ledger.url)


def test_no_table_has_room_for_a_user_id(ledger: Ledger) -> None:
    with ledger.read() as connection:
        found = inspect(connection)
        columns = {table: {c["name"] for c in found.get_columns(table)} for table in found.get_table_names()}
    assert columns["users"] >= {"handle", "key", "erased_at"}
    assert not any({"user", "user_id", "name"} & columns[table] for table in ("users", "holding", "request"))


def check_append_only(ledger: Ledger) -> None:
    with ledger.write() as connection:
        log.append(connection, [b"a leaf"])
    for sql in ("UPDATE leaf SET body = body", "DELETE FROM leaf", "UPDATE node SET hash = hash", "DELETE FROM node"):
        with pytest.raises(DamagedStoreError, match="the log is append-only"), ledger.write() as connection:
            connection.exec_driver_sql(sql)


def test_nothing_in_the_log_can_be_changed(ledger: Ledger) -> None:
    check_append_only(ledger)
    if ledger.url.startswith("postgresql"):
        with pytest.raises(DamagedStoreError, match="the log is append-only"), ledger.write() as connection:
            connection.exec_driver_sql("TRUNCATE leaf")
    assert log.size_and_root(ledger)[0] == 1


# Opening


def test_only_the_owner_can_read_a_ledger(file: Ledger, path: Path) -> None:
    assert path.stat().st_mode & 0o077 == 0


def test_a_ledger_that_is_not_there_is_not_made_by_opening_it(url: str) -> None:
    for _ in range(2):
        with pytest.raises(NotFoundError, match="there is no ledger"):
            Ledger.open(url)


@pytest.mark.parametrize("content", [b"", b"garbage" * 500, b"SQLite format 3\0" + b"\1" * 4080])
def test_a_file_that_is_no_ledger_is_damage_that_names_the_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(DamagedStoreError, match=str(path)):
        Ledger.open(f"sqlite:///{path}")


@pytest.mark.parametrize("bad", ["bogus", "nosuch://x", "postgresql+asyncpg://host/db", "sqlite://", "mysql://x/y"])
def test_a_url_that_is_neither_sqlite_nor_postgresql_is_refused(bad: str) -> None:
    with pytest.raises(InputError):
        Ledger(bad)


def test_times_are_kept_in_utc_to_the_second() -> None:
    assert stamp(NOON) == "2026-03-14T12:00:00Z"
    assert stamp(datetime(2026, 3, 14, 14, tzinfo=timezone(timedelta(hours=2)))) == stamp(NOON)


# Transactions


def test_a_transaction_that_fails_leaves_nothing(ledger: Ledger) -> None:
    def half() -> None:
        with ledger.write() as connection:
            connection.exec_driver_sql("INSERT INTO ingest (id, dataset, opened_at, points) VALUES ('x', 'd', '', 0)")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert points.unfinished_ingests(ledger, "d") == []


def test_an_error_of_the_database_is_ours_and_holds_no_value(ledger: Ledger) -> None:
    points.open_ingest(ledger, "secret", "people", NOON)
    with pytest.raises(DamagedStoreError) as caught:
        points.open_ingest(ledger, "secret", "people", NOON)
    assert "secret" not in str(caught.value)
    with pytest.raises(StorageError) as other, ledger.read() as connection:
        connection.exec_driver_sql("SELECT * FROM nothing WHERE x = ?", ("secret",))
    assert "secret" not in str(other.value)
    assert other.value.__cause__ is None


def test_a_reader_sees_one_moment_while_somebody_writes(ledger: Ledger) -> None:
    with ledger.read() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM ingest").scalar() == 0
        points.open_ingest(ledger, "x", "people", NOON)
        assert connection.exec_driver_sql("SELECT count(*) FROM ingest").scalar() == 0
    assert points.unfinished_ingests(ledger, "people") == ["x"]


def test_writers_wait_for_each_other_and_none_is_lost(ledger: Ledger) -> None:
    def add(worker: int) -> None:
        for number in range(20):
            points.open_ingest(ledger, f"{worker}-{number}", "people", NOON)

    threads = [threading.Thread(target=add, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(points.unfinished_ingests(ledger, "people")) == 80


# What is deleted


def bytes_on_disk(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(path.parent.glob("ledger.sqlite*")))


def test_every_connection_is_durable_and_overwrites_what_it_deletes(file: Ledger) -> None:
    wanted = {"secure_delete": 1, "journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "temp_store": 2}
    for open_ in (file.read, file.write):
        with open_() as connection:
            found = {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in wanted}
        assert found == wanted
    assert file.peek("PRAGMA secure_delete") == 1


def test_a_destroyed_key_is_in_no_file_after_a_scrub(file: Ledger, path: Path) -> None:
    keys = [(bytes([number]) * 16, bytes([200, number]) * 16) for number in range(1, 60)]
    with file.write() as connection:
        connection.exec_driver_sql("INSERT INTO users (handle, key) VALUES (?, ?)", keys)
    assert keys[30][1] in bytes_on_disk(path)
    with file.write() as connection:
        connection.exec_driver_sql("UPDATE users SET key = NULL WHERE handle = ?", (keys[30][0],))
    file.scrub()
    assert keys[30][1] not in bytes_on_disk(path)
    assert keys[31][1] in bytes_on_disk(path)


def test_a_scrub_empties_the_write_ahead_log(file: Ledger, path: Path) -> None:
    points.open_ingest(file, "x", "people", NOON)
    log = path.with_name("ledger.sqlite-wal")
    assert log.stat().st_size > 0
    file.scrub()
    assert log.stat().st_size == 0
    assert points.unfinished_ingests(file, "people") == ["x"]


def test_a_scrub_that_a_reader_keeps_from_emptying_the_log_says_so(file: Ledger, path: Path) -> None:
    points.open_ingest(file, "x", "people", NOON)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM ingest").fetchall()
        points.open_ingest(file, "y", "people", NOON)
        begun = time.monotonic()
        with pytest.raises(StorageError, match="write-ahead log cannot be emptied"):
            file.scrub(patience=0.1)
        assert time.monotonic() - begun < 5
        other.execute("COMMIT")
        file.scrub()


# Leases


def test_a_lease_is_taken_by_one_at_a_time(ledger: Ledger) -> None:
    assert leases.take(ledger, ["a", "b"], "me", 100, 10, []) == []
    assert leases.take(ledger, ["a", "b"], "me", 120, 10, []) == []
    (blocking,) = leases.take(ledger, ["b", "c"], "you", 100, 10, [])
    assert (blocking.name, blocking.holder, blocking.expires) == ("b", "me", 120)
    # All or none: "c" was free and was not taken.
    assert leases.look(ledger, "you") == (set(), False)


def test_a_lease_can_be_had_when_it_ran_out_or_its_holder_is_dead(ledger: Ledger) -> None:
    leases.take(ledger, ["a"], "me", 100, 10, [])
    assert leases.take(ledger, ["a"], "you", 200, 99, []) != []
    assert leases.take(ledger, ["a"], "you", 200, 100, []) == []
    assert leases.look(ledger, "me") == (set(), False)
    assert leases.take(ledger, ["a"], "them", 300, 150, ["you"]) == []
    assert leases.look(ledger, "them") == ({"a"}, False)


def test_renewing_extends_all_leases_and_tells_whether_somebody_wants_one(ledger: Ledger) -> None:
    leases.take(ledger, ["a", "b"], "me", 100, 10, [])
    assert leases.renew(ledger, "me", 500) == ({"a", "b"}, False)
    assert leases.left_alone(ledger, "me") == 2
    assert leases.take(ledger, ["a"], "you", 600, 499, []) != []
    leases.want(ledger, ["b"])
    assert leases.renew(ledger, "me", 600) == ({"a", "b"}, True)
    assert leases.left_alone(ledger, "me") == 1
    # Taken over, it is nobody's wish any more.
    assert leases.take(ledger, ["b"], "you", 700, 600, []) == []
    assert leases.look(ledger, "you") == ({"b"}, False)
    assert leases.renew(ledger, "me", 800) == ({"a"}, False)


def test_dropping_gives_back_ones_own_leases_only(ledger: Ledger) -> None:
    leases.take(ledger, ["a"], "me", 100, 10, [])
    leases.take(ledger, ["b"], "you", 100, 10, [])
    leases.drop(ledger, "me")
    leases.drop(ledger, "nobody")
    assert leases.take(ledger, ["a"], "you", 100, 10, []) == []
    assert leases.look(ledger, "you") == ({"a", "b"}, False)


def test_holding_gives_back_at_the_end_and_after_an_error(ledger: Ledger) -> None:
    for error in (None, ZeroDivisionError):
        try:
            with hold(ledger, ["b", "a"], clock) as held:
                assert held.names == ("a", "b")
                assert leases.look(ledger, held.holder)[0] == {"a", "b"}
                held.check()
                if error:
                    raise error
        except ZeroDivisionError:
            pass
        assert leases.look(ledger, held.holder)[0] == set()


def test_who_cannot_have_a_lease_is_told_who_has_it(ledger: Ledger) -> None:
    with (
        hold(ledger, ["build/m/1"], clock),
        pytest.raises(BusyError, match=r"process \d+ on .* is at work on build/m/1; try again"),
        hold(ledger, ["build/m/1"], clock, patience=0.1),
    ):
        pass


def test_a_better_claim_makes_the_holder_let_go(ledger: Ledger) -> None:
    let_go = threading.Event()

    def work() -> None:
        with hold(ledger, ["x"], clock) as held:
            started.set()
            while True:
                try:
                    held.check()
                except Exception:
                    let_go.set()
                    return
                time.sleep(0.01)

    started = threading.Event()
    worker = threading.Thread(target=work)
    worker.start()
    started.wait(5)
    with hold(ledger, ["x"], clock, preempt=True, patience=10):
        assert let_go.is_set()
    worker.join()


# Placements


def enter(ledger: Ledger, holdings: list[tuple[bytes, int, int, int, bytes]]) -> int:
    """Enter a dataset of nothing but these holdings; return its id."""
    with ledger.write() as connection:
        connection.exec_driver_sql(
            "INSERT INTO dataset (name, unit, placement, shards, dtype, shape, columns, label_kind, labels, "
            "labels_declared, \"groups\", points, version, created_at) VALUES ('d', 'user', 'uniform', 2, 'float32', "
            "'[1]', 'null', 'int', '[0]', FALSE, '[]', 100, 1, '')"
        )
        dataset_id = int(connection.exec_driver_sql("SELECT id FROM dataset WHERE name = 'd'").scalar_one())
        for handle, shard, slice_, first, positions in holdings:
            connection.exec_driver_sql(
                "INSERT INTO holding (handle, dataset_id, shard, slice, first, positions) VALUES (?, ?, ?, ?, ?, ?)",
                (handle, dataset_id, shard, slice_, first, positions),
            )
    return dataset_id


def test_the_holder_of_any_position_is_found(ledger: Ledger) -> None:
    generator = np.random.default_rng(3)
    owner = generator.integers(0, 40, 2000)
    owner[generator.integers(0, 2000, 100)] = -1  # erased: nobody's
    holdings = []
    for number in range(40):
        mine = np.flatnonzero(owner == number)
        # In two places each, as after a second ingest.
        for slice_, part in ((1, mine[mine < 1000]), (2, mine[mine >= 1000])):
            holdings.append((bytes([number]) * 16, number % 2 + 1, slice_, int(part[0]), pack(part)))
    dataset_id = enter(ledger, holdings)
    for position in range(0, 2000, 7):
        found = points.holding_at(ledger, dataset_id, position)
        if owner[position] < 0:
            assert found is None
        else:
            assert found is not None
            assert found.handle == bytes([owner[position]]) * 16
            assert (found.shard, found.slice) == (owner[position] % 2 + 1, 1 if position < 1000 else 2)
            assert position in unpack(found.positions)
    assert points.holding_at(ledger, dataset_id, 2000) is None
    assert points.holding_at(ledger, dataset_id + 1, 5) is None


def test_everything_that_some_users_hold_is_found_for_more_users_than_a_query_takes(ledger: Ledger) -> None:
    handles = [number.to_bytes(16, "big") for number in range(1200)]
    dataset_id = enter(ledger, [(handle, 1, 1, n, pack(np.array([n]))) for n, handle in enumerate(handles)])
    found = points.holdings_of(ledger, handles[100:])
    assert {holding.handle for holding in found} == set(handles[100:])
    assert {holding.dataset_id for holding in found} == {dataset_id}
    assert points.holdings_of(ledger, [b"nobody of this name"]) == []
    assert points.holdings_of(ledger, []) == []


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sets(st.integers(0, 2**62), min_size=1, max_size=20), max_size=8))
def test_packed_positions_come_back_as_they_were(lists: list[set[int]]) -> None:
    arrays = [np.array(sorted(positions), np.int64) for positions in lists]
    flat = np.concatenate([np.empty(0, np.int64), *arrays])
    bounds = np.cumsum([0, *map(len, arrays)])
    packed = pack_many(flat, bounds)
    assert [found.tolist() for found in unpack_many(packed)] == [array.tolist() for array in arrays]
    assert packed == [pack(array) for array in arrays]
    together, edges = unpack_flat(packed)
    assert together.tolist() == flat.tolist()
    assert edges.tolist() == bounds.tolist()


@pytest.mark.parametrize("positions", [[], [0], [127], [128], [0, 1, 2], [2**62], [0, 2**62], list(range(1000))])
def test_the_edges_of_packing(positions: list[int]) -> None:
    packed = pack(np.array(positions, np.int64))
    assert unpack(packed).tolist() == positions


def test_a_position_takes_few_bytes() -> None:
    generator = np.random.default_rng(1)
    scattered = np.sort(generator.choice(10_000_000, 10, replace=False))
    assert len(pack(scattered)) <= 40
    assert len(pack(np.arange(1_000_000, 1_001_000))) <= 1003
