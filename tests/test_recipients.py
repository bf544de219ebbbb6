"""Who was given models is told of erasures, and what became of requests is reported without anybody's data."""

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pluggy
import pytest
from click.testing import CliRunner

from unlearnd import hookspecs
from unlearnd.cli import main
from unlearnd.errors import InputError, NotFoundError, PluginError, RefusedError
from unlearnd.hookspecs import hookimpl
from unlearnd.report import as_csv, as_html
from unlearnd.store import Store

MONDAY = datetime(2026, 6, 1, 9, tzinfo=UTC)


class Hands:
    """A clock whose hands a test moves."""

    def __init__(self) -> None:
        self.now = MONDAY

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def store(new_store: Callable[..., Store], hands: Hands, people: Any, add: Any, fit: Any) -> Store:
    made = new_store(policy="gdpr", clock=hands)
    add(made, people())
    fit(made)
    return made


def run(store: Store, *arguments: str) -> Any:
    return CliRunner().invoke(main, ["--store", str(store.folder), *arguments])


def bring(store: Store, tell: Callable[..., Any]) -> None:
    """Have a plugin besides those installed that tells recipients."""

    class Mail:
        @hookimpl
        def recipient_told(self, recipient: str, model: str) -> Any:
            return tell(recipient, model)

    manager = pluggy.PluginManager("unlearnd")
    manager.add_hookspecs(hookspecs)
    for name, plugin in store.plugins.manager.list_name_plugin():
        manager.register(plugin, name=name)
    manager.register(Mail(), name="mail")
    store.plugins = replace(store.plugins, manager=manager)


def test_who_was_given_a_model_before_an_erasure_is_to_be_told_and_nobody_else(store: Store, hands: Hands) -> None:
    before = store.add_recipient("Acme Ltd", model="m")
    left = store.add_recipient("Gone GmbH", model="m")
    hands.now += timedelta(days=1)
    store.end_recipient(left.id)
    hands.now += timedelta(days=1)
    (outcome,) = store.erase(["u1"]).outcomes
    hands.now += timedelta(days=1)
    store.add_recipient("Later BV", model="m")
    (telling,) = store.tellings()
    assert (telling.recipient, telling.requests, telling.owed) == (before, (outcome.request,), True)
    assert store.tellings(outcome.request) == [telling]
    # Nothing was found, nobody need be told.
    (nothing,) = store.erase(["nobody"]).outcomes
    assert store.tellings(nothing.request) == []


def test_a_recipient_is_told_of_a_model_destroyed_by_an_order(store: Store) -> None:
    store.add_recipient("Acme Ltd", model="m")
    (outcome,) = store.erase_model("m").outcomes
    assert [telling.requests for telling in store.tellings()] == [(outcome.request,)]


def test_notices_in_the_box_are_written_and_not_said_to_be_sent(store: Store) -> None:
    whom = store.add_recipient("Acme Ltd", model="m")
    (outcome,) = store.erase(["u1"]).outcomes
    (told,) = store.tell_recipients()
    assert (told.outcome, told.owed) == ("written", False)
    (file,) = (store.folder / "notices").iterdir()
    said = json.loads(file.read_text())
    assert (said["to"], said["model"], said["receipts"]) == ("Acme Ltd", "m", [outcome.request])
    assert store.tell_recipients() == []
    sent = store.record_notice(whom.id, outcome.request, "acknowledged", actor="ann")
    assert (sent.outcome, sent.reason) == ("acknowledged", "ann")
    with pytest.raises(InputError, match="no outcome 'shouted'; there are: written, sent"):
        store.record_notice(whom.id, outcome.request, "shouted")


