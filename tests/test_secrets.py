"""Who the people are stays outside: no id on disk, in logs or in messages, and a destroyed key is really gone."""

import logging
import stat
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unlearnd
from unlearnd.errors import InputError, RefusedError, UnlearndError

ZOE, NUMBER, STRANGER = "zoe.quartermaine@example.org", "user-424242", "stranger.in.the.night@example.org"


@pytest.fixture
def crowd(people: Callable[..., Any]) -> Any:
    """Return people, two of whom have memorable ids."""
    rows = people()
    named = rows.user.astype("U40")
    named[[3, 33, 63]], named[[4, 44]] = ZOE, NUMBER
    return type(rows)(rows.x, rows.y, named)


def spellings(user: str) -> list[bytes]:
    """Return an id as it might lie in a file."""
    return [user.encode(), user.encode("utf-16-le"), user.encode("utf-16-be"), user.upper().encode()]


def everything_said(error: BaseException) -> str:
    """Return all that an error would put into a log: its text, its repr, and its whole traceback with causes."""
    told, seen = [str(error), repr(error), *traceback.format_exception(error)], error
    while seen is not None:
        told += [str(seen), repr(seen.args)]
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "\n".join(told)


def test_no_id_reaches_a_file_a_log_or_an_outcome(
    crowd: Any,
    tmp_path: Path,
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    files_holding: Callable[..., list[str]],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    # An application may well turn these on to look at its own queries.
    caplog.set_level(logging.DEBUG, "sqlalchemy")
    store = new_store()
    add(store, crowd)
    fit(store)
    during = [files_holding(store.folder, text) for user in (ZOE, NUMBER) for text in spellings(user)]
    erased = store.erase([ZOE, NUMBER, STRANGER])
    again = store.erase([ZOE, STRANGER], build=False)
    after = [files_holding(store.folder, text) for user in (ZOE, NUMBER, STRANGER) for text in spellings(user)]
    assert not any(during)
    assert not any(after)
    said = [
        repr(erased),
        repr(again),
        repr(store.status()),
        repr(store.where_user(ZOE)),
        repr(store.plan_erasure([ZOE])),
    ]
    said += [record.getMessage() for record in caplog.records]
    said += [str(record.args) for record in caplog.records]
    said += capfd.readouterr()
    for user in (ZOE, NUMBER, STRANGER):
        assert not any(user in text for text in said)


def ingest_a_row_without_a_label(store: Any, rows: Any, folder: Path) -> None:
    path = folder / "rows.csv"
    path.write_text(f"who,label,a\n{ZOE},1,0.5\n{ZOE},,0.5\n")
    store.ingest("csv", path, user="who", label="label")


def ingest_a_row_with_text_for_a_feature(store: Any, rows: Any, folder: Path) -> None:
    path = folder / "rows.csv"
    path.write_text(f"who,label,a\nada,1,0.5\n{ZOE},1,{ZOE}\n")
    store.ingest("csv", path, user="who", label="label")


def ingest_an_id_as_a_fractional_label(store: Any, rows: Any, folder: Path) -> None:
    store.ingest("new", rows.x[:2], user=[ZOE, "ada"], label=[0.5, 1.5])


def ingest_an_infinite_feature(store: Any, rows: Any, folder: Path) -> None:
    store.ingest("new", rows.x[:2] * np.float32("inf"), user=[ZOE, NUMBER], label=[0, 1])


def ingest_a_new_class(store: Any, rows: Any, folder: Path) -> None:
    store.ingest("d", rows.x[:2], user=[ZOE, NUMBER], label=[7, 8])


def ingest_nobody(store: Any, rows: Any, folder: Path) -> None:
    store.ingest("new", rows.x[:2], user=[ZOE, None], label=[0, 1])


def ingest_half_a_character(store: Any, rows: Any, folder: Path) -> None:
    store.ingest("new", rows.x[:2], user=[ZOE + "\ud800", ZOE], label=[0, 1])


def erase_half_a_character(store: Any, rows: Any, folder: Path) -> None:
    store.erase([ZOE + "\ud800"])


def ask_where_half_a_character_is(store: Any, rows: Any, folder: Path) -> None:
    store.where_user(ZOE + "\ud800")


def erase_a_user_where_a_point_belongs(store: Any, rows: Any, folder: Path) -> None:
    store.erase(points=[ZOE])


def ask_where_a_user_is_as_if_they_were_a_point(store: Any, rows: Any, folder: Path) -> None:
    store.where_point(ZOE)


def erase_bytes(store: Any, rows: Any, folder: Path) -> None:
    store.erase([ZOE.encode()])


def erase_none(store: Any, rows: Any, folder: Path) -> None:
    store.erase([None])


def erase_a_fraction(store: Any, rows: Any, folder: Path) -> None:
    store.erase([424242.0])


MISTAKES = [
    ingest_a_row_without_a_label,
    ingest_a_row_with_text_for_a_feature,
    ingest_an_id_as_a_fractional_label,
    ingest_an_infinite_feature,
    ingest_a_new_class,
    ingest_nobody,
    ingest_half_a_character,
    erase_half_a_character,
    ask_where_half_a_character_is,
    erase_a_user_where_a_point_belongs,
    ask_where_a_user_is_as_if_they_were_a_point,
    erase_bytes,
    erase_none,
    erase_a_fraction,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_told_without_the_id(
    mistake: Callable[..., None],
    crowd: Any,
    tmp_path: Path,
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
) -> None:
    store = new_store()
    add(store, crowd)
    fit(store)
    with pytest.raises(UnlearndError) as caught:
        mistake(store, crowd, tmp_path)
    # The lines of code in a traceback are this file's own: look at what was said, not at how it was called.
    said = everything_said(caught.value)
    for user in (ZOE, NUMBER):
        assert user not in said
    assert store.where_user(ZOE)


def test_a_ledger_that_fails_does_not_tell_the_values_it_was_given(
    crowd: Any, new_store: Callable[..., Any], add: Callable[..., Any], fit: Callable[..., Any]
) -> None:
    store = new_store()
    add(store, crowd)
    fit(store)
    (handle,) = store.keys.handles([ZOE])
    with store.ledger.write() as connection:
        connection.exec_driver_sql("DROP TABLE request")
    with pytest.raises(UnlearndError) as caught:
        store.erase([ZOE])
    said = everything_said(caught.value)
    assert ZOE not in said
    assert repr(handle) not in said
    assert handle.hex() not in said


def test_turned_on_query_logs_hold_no_user_key(
    crowd: Any,
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    ask_ledger: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "sqlalchemy")
    store = new_store()
    add(store, crowd)
    keys = [key for (key,) in ask_ledger(store.folder, "SELECT key FROM users")]
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert len(keys) > 30
    assert [key for key in keys if repr(key)[2:-1] in said or key.hex() in said] == []


def test_the_key_of_the_erased_is_in_no_file_even_while_another_store_is_open(
    crowd: Any,
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    ask_ledger: Callable[..., Any],
    files_holding: Callable[..., list[str]],
) -> None:
    store = new_store()
    add(store, crowd)
    fit(store)
    with unlearnd.open_store(str(store.folder)) as other:
        served = other.model("m")
        served.predict(crowd.x)
        keys = {}
        for user in (ZOE, NUMBER):
            (handle,) = store.keys.handles([user])
            ((keys[user],),) = ask_ledger(store.folder, "SELECT key FROM users WHERE handle = ?", handle)
            assert len(keys[user]) == 32
            assert files_holding(store.folder, keys[user]) != []
        store.erase([ZOE, NUMBER], build=False)
        assert served.predict(crowd.x).labels.shape == (len(crowd),)
        for key in keys.values():
            assert files_holding(store.folder, key) == []


def test_keys_of_the_erased_leave_no_copies_in_a_ledger_whose_pages_were_split(
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    people: Callable[..., Any],
    ask_ledger: Callable[..., Any],
) -> None:
    # Users come in several ingests and so land between others: pages of the users' table fill up and split.
    store = new_store()
    users = []
    for number in range(6):
        rows = people(400, 400, features=1, seed=number)
        named = np.array([f"{user} of {number}" for user in rows.user])
        users += sorted(set(named.tolist()))
        add(store, type(rows)(rows.x, rows.y, named))
    doomed = users[::3]
    keys = dict(ask_ledger(store.folder, "SELECT handle, key FROM users"))
    gone = [keys[handle] for handle in store.keys.handles(doomed)]
    store.erase(doomed)
    on_disk = b"".join(path.read_bytes() for path in store.folder.glob("ledger.sqlite*"))
    assert sum(key in on_disk for key in gone) == 0
    assert sum(key in on_disk for key in keys.values()) == len(users) - len(doomed)


def test_a_user_whose_points_were_all_erased_singly_loses_the_key_when_erased(
    crowd: Any,
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    ask_ledger: Callable[..., Any],
) -> None:
    store = new_store()
    add(store, crowd)
    fit(store)
    (handle,) = store.keys.handles([ZOE])
    store.erase(points=[f"d:{position}" for where in store.where_user(ZOE) for position in where.positions])
    first = store.erase([ZOE]).outcomes[0]
    assert ask_ledger(store.folder, "SELECT key FROM users WHERE handle = ?", handle) in ([], [(None,)])
    assert store.erase([ZOE]).outcomes[0] == first


def test_whoever_comes_back_has_a_new_key(
    crowd: Any, new_store: Callable[..., Any], add: Callable[..., Any], ask_ledger: Callable[..., Any]
) -> None:
    store = new_store()
    add(store, crowd)
    (handle,) = store.keys.handles([ZOE])
    ask = "SELECT key, erased_at FROM users WHERE handle = ?"
    ((old, _),) = ask_ledger(store.folder, ask, handle)
    store.erase([ZOE])
    assert ask_ledger(store.folder, ask, handle)[0][0] is None
    add(store, crowd.only([ZOE]), readmit=True)
    ((new, erased_at),) = ask_ledger(store.folder, ask, handle)
    assert len(new) == 32
    assert new != old
    assert erased_at is None


def test_erased_rows_are_in_no_file(
    crowd: Any,
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    files_holding: Callable[..., list[str]],
) -> None:
    store = new_store()
    add(store, crowd)
    fit(store)
    (handle,) = store.keys.handles([ZOE])
    rows = [row.tobytes() for row in crowd.only([ZOE]).x]
    assert all(files_holding(store.folder / "storage", row) for row in rows)
    assert files_holding(store.folder / "storage", handle)
    store.erase([ZOE], build=False)
    assert not any(files_holding(store.folder, row) for row in rows)
    assert files_holding(store.folder / "storage", handle) == []


def test_only_the_owner_can_read_keys_ledger_and_data(
    crowd: Any, new_store: Callable[..., Any], add: Callable[..., Any], fit: Callable[..., Any]
) -> None:
    store = new_store()
    add(store, crowd)
    fit(store)

    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert mode(store.folder / "keys") == 0o700
    assert {path.name: mode(path) for path in (store.folder / "keys").iterdir()} == {
        "placement.key": 0o600,
        "pepper.key": 0o600,
        "log.key": 0o600,
        "receipt.key": 0o600,
        # Made to be published.
        "log.pub": 0o644,
        "receipt.pub": 0o644,
        "trust.json": 0o644,
    }
    assert mode(store.folder / "storage") == 0o700
    assert {mode(path) for path in store.folder.glob("ledger.sqlite*")} == {0o600}
    assert {mode(path) for path in (store.folder / "storage").rglob("*.safetensors")} == {0o600}


def test_keys_do_not_show_when_printed(new_store: Callable[..., Any]) -> None:
    store = new_store()
    shown = f"{store.keys!r} {store.keys} {store!r} {vars(store)}"
    for secret in (store.keys.placement, store.keys.pepper):
        assert secret.hex() not in shown
        assert repr(secret)[2:-1] not in shown


def test_a_key_is_never_overwritten(new_store: Callable[..., Any], tmp_path: Path) -> None:
    store = new_store()
    before = {path: path.read_bytes() for path in (store.folder / "keys").iterdir()}
    with pytest.raises(RefusedError, match="there is a store"):
        unlearnd.create_store(str(store.folder))
    assert {path: path.read_bytes() for path in (store.folder / "keys").iterdir()} == before


@pytest.mark.parametrize("text", ["", "abc", "zz" * 32, "5eed" * 17])
def test_a_placement_key_that_is_none_is_refused_and_not_quoted(text: str, tmp_path: Path) -> None:
    path = tmp_path / "placement.key"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        unlearnd.create_store(str(tmp_path / "store"), placement_key=path)
    assert not text or text not in everything_said(caught.value)
