"""A simulated year: five thousand requests under two laws, with holds, extensions, refusals and crashes.

The clock is the test's. Requests come in every week, the officer works through them, and every two weeks what is
approved is carried out; now and then the process is killed in the middle of something, with SIGKILL, and another one
goes on. At the end nothing was ever late, every request that was granted has one receipt, every other an end that the
log knows, and the audit passes.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any, NoReturn

import numpy as np

from unlearnd import steps
from unlearnd.audit import audit
from unlearnd.ledger import dockets
from unlearnd.store import Store

REQUESTS, DAYS, EVERY = 5000, 364, 14
BEGIN = datetime(2026, 1, 5, 9, tzinfo=UTC)
CRASHES = [
    *(steps.Step.ERASE_RECORDED, steps.Step.ERASE_MARKED, steps.Step.ERASE_SWAPPED, steps.Step.ERASE_DATA_DESTROYED),
    *(steps.Step.ERASE_REMOVED, steps.Step.RECEIPT_WRITTEN),
]
"""While requests are carried out; besides, once while they come in, and once while one is put on hold."""


class Office:
    """A store, its clock, and an officer whose process may be killed at any step."""

    def __init__(self, new_store: Callable[..., Store]) -> None:
        self.now, self.crashes = BEGIN, 0
        self.hold_crash: steps.Step | None = steps.Step.HOLD_MARKED
        self.store = new_store(policy="gdpr", clock=lambda: self.now)

    def do(self, work: Callable[[Store], Any], crash: steps.Step | None = None) -> Any:
        """Do something to its end; where a process of its own is killed on the way, this one does it again."""
        if crash is not None:
            self.store.close()
            child = os.fork()
            if child == 0:
                self._work_until_killed(work, crash)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"the process failed before {crash}"
            self.crashes += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            self.store = Store.open(self.store.folder, clock=lambda: self.now)
        return work(self.store)

    def _work_until_killed(self, work: Callable[[Store], Any], crash: steps.Step) -> NoReturn:
        """Begin something as a process of its own, which kills itself at a step, if it comes by there."""

        def kill(step: steps.Step) -> None:
            if step is crash:
                os.kill(os.getpid(), signal.SIGKILL)

        signal.alarm(60)
        code = 1
        try:
            steps.watcher = kill
            with Store.open(self.store.folder, clock=lambda: self.now) as store:
                work(store)
            code = 0
        finally:
            os._exit(code)


def test_a_year_of_requests_is_answered_in_time_with_one_receipt_each(new_store: Callable[..., Store]) -> None:
    draw = np.random.default_rng(7)
    office = Office(new_store)
    users = [f"person-{number}" for number in range(REQUESTS)]
    owners = np.array(users + users[::2])
    x = draw.normal(size=(len(owners), 3)).astype(np.float32)
    office.store.ingest("d", x, user=owners, label=(x[:, 0] > 0).astype(int), classes=2, shards=2, slices=3)
    office.store.train("m", dataset="d", backend="linear", epochs=1, settings={"batch_size": 512})
    asked = iter(np.array_split(draw.permutation(REQUESTS), DAYS // 7))
    crashes = iter(CRASHES)
    held: dict[str, date] = {}
    for day in range(0, DAYS + 6 * EVERY, 7):
        office.now = BEGIN + timedelta(days=day)
        today = [users[number] for number in next(asked, [])]
        half = len(today) // 2
        for policy, some in (("gdpr", today[:half]), ("ccpa", today[half:])):
            rows = [{"user": user, "identity": "account_login" if draw.random() < 0.99 else ""} for user in some]

            def receive(store: Store, rows: Any = rows, source: str = f"{day} {policy}", policy: str = policy) -> Any:
                return store.receive_rows(rows, source=source, policy=policy, approve=True)

            crash = steps.Step.REQUEST_MOVED if day == 98 and policy == "gdpr" else None
            results = office.do(receive, crash) if rows else []
            decide(office, draw, [r.request for r in results], policy, held)
        for request, review in list(held.items()):
            if office.now.date() >= review - timedelta(days=7):
                office.do(lambda store, request=request: release(store, request))
                del held[request]
        if day % EVERY == 0:
            finish_what_waits(office)
            crash = next(crashes, None) if day % (4 * EVERY) == 0 else None
            office.do(lambda store: store.run_requests(build=False), crash)
            assert not [deadline for deadline in office.store.deadlines() if deadline.late]
    store = office.store
    store.build()
    states = Counter(entry.state for entry in store.requests())
    assert set(states) == {"completed", "refused", "withdrawn"}
    assert sum(states.values()) == REQUESTS
    assert min(states.values()) >= 20
    assert office.crashes == len(CRASHES) + 2
    done = {entry.id for entry in store.requests(["completed"])}
    receipts = store.receipts()
    assert len(receipts) == len(done)
    assert {entry.request_id for entry in receipts} == done
    assert Counter(entry.policy for entry in store.requests())["ccpa"] > 2000
    actions = Counter(step.action for _, step in dockets.transitions_between(store.ledger, "2026", "2028"))
    assert min(actions[name] for name in ("hold", "release", "extend", "acknowledge", "ask_identity")) >= 3
    report = audit(store, replay=2)
    assert report.failed == (), [check.sentence for check in report.checks if check.id in report.failed]
    assert report.level == 5
    store.close()


def decide(office: Office, draw: Any, requests: list[str], policy: str, held: dict[str, date]) -> None:
    """Do with a day's requests what an officer does: most are approved already, some are not that simple."""
    for request in requests:
        lot = draw.random()
        if lot < 0.007:
            office.do(lambda store, request=request: store.refuse(request, reason="excessive"))
        elif lot < 0.014:
            office.do(lambda store, request=request: store.withdraw(request))
        elif lot < 0.02:
            reason = "complexity" if policy == "gdpr" else "reasonably_necessary"
            office.do(lambda store, request=request, reason=reason: store.extend(request, reason=reason))
        elif lot < 0.022:
            review = office.now.date() + timedelta(days=40)
            crash, office.hold_crash = office.hold_crash, None
            office.do(lambda store, request=request, review=review: hold(store, request, review), crash)
            held[request] = review


def hold(store: Store, request: str, review: date) -> None:
    if store.request(request).state != "on_hold":
        store.hold(request, basis="legal_claims", approver="ann", review=review)


def release(store: Store, request: str) -> None:
    if store.request(request).state == "on_hold":
        store.release(request)


def finish_what_waits(office: Office) -> None:
    """Ask who is not known yet, and approve whom the last round asked."""
    for entry in office.store.requests(["awaiting_identity"]):
        office.do(lambda store, entry=entry: store.approve(entry.id, identity="email_link"))
    for entry in office.store.requests(["received"]):
        office.do(lambda store, entry=entry: store.ask_identity(entry.id))
    # California wants every request confirmed within ten business days, whatever becomes of it.
    for entry in office.store.requests(["awaiting_identity", "on_hold"]):
        if entry.acknowledge_by and not entry.acknowledged_at:
            office.do(lambda store, entry=entry: store.acknowledge(entry.id))