def test_a_plugin_that_fails_is_asked_again_and_one_that_answers_comes_before_the_box(store: Store) -> None:
    said: list[Any] = [ConnectionError("acme@example.org is down"), None]
    store.add_recipient("Acme Ltd", model="m")
    store.erase(["u1"])

    def tell(recipient: str, model: str) -> Any:
        if isinstance(said[0], Exception):
            raise said[0]
        return said[0]

    bring(store, tell)
    (told,) = store.tell_recipients()
    assert (told.outcome, told.reason, told.owed) == ("failed", "mail", True)
    said[0] = "sent"
    (told,) = store.tell_recipients()
    assert (told.outcome, told.reason, told.owed) == ("sent", "mail", False)
    assert not (store.folder / "notices").exists()
    store.erase(["u2"])
    said[0] = "perhaps"
    with pytest.raises(PluginError, match="an outcome that there is not"):
        store.tell_recipients()
    said[0] = None
    assert [told.outcome for told in store.tell_recipients()] == ["written"]


TELLER = """
import sys, time
from dataclasses import replace
import pluggy, unlearnd
from unlearnd import hookimpl, hookspecs
class Mail:
    @hookimpl
    def recipient_told(self, recipient, model):
        with open(sys.argv[2], "a") as file:
            file.write(recipient + chr(10))
        time.sleep(0.2)
        return "sent"
with unlearnd.open_store(sys.argv[1]) as store:
    manager = pluggy.PluginManager("unlearnd")
    manager.add_hookspecs(hookspecs)
    manager.register(Mail(), name="mail")
    store.plugins = replace(store.plugins, manager=manager)
    print("ready", flush=True)
    sys.stdin.readline()
    print(len(store.tell_recipients()))
"""


@pytest.mark.both_databases
def test_two_who_tell_at_once_tell_everybody_once(store: Store, start_python: Any, tmp_path: Path) -> None:
    names = [f"Company {number}" for number in range(4)]
    for name in names:
        store.add_recipient(name, model="m")
    store.erase(["u1"], build=False)
    tellers = [start_python(TELLER, store.folder, tmp_path / "sent") for _ in range(2)]
    for teller in tellers:
        assert teller.stdout.readline() == "ready\n"
    for teller in tellers:
        teller.stdin.write("go\n")
        teller.stdin.flush()
    said = [teller.communicate(timeout=60) for teller in tellers]
    assert sorted(out.strip() for out, _ in said) == ["0", "4"], said
    assert sorted((tmp_path / "sent").read_text().splitlines()) == names


def test_who_has_a_model_is_recorded_once_and_unknown_ones_are_refused(store: Store, hands: Hands) -> None:
    first = store.add_recipient("Acme Ltd", model="m", given=date(2026, 5, 1))
    assert store.add_recipient("Acme Ltd", model="m") == first
    assert first.given_at == "2026-05-01T00:00:00Z"
    assert store.recipients() == [first]
    with pytest.raises(NotFoundError, match="no model 'nothing'"):
        store.add_recipient("Acme Ltd", model="nothing")
    with pytest.raises(NotFoundError, match="no recipient's id begins with 'zzz'"):
        store.end_recipient("zzz")
    with pytest.raises(InputError, match="cannot have been given on 2026-06-02"):
        store.add_recipient("B", model="m", given=date(2026, 6, 2))
    with pytest.raises(InputError, match="1 to 100 characters in one line"):
        store.add_recipient("two\nlines", model="m")
    (entry,) = store.receive(["u3"])
    with pytest.raises(RefusedError, match="need not be told"):
        store.record_notice(first.id, entry.id, "sent")


def test_only_what_the_policy_takes_as_a_reason_excuses_from_telling(store: Store) -> None:
    acme = store.add_recipient("Acme Ltd", model="m", given=date(2026, 5, 1))
    (order,) = store.erase_model("m", policy="authority_order").outcomes
    with pytest.raises(RefusedError, match="a recipient must be told, and 'impossible' is no reason not to"):
        store.record_notice(acme.id, order.request, "impossible")
    assert store.record_notice(acme.id, order.request, "sent").outcome == "sent"


