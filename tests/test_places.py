"""Storage elsewhere than on a disk: what a server answers, what is tried again, and that nothing is peculiar to S3."""

import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.seaweed import Seaweed
from unlearnd.audit import audit
from unlearnd.errors import NotFoundError, RefusedError, StorageError
from unlearnd.storage import CLAIM, Storage
from unlearnd.store import Store
from unlearnd.translog import issue_receipts, receipt_path


class Moody(http.server.BaseHTTPRequestHandler):
    """Stands in for servers that are not at their best: answers with what the test has put in `answers`, in order."""

    protocol_version = "HTTP/1.1"  # who speaks it answers "Expect: 100-continue", for which uploads wait
    answers: ClassVar[list[tuple[int, str]]] = []
    asked: ClassVar[list[tuple[str, float]]] = []

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((self.command, time.monotonic()))
        status, code = self.answers.pop(0) if self.answers else (200, "")
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode() if code else b""
        self.close_connection = True
        if status == 0:
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_DELETE = _answer

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Storage]]:
    """Open a storage on a server that gives these answers first, and good ones after."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    monkeypatch.setattr("unlearnd.storage.s3._FIRST_WAIT", 0.01)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Moody)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def make(*answers: tuple[int, str], **settings: Any) -> Storage:
        Moody.answers[:], Moody.asked[:] = list(answers), []
        url = f"http://127.0.0.1:{server.server_port}"
        return Storage("s3://bucket/p", endpoint_url=url, region="us-east-1", addressing_style="path", **settings)

    yield make
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "answer",
    [(503, "SlowDown"), (500, "InternalError"), (502, ""), (504, ""), (429, "TooManyRequests"), (0, "")],
    ids=lambda answer: f"{answer[0]} {answer[1]}",
)
def test_what_may_pass_is_tried_again(moody: Callable[..., Storage], answer: tuple[int, str]) -> None:
    moody(answer, answer, answer).write("a", b"x")
    assert len(Moody.asked) == 4


@pytest.mark.parametrize(
    "answer",
    [(403, "AccessDenied"), (400, "InvalidRequest"), (404, "NoSuchBucket"), (409, "BucketNotEmpty"), (412, "Odd")],
    ids=lambda answer: f"{answer[0]} {answer[1]}",
)
def test_what_the_server_refuses_is_not_tried_again(moody: Callable[..., Storage], answer: tuple[int, str]) -> None:
    with pytest.raises((StorageError, NotFoundError)):
        moody(answer).write("a", b"x")
    assert len(Moody.asked) == 1


def test_trying_again_ends_and_says_what_was_wrong(moody: Callable[..., Storage]) -> None:
    with pytest.raises(StorageError, match=r"a/b: .*SlowDown"):
        moody(*[(503, "SlowDown")] * 9, attempts=3).write("a/b", b"x")
    assert len(Moody.asked) == 3


def test_a_server_that_is_not_there_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        storage = Storage("s3://bucket/p", endpoint_url=url, region="us-east-1", attempts=1)
        for ask in (lambda: storage.write("a", b"x"), lambda: storage.read("a"), lambda: storage.list("")):
            with pytest.raises(StorageError, match="its server cannot be reached, or hung up"):
                ask()


def test_waits_grow_and_are_not_alike(moody: Callable[..., Storage], monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("unlearnd.storage.s3.time.sleep", waited.append)
    for _ in range(8):
        moody(*[(503, "SlowDown")] * 4).write("a", b"x")
    by_attempt = [waited[n::4] for n in range(4)]
    assert all(0 <= wait <= 0.01 * 2 ** (n + 1) for n, waits in enumerate(by_attempt) for wait in waits)
    assert max(by_attempt[3]) > 0.01 * 2
    assert len({round(wait, 6) for wait in by_attempt[3]}) > 3


@pytest.mark.parametrize(
    "answer", [(412, "PreconditionFailed"), (409, "ConditionalRequestConflict")], ids=lambda answer: str(answer[0])
)
def test_both_ways_of_saying_that_a_name_is_taken_are_understood(
    moody: Callable[..., Storage], answer: tuple[int, str]
) -> None:
    storage = moody(answer)
    assert storage._bucket is not None
    assert storage._bucket.create("bucket/p/x", b"x") is False
    assert storage._bucket.create("bucket/p/x", b"x") is True


def test_a_server_that_ignores_conditions_is_found_out(moody: Callable[..., Storage]) -> None:
    # It takes both writes of the probe, and knows neither lock nor versions.
    unknown = (501, "NotImplemented")
    storage = moody(unknown, unknown, (200, ""), (200, ""), unknown, (200, ""), unknown)
    assert storage._bucket is not None
    assert storage._bucket.probe("bucket/p", "probe").exclusive is False


@pytest.fixture
def ftp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A real FTP server on the loopback interface; return its address."""
    from pyftpdlib.authorizers import DummyAuthorizer
    from pyftpdlib.handlers import FTPHandler
    from pyftpdlib.servers import ThreadedFTPServer

    (tmp_path / "ftp").mkdir()
    authorizer = DummyAuthorizer()
    authorizer.add_user("somebody", "secret", str(tmp_path / "ftp"), perm="elradfmwMT")

    class Handler(FTPHandler):  # type: ignore[misc, no-any-unimported]
        pass

    Handler.authorizer = authorizer
    server = ThreadedFTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setitem(__import__("fsspec").config.conf, "ftp", {"username": "somebody", "password": "secret"})
    yield f"ftp://127.0.0.1:{server.address[1]}/shop"
    server.close_all()
    thread.join()


