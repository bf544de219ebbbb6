"""policies list, show, check, diff, due."""

from dataclasses import asdict
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unlearnd.cli.options import as_json, store_named
from unlearnd.cli.show import counted, note, print_json, print_table
from unlearnd.config import find_store, own_policies
from unlearnd.errors import InputError, NotFoundError, RefusedError

if TYPE_CHECKING:
    from unlearnd.policy import Policy

_NOT_ADVICE = "Not legal advice: hold it against the law before you rely on it."


@click.group()
def policies() -> None:
    """Show, check and compare policies: the rules and deadlines of a law, as data.

    The policies that come with unlearnd are always there; a store adds those in its own folder.
    """


@policies.command(name="list")
@click.option("--store", "folder", metavar="DIR", help="Also the policies of this store.")
@as_json
def listed(folder: str | None, as_json: bool) -> None:
    """List the policies there are."""
    from unlearnd.policy import load_policy, policy_files  # heavy: pydantic

    own = own_folder(folder)
    found = [load_policy(name, own) for name in policy_files(own)]
    for policy in found:
        _warn_if_stale(policy)
    if as_json:
        print_json([{**_head(policy), "digest": policy.digest} for policy in found])
        return
    print_table(
        ("policy", "version", "reviewed", "digest", "respond within", "title"),
        [
            (p.id, p.version, str(p.law.reviewed_on), p.digest[:12],
             counted(p.clock.respond_within.value, p.clock.respond_within.unit.replace("_", " ")), p.title)
            for p in found
        ],
    )  # fmt: skip
    click.echo(_NOT_ADVICE)


@policies.command()
@click.argument("name")
@click.option("--store", "folder", metavar="DIR", help="Also the policies of this store.")
@as_json
def show(name: str, folder: str | None, as_json: bool) -> None:
    """Show a policy whole: what it extends is in it, and every value with its citation."""
    import yaml

    from unlearnd.policy import load_policy  # heavy: pydantic

    policy = load_policy(name, own_folder(folder))
    _warn_if_stale(policy)
    _warn_if_unread(policy)
    if as_json:
        print_json({**policy.as_json(), "digest": policy.digest})
        return
    click.echo(yaml.safe_dump(policy.as_json(), sort_keys=False, allow_unicode=True, width=100), nl=False)
    click.echo(f"# digest: {policy.digest}\n# {_NOT_ADVICE}")


@policies.command()
@click.argument("files", nargs=-1, metavar="[FILE|NAME]…")
@click.option("--store", "folder", metavar="DIR", help="Also the policies of this store.")
@as_json
def check(files: tuple[str, ...], folder: str | None, as_json: bool) -> None:
    """Check policy files, or all there are: every key known, every value cited, reviewed within a year."""
    from unlearnd.policy import check_file, policy_files  # heavy: pydantic

    own = own_folder(folder)
    known = policy_files(own)
    paths = [known.get(name, Path(name)) for name in files] or list(known.values())
    found: list[dict[str, object]] = []
    wrong = 0
    for path in paths:
        try:
            policy = check_file(path, own)
        except (InputError, NotFoundError) as error:
            wrong += 1
            found.append({"file": str(path), "ok": False, "problem": str(error)})
            note(f"unlearnd: {error}")
        else:
            _warn_if_stale(policy)
            _warn_if_unread(policy)
            found.append({"file": str(path), "ok": True, "policy": policy.id, "digest": policy.digest})
    if as_json:
        print_json(found)
    else:
        for entry in found:
            if entry["ok"]:
                click.echo(f"{entry['policy']}: holds ({str(entry['digest'])[:12]})")
    if wrong:
        click.get_current_context().exit(1)


@policies.command()
@click.argument("one")
@click.argument("other")
@click.option("--store", "folder", metavar="DIR", help="Also the policies of this store.")
@as_json
def diff(one: str, other: str, folder: str | None, as_json: bool) -> None:
    """Show where two policies differ."""
    from unlearnd.policy import differences, load_policy  # heavy: pydantic

    own = own_folder(folder)
    found = differences(load_policy(one, own), load_policy(other, own))
    if as_json:
        print_json([{"key": key, one: left, other: right} for key, left, right in found])
    elif found:
        print_table(("key", one, other), found)
    else:
        click.echo("They are the same.")


@policies.command()
@click.argument("name")
@click.option("--received", required=True, metavar="DATE", help="The day a request came in, as 2026-01-31.")
@click.option("--extended", is_flag=True, help="Show the extended deadline; refuse where there is none.")
@click.option("--paused-days", type=click.IntRange(min=0), default=0, metavar="N", help="Days the clock stood still.")
@click.option("--country", metavar="CC[-SUB]", help="Count this country's public holidays, like DE, US-CA, GB-SCT.")
@click.option("--store", "folder", metavar="DIR", help="Also the policies of this store.")
@as_json
def due(
    name: str, received: str, extended: bool, paused_days: int, country: str | None, folder: str | None, as_json: bool
) -> None:
    """Show the clock of a policy at work: when a request received on a day is due."""
    from unlearnd.clocks import dates_of  # heavy: pydantic
    from unlearnd.policy import load_policy, with_holidays

    policy = load_policy(name, own_folder(folder))
    _warn_if_stale(policy)
    if country:
        policy = with_holidays(policy, country)
    dates = dates_of(policy, read_date(received), paused_days)
    if extended and dates.extended_due is None:
        raise RefusedError(f"policy '{name}' knows no extension")
    if as_json:
        shown = {key: str(value) if value else None for key, value in asdict(dates).items()}
        print_json({"policy": policy.id, "digest": policy.digest, **shown})
        return
    if dates.acknowledge_by:
        click.echo(f"Acknowledge by  {_weekday(dates.acknowledge_by)}")
    click.echo(f"Due             {_weekday(dates.due)}")
    if dates.extended_due and dates.extend_by and extended:
        click.echo(f"Extended due    {_weekday(dates.extended_due)}, if told by {_weekday(dates.extend_by)}")
    click.echo(_NOT_ADVICE)


def read_date(text: str) -> date:
    """Return a day given as YYYY-MM-DD."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InputError(f"'{text}' is not a day: write it as 2026-01-31") from None


def own_folder(folder: str | None) -> Path | None:
    """Return the folder of the policies of the store at hand; None where there is no store."""
    named = store_named(folder)
    if named is not None:
        return own_policies(named)
    try:
        return own_policies(find_store(Path.cwd()))
    except NotFoundError:
        return None


def _head(policy: "Policy") -> dict[str, object]:
    return {
        "policy": policy.id,
        "version": policy.version,
        "title": policy.title,
        "jurisdictions": list(policy.jurisdictions),
        "reviewed_on": str(policy.law.reviewed_on),
    }


def _weekday(day: date) -> str:
    return f"{day} ({day:%A})"


def _warn_if_stale(policy: "Policy") -> None:
    from unlearnd.policy import STALE_DAYS

    if (datetime.now(UTC).date() - policy.law.reviewed_on).days > STALE_DAYS:
        note(f"Policy '{policy.id}' was last reviewed on {policy.law.reviewed_on}: hold it against the law again.")


def _warn_if_unread(policy: "Policy") -> None:
    if policy.law.unread:
        listed = "; ".join(policy.law.unread)
        note(f"Policy '{policy.id}' cites from memory: {listed}. Look these up before you rely on it.")