def test_nobody_is_to_be_told_where_the_policy_does_not_want_it(store: Store) -> None:
    store.add_recipient("Acme Ltd", model="m", given=date(2026, 5, 1))
    (store.folder / "policies").mkdir()
    (store.folder / "policies" / "quiet.yaml").write_text(
        "apiVersion: unlearnd.policy/v1\nid: quiet\nversion: '1'\nextends: default\ntitle: Quiet\n"
        "not_legal_advice: true\nlaw: {name: ours, reviewed_on: 2026-11-18}\nnotify: {recipients: {upon: []}}\n"
    )
    store.erase(["u1"], policy="quiet")
    assert store.tellings() == []
    store.erase(["u2"], policy="gdpr")
    assert len(store.tellings()) == 1


def test_the_commands_go_from_giving_a_model_to_a_recorded_answer(store: Store) -> None:
    assert "Nobody was given a model" in run(store, "recipients", "list").stdout
    assert run(store, "recipients", "add", "Acme Ltd", "--model", "m", "--given", "2026-05-01").exit_code == 0
    erased = run(store, "erase", "--user", "u1")
    assert "Others were given models that this concerns" in erased.stdout
    assert "Acme Ltd" in erased.stdout
    told = json.loads(run(store, "erase", "--user", "u2", "--json").stdout)
    request = told["outcomes"][0]["request"]
    assert [one["name"] for one in told["recipients"]] == ["Acme Ltd"]
    assert "to be told" in run(store, "requests", "show", request).stdout
    (listed,) = json.loads(run(store, "recipients", "list", "--json").stdout)
    assert listed["owed"] == 2
    done = run(store, "recipients", "tell")
    assert (done.exit_code, done.stdout.count("written")) == (0, 2)
    assert "2 notices written to" in done.stderr
    assert "Nobody is to be told." in run(store, "recipients", "tell").stdout
    recorded = run(store, "recipients", "record", listed["id"][:8], request, "--outcome", "acknowledged", "--by", "ann")
    assert recorded.exit_code == 0
    shown = json.loads(run(store, "requests", "show", request, "--json").stdout)
    assert [(one["outcome"], one["by"]) for one in shown["recipients"]] == [("acknowledged", "ann")]
    assert "has not had the model" in run(store, "recipients", "end", listed["id"]).stdout
    missing = run(store, "recipients", "add", "Acme Ltd", "--model", "nothing")
    assert (missing.exit_code, missing.stderr.count("\n")) == (1, 1)


# The report.


@pytest.fixture
def busy(store: Store, hands: Hands) -> Store:
    """Requests of June and July: two completed, one of them late; refused, withdrawn, double, held, extended, open."""
    entries = store.receive([f"u{n}" for n in range(7)])
    store.receive(["u6"])
    store.add_recipient("Acme Ltd", model="m")
    hands.now += timedelta(days=4)
    store.approve(entries[0].id)
    store.run_requests(build=False)
    store.refuse(entries[1].id, reason="excessive")
    store.withdraw(entries[2].id)
    store.extend(entries[3].id, reason="complexity")
    store.hold(entries[4].id, basis="legal_claims", approver="ann", review=date(2026, 8, 1))
    hands.now += timedelta(days=36)
    store.approve(entries[5].id)
    store.run_requests(build=False)
    store.tell_recipients()
    return store