def journey(store: Store, never: Store, people: Any, add: Any, fit: Any, digests: Any) -> None:
    rows = people(20, 50)
    add(store, rows, shards=2, slices=2)
    fit(store, epochs=1)
    store.erase(["u3"])
    add(never, rows.without(["u3"]), shards=2, slices=2)
    fit(never, epochs=1)
    assert digests(store) == digests(never)
    report = audit(store)
    assert report.failed == ()
    assert report.level == 4


def test_the_journey_in_a_folder_named_as_an_address(
    new_store: Any, people: Any, add: Any, fit: Any, digests: Any, tmp_path: Path
) -> None:
    store = new_store("store", storage=f"file://{tmp_path}/bytes")
    journey(store, new_store("never"), people, add, fit, digests)
    assert (tmp_path / "bytes" / CLAIM).is_file()
    with pytest.raises(RefusedError, match="belongs to a store already"):
        new_store("other", storage=f"file://{tmp_path}/bytes")


def test_the_journey_on_a_file_system_that_is_no_disk_and_no_bucket(
    new_store: Any, people: Any, add: Any, fit: Any, digests: Any, ftp: str
) -> None:
    store = new_store("store", storage=ftp)
    assert not store.storage.exclusive
    journey(store, new_store("never"), people, add, fit, digests)
    with pytest.raises(RefusedError, match="belongs to a store already"):
        new_store("other", storage=ftp)


def test_where_names_cannot_be_created_exclusively_the_ledger_s_lock_makes_one_receipt(
    new_store: Any, people: Any, add: Any, seaweed: Seaweed
) -> None:
    """As on a bucket whose server ignores conditions."""
    from unlearnd.storage.s3 import Abilities

    store = new_store("store", storage=f"s3://{seaweed.bucket(versioned=True)}/p", storage_options=seaweed.options)
    add(store, people())
    written: list[str] = []
    stores = [Store.open(store.folder) for _ in range(3)]
    for one in stores:
        one.storage._abilities = Abilities(exclusive=False, versioning="enabled", object_lock=False)
    threads = [threading.Thread(target=lambda one=one: issue_receipts(one.translog)) for one in stores]  # type: ignore[misc]
    outcome = stores[0].erase(["u3"]).outcomes[0]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in stores:
        one.close()
    written = [v.name for v in store.storage.versions("evidence/receipts")]
    assert written == [receipt_path(outcome.request)]
