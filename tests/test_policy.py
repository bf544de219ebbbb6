"""Policies are data that can be checked, and their clocks count as the laws do."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from unlearnd import policy as policy_module
from unlearnd.cli import main
from unlearnd.clocks import dates_of, day_of, end_of, is_working_day, paused_days
from unlearnd.errors import InputError, NotFoundError, RefusedError
from unlearnd.policy import (
    Part,
    Policy,
    check_file,
    differences,
    file_schema,
    load_policy,
    policy_files,
    policy_from_json,
    read_file,
    shipped_folder,
    with_holidays,
)

NAMES = sorted(policy_files())
SHIPPED = {name: load_policy(name) for name in NAMES}
OWN = """
apiVersion: unlearnd.policy/v1
id: {id}
version: "1"
extends: gdpr
title: Ours
not_legal_advice: true
law: {{name: "Regulation (EU) 2016/679", reviewed_on: 2026-11-16}}
"""


def own(folder: Path, more: str = "", name: str = "ours") -> Path:
    """Write a policy of one's own that extends gdpr."""
    path = folder / f"{name}.yaml"
    path.write_text(OWN.format(id=name) + more)
    return path


def parts_of(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object of a policy with its path."""
    if isinstance(value, dict):
        yield path, value
        for key, inner in value.items():
            yield from parts_of(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from parts_of(inner, f"{path}[{number}]")


def test_the_policies_that_the_issue_names_are_there() -> None:
    expected = {"default", "gdpr", "uk_gdpr", "ccpa", "pipeda", "quebec_law25", "authority_order"}
    assert set(NAMES) == expected


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_a_policy_carries_its_citation_and_the_file_its_day_of_review(name: str) -> None:
    check_file(shipped_folder() / f"{name}.yaml")
    assert read_file(shipped_folder() / f"{name}.yaml")["law"]["reviewed_on"] >= date(2026, 11, 16)
    # `build` and `placement` hold the operator's own numbers beside one citation; every legal number is a `value`.
    for path, part in parts_of(SHIPPED[name].as_json()):
        if "value" in part:
            assert part.get("cite"), f"{name}{path} has a value and no citation"


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_says_that_it_is_not_legal_advice(name: str) -> None:
    text = (shipped_folder() / f"{name}.yaml").read_text()
    assert "Not legal advice" in text.split("apiVersion")[0]
    assert SHIPPED[name].not_legal_advice


def test_no_citation_of_another_law_is_left_over_from_what_a_policy_extends() -> None:
    for _path, part in parts_of(SHIPPED["uk_gdpr"].as_json()):
        cite = part.get("cite", "")
        assert "GDPR" not in cite.replace("UK GDPR", ""), cite
    for name in ("ccpa", "pipeda", "quebec_law25"):
        for path, part in parts_of(SHIPPED[name].as_json()):
            assert "GDPR" not in part.get("cite", ""), f"{name}{path}"


def test_the_schema_that_is_shipped_is_that_of_the_models() -> None:
    assert json.loads((shipped_folder() / "schema.json").read_text()) == json.loads(json.dumps(file_schema()))


def test_a_policy_survives_being_kept_as_json() -> None:
    for policy in SHIPPED.values():
        again = policy_from_json(json.loads(json.dumps(policy.as_json())))
        assert again == policy
        assert again.digest == policy.digest


def test_policies_differ_in_their_digests_and_a_policy_cannot_be_changed() -> None:
    assert len({policy.digest for policy in SHIPPED.values()}) == len(NAMES)
    with pytest.raises(ValueError, match="frozen"):
        SHIPPED["gdpr"].clock.respond_within.value = 2


# The deadline cases of the law notes: weekends roll, no country's holidays are assumed.


@pytest.mark.parametrize(
    ("received", "due", "extended"),
    [
        ("2026-01-31", "2026-03-02", "2026-04-30"),
        ("2026-03-05", "2026-04-06", "2026-06-05"),
        ("2026-11-30", "2026-12-30", "2027-03-01"),
        ("2028-01-30", "2028-02-29", "2028-05-01"),
        # leap days and year ends
        ("2027-01-31", "2027-03-01", "2027-04-30"),
        ("2028-02-29", "2028-03-29", "2028-05-29"),
        ("2027-11-29", "2027-12-29", "2028-02-29"),
        ("2026-12-31", "2027-02-01", "2027-03-31"),
        ("2100-01-29", "2100-03-01", "2100-04-29"),
    ],
)
def test_a_month_of_the_gdpr_ends_as_regulation_1182_71_counts(received: str, due: str, extended: str) -> None:
    dates = dates_of(SHIPPED["gdpr"], date.fromisoformat(received))
    assert (str(dates.due), str(dates.extended_due)) == (due, extended)


@pytest.mark.parametrize(
    ("received", "acknowledge", "due", "extended"),
    [
        ("2026-01-02", "2026-01-16", "2026-02-16", "2026-04-02"),
        ("2026-07-03", "2026-07-17", "2026-08-17", "2026-10-01"),
        # Thanksgiving and the day after are no business days in California; New Year neither.
        ("2026-11-20", "2026-12-08", "2027-01-04", "2027-02-18"),
        ("2026-12-23", "2027-01-08", "2027-02-06", "2027-03-23"),
    ],
)
def test_california_counts_days_and_business_days(received: str, acknowledge: str, due: str, extended: str) -> None:
    dates = dates_of(SHIPPED["ccpa"], date.fromisoformat(received))
    assert (str(dates.acknowledge_by), str(dates.due), str(dates.extended_due)) == (acknowledge, due, extended)


def test_canada_counts_thirty_days_and_thirty_more() -> None:
    dates = dates_of(SHIPPED["pipeda"], date(2026, 2, 10))
    assert (str(dates.due), str(dates.extended_due)) == ("2026-03-12", "2026-04-11")
    assert dates_of(SHIPPED["quebec_law25"], date(2026, 2, 10)).extended_due is None


def test_a_deadline_on_easter_monday_rolls_where_the_country_keeps_it() -> None:
    assert str(dates_of(with_holidays(SHIPPED["gdpr"], "DE"), date(2026, 3, 5)).due) == "2026-04-07"
    # Scotland works on Easter Monday; in England and Wales it is a bank holiday.
    assert str(dates_of(with_holidays(SHIPPED["uk_gdpr"], "GB-SCT"), date(2026, 3, 6)).due) == "2026-04-06"
    assert str(dates_of(with_holidays(SHIPPED["uk_gdpr"], "GB-ENG"), date(2026, 3, 6)).due) == "2026-04-07"


def test_british_bank_holidays_at_christmas_are_rolled_over() -> None:
    # The Commissioner's own example: the 25th and 26th are bank holidays, and in 2026 the 26th is made up for.
    assert str(dates_of(SHIPPED["uk_gdpr"], date(2026, 11, 25)).due) == "2026-12-29"


def test_a_day_ends_where_the_policy_is_at_home() -> None:
    california, brussels = SHIPPED["ccpa"], SHIPPED["gdpr"]
    night = datetime(2026, 7, 2, 6, 30, tzinfo=UTC)
    assert str(day_of(california, night)) == "2026-07-01"
    assert str(day_of(brussels, datetime(2026, 7, 1, 22, 30, tzinfo=UTC))) == "2026-07-02"
    assert end_of(california, date(2026, 7, 1)) == datetime(2026, 7, 2, 6, 59, tzinfo=UTC)
    assert end_of(brussels, date(2026, 12, 1)) == datetime(2026, 12, 1, 22, 59, tzinfo=UTC)


DAYS = st.dates(date(1990, 1, 1), date(2200, 12, 31))
POLICIES = st.sampled_from([*SHIPPED.values(), with_holidays(SHIPPED["gdpr"], "DE-BY")])


@given(POLICIES, DAYS, st.integers(0, 400))
def test_a_deadline_never_falls_before_the_clock_allows(policy: Any, received: date, pause: int) -> None:
    dates = dates_of(policy, received, pause)
    first, more = policy.clock.respond_within, policy.clock.extension
    shortest = {"day": 1, "month": 28}
    assert dates.due - received >= timedelta(days=first.value * shortest[first.unit] + pause)
    # Nor more than a rule allows: the longest month, and the longest run of days that are no working days.
    assert dates.due - received <= timedelta(days=first.value * 31 + pause + 10)
    if more:
        assert dates.extended_due is not None
        assert dates.extended_due > dates.due
        assert dates.extend_by is not None
        assert dates.extend_by <= dates.due
    if policy.clock.acknowledge_within:
        assert dates.acknowledge_by is not None
        assert is_working_day(dates.acknowledge_by, policy.clock.counting)
        assert received < dates.acknowledge_by < dates.due


@given(POLICIES, DAYS, st.integers(0, 400), st.integers(0, 30))
def test_a_pause_never_shortens_a_deadline_and_a_longer_one_never_less(
    policy: Any, received: date, pause: int, longer: int
) -> None:
    without, some, more = (dates_of(policy, received, days) for days in (0, pause, pause + longer))
    assert without.due <= some.due <= more.due
    assert without.acknowledge_by == more.acknowledge_by
    if some.extended_due:
        assert without.extended_due is not None
        assert more.extended_due is not None
        assert without.extended_due <= some.extended_due <= more.extended_due


@given(POLICIES, DAYS, st.integers(0, 400))
def test_a_pause_never_gives_more_than_a_clock_that_begins_after_it(policy: Any, received: date, pause: int) -> None:
    paused, anew = dates_of(policy, received, pause), dates_of(policy, received + timedelta(days=pause))
    assert paused.due <= anew.due
    assert paused.refuse_by <= anew.refuse_by
    assert (paused.extended_due or paused.due) <= (anew.extended_due or anew.due)
    assert (paused.extend_by or paused.due) <= (anew.extend_by or anew.due)


def test_a_month_that_begins_once_identity_is_confirmed_may_be_february() -> None:
    # UK GDPR Art. 12A: proof was asked for at once and came on 4 February. 15 February and 20 days more would be late.
    assert str(dates_of(SHIPPED["uk_gdpr"], date(2027, 1, 15), 20).due) == "2027-03-04"


@given(POLICIES, DAYS)
def test_who_asks_later_is_never_due_earlier(policy: Any, received: date) -> None:
    today, tomorrow = dates_of(policy, received), dates_of(policy, received + timedelta(days=1))
    assert today.due <= tomorrow.due
    assert (today.extended_due or today.due) <= (tomorrow.extended_due or tomorrow.due)


@given(POLICIES, DAYS)
def test_a_deadline_falls_on_no_day_that_rolls_over(policy: Any, received: date) -> None:
    due = dates_of(policy, received).due
    rolling = policy.clock.counting.roll_forward_on
    assert {5: "saturday", 6: "sunday"}.get(due.weekday()) not in rolling


def test_a_pause_counts_the_days_between_its_ends() -> None:
    at = datetime(2026, 5, 4, 9, tzinfo=UTC)
    policy = SHIPPED["gdpr"]
    assert paused_days(policy, [(at, at + timedelta(hours=3))]) == 0
    assert paused_days(policy, [(at, at + timedelta(days=3)), (at, at + timedelta(days=1))]) == 4


# Files of one's own.


def test_an_own_policy_extends_a_shipped_one_key_by_key(tmp_path: Path) -> None:
    own(tmp_path, 'clock: {counting: {holidays: {country: "DE"}}}\nbuild: {when: degraded, constituents: 3}\n')
    ours = load_policy("ours", tmp_path)
    assert str(dates_of(ours, date(2026, 3, 5)).due) == "2026-04-07"
    assert ours.clock.counting.cite == SHIPPED["gdpr"].clock.counting.cite
    assert ours.build.constituents == 3
    changed = {key for key, _, _ in differences(SHIPPED["gdpr"], ours)}
    assert {"build.when", "build.constituents", "clock.counting.holidays.country", "title"} <= changed
    assert not any(key.startswith("exemptions") for key in changed)


def test_erasure_probabilities_by_group_are_read(tmp_path: Path) -> None:
    own(tmp_path, 'placement: {erasure_probability: {"NO": 0.25, "DE": 1e-6}, cite: "operator\'s own"}\n')
    assert dict(load_policy("ours", tmp_path).placement.erasure_probability) == {"NO": 0.25, "DE": 1e-6}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("clcok: {}\n", "clcok: there is no such key"),
        ("clock: {respond_within: {value: 1, unit: fortnight}}\n", "clock.respond_within.unit"),
        ("clock: {respond_within: {value: true}}\n", "clock.respond_within.value"),
        ("clock: {respond_within: {cite: ''}}\n", "clock.respond_within.cite"),
        ("clock: {counting: {timezone: Mars/Olympus}}\n", "no time zone 'Mars/Olympus'"),
        ('clock: {counting: {holidays: {country: "XX"}}}\n', "no holidays are known for country 'XX'"),
        ('clock: {counting: {holidays: {country: "DE", subdivision: "ZZ"}}}\n', "'ZZ' in 'DE'"),
        ("clock: {counting: {holidays: {country: NO}}}\n", "clock.counting.holidays.country"),
        ("clock: {extension: {unit: day}}\n", "in the unit of the period"),
        ("build: {when: degraded}\n", "takes constituents, not nothing"),
        ("build: {when: now, floor: 0.5}\n", "takes nothing else, not floor"),
        ('placement: {erasure_probability: {"DE": 1.5}}\n', "placement.erasure_probability.DE"),
        ("placement: {erasure_probability: {NO: 0.5}}\n", "put it in quotes"),
        ("identity: {keep_proof: true}\n", "identity.keep_proof"),
        ("not_legal_advice: false\n", "is there twice"),
        ("title: again\n", "'title' is there twice"),
        ("exemptions: []\nrefusal: {reasons: []}\n", "refusal.reasons"),
        ("x: [", "is not YAML"),
        ("x: !!python/object/apply:os.system ['true']\n", "is not YAML"),
    ],
)
def test_what_is_wrong_with_a_policy_is_one_sentence_that_names_file_and_key(
    tmp_path: Path, more: str, says: str
) -> None:
    path = own(tmp_path, more)
    with pytest.raises(InputError) as caught:
        load_policy("ours", tmp_path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_policies_in_a_circle_unknown_ones_and_stolen_names_are_refused(tmp_path: Path) -> None:
    own(tmp_path, name="a").write_text(OWN.format(id="a").replace("gdpr", "b"))
    own(tmp_path, name="b").write_text(OWN.format(id="b").replace("gdpr", "a"))
    with pytest.raises(InputError, match="in a circle: a → b → a"):
        load_policy("a", tmp_path)
    own(tmp_path, name="c").write_text(OWN.format(id="c").replace("gdpr", "nobody"))
    with pytest.raises(InputError, match="extends 'nobody'"):
        load_policy("c", tmp_path)
    own(tmp_path, name="d").write_text(OWN.format(id="other"))
    with pytest.raises(InputError, match="must be the file's name, 'd'"):
        load_policy("d", tmp_path)
    with pytest.raises(NotFoundError, match="no policy 'gdrp'; there are: "):
        load_policy("gdrp")
    own(tmp_path, name="gdpr").write_text(OWN.format(id="gdpr"))
    with pytest.raises(InputError, match="call it something else"):
        load_policy("gdpr", tmp_path)


def test_a_file_must_say_itself_when_it_was_reviewed(tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text("apiVersion: unlearnd.policy/v1\nid: short\nextends: gdpr\n")
    with pytest.raises(InputError, match="it must say itself: law"):
        check_file(path)


# The commands.


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(main, ["policies", *arguments])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if "--json" in arguments and not code else result.output


def test_due_shows_a_clock_at_work() -> None:
    shown = run("due", "gdpr", "--received", "2026-01-31", "--json")
    assert (shown["due"], shown["extended_due"], shown["acknowledge_by"]) == ("2026-03-02", "2026-04-30", None)
    assert run("due", "ccpa", "--received", "2026-01-02", "--extended", "--json")["acknowledge_by"] == "2026-01-16"
    assert "2026-04-30 (Thursday)" in run("due", "gdpr", "--received", "2026-01-31", "--extended")
    assert run("due", "gdpr", "--received", "2026-03-05", "--country", "DE", "--json")["due"] == "2026-04-07"
    assert run("due", "gdpr", "--received", "2026-01-31", "--paused-days", "10", "--json")["due"] == "2026-03-10"


def test_wrong_questions_get_one_sentence() -> None:
    assert "knows no extension" in run("due", "default", "--received", "2026-01-31", "--extended", code=1)
    assert "'31.1.2026' is not a day" in run("due", "gdpr", "--received", "31.1.2026", code=1)
    assert "is no day on which" in run("due", "gdpr", "--received", "9999-12-31", code=1)
    assert "no policy 'x'" in run("due", "x", "--received", "2026-01-31", code=1)
    assert "country 'XX'" in run("due", "gdpr", "--received", "2026-01-31", "--country", "xx", code=1)
    run("due", "gdpr", code=2)


def test_list_show_check_and_diff(tmp_path: Path) -> None:
    assert {entry["policy"] for entry in run("list", "--json")} == set(NAMES)
    assert "Not legal advice" in run("list")
    shown = run("show", "ccpa", "--json")
    assert shown["digest"] == SHIPPED["ccpa"].digest
    assert shown["clock"]["acknowledge_within"]["cite"] == "11 CCR 7021(a)"
    assert "respond_within" in run("show", "gdpr")
    assert all(entry["ok"] for entry in run("check", "--json"))
    own(tmp_path, "clcok: {}\n")
    assert "clcok: there is no such key" in run("check", str(tmp_path / "ours.yaml"), code=1)
    assert "no file" in run("check", str(tmp_path / "none.yaml"), code=1)
    assert {"key": "clock.respond_within.value", "gdpr": "1", "ccpa": "45"} in run("diff", "gdpr", "ccpa", "--json")
    assert "the same" in run("diff", "gdpr", "gdpr")


def test_an_old_review_is_warned_about(tmp_path: Path) -> None:
    path = own(tmp_path)
    path.write_text(path.read_text().replace("2026-11-16", "2019-01-01"))
    assert "last reviewed on 2019-01-01" in run("check", str(path))


def test_a_store_has_a_policy_and_may_add_its_own(tmp_path: Path, new_store: Any) -> None:
    store = new_store(policy="ccpa")
    assert store.policy().id == "ccpa"
    assert store.policy("gdpr").id == "gdpr"
    (store.folder / "policies").mkdir()
    own(store.folder / "policies")
    assert store.policy("ours").title == "Ours"
    assert "ours" in {entry["policy"] for entry in run("list", "--store", str(store.folder), "--json")}
    with pytest.raises(NotFoundError, match="no policy 'gdrp'"):
        new_store("other", policy="gdrp")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_citation_said_to_be_from_memory_is_one_that_the_file_makes(name: str) -> None:
    said = read_file(shipped_folder() / f"{name}.yaml")
    made = "\n".join(part["cite"] for _, part in parts_of(said) if "cite" in part)
    assert [cite for cite in said["law"].get("unread", []) if cite not in made] == []


def test_citations_from_memory_are_warned_about() -> None:
    shown = CliRunner().invoke(main, ["policies", "check", "quebec_law25", "gdpr"])
    assert "'quebec_law25' cites from memory: Civil Code of Québec art. 40" in shown.stderr
    assert "'gdpr' cites" not in shown.stderr


def models_in(part: type[Part]) -> Iterator[type[Part]]:
    yield part
    for field in part.model_fields.values():
        for kind in re.findall(r"unlearnd\.policy\.(\w+)", str(field.annotation)):
            if issubclass(inner := getattr(policy_module, kind, object), Part):
                yield from models_in(inner)


def test_every_key_of_a_policy_does_something() -> None:
    # These only say what the file is and where it is from, or can have but one value.
    told = {"api_version", "version", "title", "jurisdictions", "not_legal_advice", "law", "name", "why", "right"}
    fixed = {"keep_proof", "effect", "model_in_scope", "missing_day"}
    folder = Path(policy_module.__file__).parent
    code = "\n".join(p.read_text() for p in folder.rglob("*.py"))
    keys = {key for part in models_in(Policy) for key in part.model_fields} - told - fixed
    assert {"keep_request", "unless", "internal_target"} <= keys
    assert {key for key in keys if not re.search(rf"\w\.{key}\b", code)} == set()


def test_a_kept_policy_of_an_earlier_release_is_read_without_what_is_no_longer_said() -> None:
    kept = load_policy("gdpr")
    older = json.loads(json.dumps(kept.as_json()))
    older["fees"] = {"cite": "Art. 12(5)", "allowed": False}
    older["records"]["keep_receipt"] = {"cite": "operator's own", "years": 3}
    assert policy_from_json(older) == kept
    del older["law"]
    with pytest.raises(RefusedError, match="made by another release"):
        policy_from_json(older)