def test_a_report_counts_states_deadlines_and_days_by_policy(busy: Store) -> None:
    june = busy.report(date(2026, 6, 1), date(2026, 6, 30))
    gdpr, whole = june.policies
    assert (gdpr.policy, whole.policy) == ("gdpr", "all")
    assert (gdpr.received, gdpr.completed, gdpr.refused, gdpr.withdrawn, gdpr.duplicate) == (8, 1, 1, 1, 1)
    assert (gdpr.on_time, gdpr.late, gdpr.extended, gdpr.held, gdpr.open, gdpr.overdue) == (2, 0, 1, 1, 4, 0)
    assert (gdpr.median_days, gdpr.slowest_tenth_days, gdpr.longest_days) == (4.0, 4.0, 4.0)
    assert june.states == {"completed": 1, "duplicate": 1, "on_hold": 1, "received": 3, "refused": 1, "withdrawn": 1}
    assert june.reasons == {("extend", "complexity"): 1, ("hold", "legal_claims"): 1, ("refuse", "excessive"): 1}
    assert (june.asked, june.notices) == ({"user": 8}, {"written": 1})
    both = busy.report(date(2026, 6, 1)).policies[-1]
    assert (both.completed, both.on_time, both.late) == (2, 2, 1)
    # u3 has more time, u4's clock stands still, u6 is late.
    assert (both.open, both.overdue, both.median_days, both.longest_days) == (3, 1, 4.0, 40.0)
    july = busy.report(date(2026, 7, 1), date(2026, 7, 31)).policies[-1]
    assert (july.received, july.completed, july.late) == (0, 1, 1)
    with pytest.raises(InputError, match="has no days"):
        busy.report(date(2026, 6, 2), date(2026, 6, 1))


def test_a_report_beyond_today_calls_nothing_overdue_that_is_due_later(busy: Store, hands: Hands) -> None:
    year = busy.report(date(2026, 6, 1), date(2026, 12, 31)).policies[-1]
    assert (year.open, year.overdue) == (3, 1)
    hands.now += timedelta(days=60)
    assert busy.report(date(2026, 6, 1), date(2026, 12, 31)).policies[-1].overdue == 2


def test_a_report_holds_nobodys_data_in_any_form(busy: Store, tmp_path: Path) -> None:
    found = busy.report(date(2026, 6, 1))
    forms = [as_csv(found), as_html(found), run(busy, "report", "--from", "2026-06-01", "--json").stdout]
    forms.append(run(busy, "report", "--from", "2026-06-01", "--to", "2026-07-31").stdout)
    secret = [entry.id[:12] for entry in busy.requests()] + [h.hex()[:12] for h in busy.keys.handles(["u1", "u2"])]
    for form in forms:
        assert "complexity" in form
        assert not any(word in form for word in (*secret, "Acme", "ann"))
        assert not re.search(r"\bu\d\b", form)


def test_a_report_is_lines_for_a_spreadsheet_or_a_page_that_prints_without_a_script(
    busy: Store, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    made = run(busy, "report", "--from", "2026-06-01", "--to", "2026-06-30", "--format", "html", "--output", str(page))
    assert (made.exit_code, made.stdout) == (0, "")
    text = page.read_text()
    assert "<script" not in text
    assert "http:" not in text
    assert "https:" not in text
    assert "@media print" in text
    open_tags: list[str] = []

    class Balanced(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag != "meta":
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Balanced().feed(text)
    assert open_tags == []
    told = run(busy, "report", "--from", "2026-06-01", "--to", "2026-06-30", "--format", "csv")
    rows = {
        (row["section"], row["name"], row["measure"]): row["value"] for row in csv.DictReader(io.StringIO(told.stdout))
    }
    assert rows["policy", "gdpr", "received"] == "8"
    assert rows["refuse", "excessive", "count"] == "1"
    wrong = run(busy, "report", "--from", "yesterday")
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (1, 1)
    bad = run(busy, "report", "--from", "2026-06-01", "--format", "csv", "--output", str(tmp_path / "no" / "where"))
    assert (bad.exit_code, bad.stderr.count("\n")) == (1, 1)


def test_a_report_of_an_empty_store_is_empty_and_no_error(new_store: Callable[..., Store]) -> None:
    store = new_store()
    assert [one.received for one in store.report(date(2026, 1, 1)).policies] == [0]
    assert run(store, "report", "--from", "2026-01-01").exit_code == 0
