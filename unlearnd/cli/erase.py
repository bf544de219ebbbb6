"""erase."""

import csv
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from unlearnd.cli.evidence import write_openings
from unlearnd.cli.options import building, opened, store_option
from unlearnd.cli.recipients import print_tellings, tellings_json
from unlearnd.cli.show import build_json, counted, note, print_json, print_table, times, trained_sentence, watching
from unlearnd.errors import InputError, NotFoundError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from unlearnd.erasure import ErasurePlan, Outcome
    from unlearnd.recipients import Telling
    from unlearnd.store import Erased, Opening, Store


@click.command()
@click.option("--user", "users", multiple=True, metavar="U", help="Whose data to erase; repeat it.")
@click.option("--file", "listing", metavar="F", help="A file of users, one per line; - for standard input.")
@click.option("--column", metavar="COL", help="The file is a CSV, and this column has the users.")
@click.option("--point", "points", multiple=True, metavar="ID", help="A single point, as dataset:position; repeat it.")
@click.option("--dataset", metavar="D", help="A whole dataset, with every model trained on it. For good.")
@click.option("--model", metavar="M", help="A whole model: every checkpoint of it. For good.")
@click.option("--yes", is_flag=True, help="With --dataset or --model: do not ask whether it is meant.")
@click.option("--policy", metavar="NAME", help="Whose rules count; by default the store's.")
@click.option("--dry-run", is_flag=True, help="Show what would happen; change nothing.")
@click.option(
    "--openings", metavar="DIR", help="Write each user's opening there: private files that prove whose a receipt is."
)
@click.option("--no-build", is_flag=True, help="Do not rebuild now; models answer from their clean prefixes.")
@building
@store_option
def erase(
    users: tuple[str, ...],
    listing: str | None,
    column: str | None,
    points: tuple[str, ...],
    dataset: str | None,
    model: str | None,
    yes: bool,
    policy: str | None,
    dry_run: bool,
    openings: str | None,
    no_build: bool,
    workers: int | None,
    executor: str | None,
    device: str | None,
    folder: str | None,
    as_json: bool,
) -> None:
    """Erase users or points from every dataset and model of the store; or a whole dataset or model.

    When it returns, nothing made from their data is left. Then what was set back is trained again, unless
    --no-build. A user that is not there gives a "nothing found", not an error.

    --dataset and --model are for orders beyond one person. What they destroy is never built again, and its name stays
    taken, so they ask on a terminal whether it is meant, and need --yes elsewhere.
    """
    if dataset or model:
        if users or listing or points or openings or (dataset and model):
            raise click.UsageError("--dataset and --model are given alone: one order at a time")
        _erase_whole("dataset" if dataset else "model", dataset or model or "", policy, yes, dry_run, folder, as_json)
        return
    if yes:
        raise click.UsageError("--yes goes with --dataset or --model")
    if column and not listing:
        raise click.UsageError("--column goes with --file")
    everyone = [*users, *(_read_users(listing, column) if listing else [])]
    if not everyone and not points:
        raise click.UsageError("nobody to erase: give --user, --file or --point, or --dataset or --model")
    with opened(folder) as store:
        if dry_run:
            plan = store.plan_erasure(everyone, points)
            print_json(asdict(plan)) if as_json else _print_plan(plan)
            return
        with watching(as_json) as watch:
            erased = store.erase(
                everyone,
                points=points,
                policy=policy,
                build=False if no_build else None,
                executor=executor,
                workers=workers,
                device=device,
                watch=watch,
                hand_out=lambda found: _hand_out(openings, found),
            )
        concerned = _told_of(store, erased)
        waits = no_build or not erased.builds
        left = sum(model.samples_missing for model in store.status().models) if waits else 0
    if as_json:
        print_json(
            {
                "outcomes": [{**asdict(o), "again": o.request in erased.again} for o in erased.outcomes],
                "builds": [build_json(one) for one in erased.builds],
                "held": list(erased.held),
                "recipients": tellings_json(concerned),
            }
        )
    else:
        _print_erased(erased, no_build or bool(left), left)
        _print_recipients(concerned)
    _check_done(erased)


def _check_done(erased: "Erased") -> None:
    erased.check_destroyed()
    if erased.held:
        raise RefusedError(
            f"{counted(len(erased.held), 'request')} on hold and not carried out: {', '.join(erased.held[:3])}; "
            "`unlearnd requests release` lifts a hold"
        )
    erased.check_finished()


def _erase_whole(
    kind: str, name: str, policy: str | None, yes: bool, dry_run: bool, folder: str | None, as_json: bool
) -> None:
    """Carry out an order about a whole dataset or model, once somebody has said that it is meant."""
    with opened(folder) as store:
        plan = store.plan_erasure(**{kind: name})
        if dry_run:
            print_json(asdict(plan)) if as_json else _print_plan(plan)
            return
        if not yes:
            _ask(kind, name, plan)
        work = store.erase_dataset if kind == "dataset" else store.erase_model
        erased = work(name, policy=policy)
        concerned = _told_of(store, erased)
    if as_json:
        listed = [{**asdict(o), "again": o.request in erased.again} for o in erased.outcomes]
        told = tellings_json(concerned)
        print_json({"outcomes": listed, "builds": [], "held": list(erased.held), "recipients": told})
    else:
        for outcome in erased.outcomes:
            click.echo(_whole_sentence(kind, name, outcome, outcome.request in erased.again))
        _print_recipients(concerned)
    _check_done(erased)


def _told_of(store: "Store", erased: "Erased") -> "list[Telling]":
    """Return the recipients who must be told of what was erased just now."""
    asked = {outcome.request for outcome in erased.outcomes}
    carried = {outcome.erasure for outcome in erased.outcomes} if store.recipients() else set()
    found = [telling for erasure in sorted(carried) for telling in store.tellings(erasure=erasure)]
    return [telling for telling in found if not asked.isdisjoint(telling.requests)]


def _print_recipients(concerned: "list[Telling]") -> None:
    if concerned:
        click.echo("Others were given models that this concerns; `unlearnd recipients tell` tells them:")
        print_tellings(concerned)


def _ask(kind: str, name: str, plan: "ErasurePlan") -> None:
    """Raise `RefusedError` unless somebody at a terminal says that destroying this is meant."""
    if not sys.stdin.isatty():
        raise RefusedError(f"destroying {kind} '{name}' cannot be undone, and nobody is there to ask: pass --yes")
    models = ", ".join(model.model for model in plan.models)
    checkpoints = counted(sum(model.checkpoints for model in plan.models), "checkpoint")
    what = f"{counted(plan.points, 'point')} and " if plan.points else ""
    note(f"This destroys {what}{checkpoints}{f' of {models}' if models else ''}. It cannot be undone.")
    if click.prompt(f"Type the name of the {kind} to go on", default="", show_default=False, err=True) != name:
        raise RefusedError(f"{kind} '{name}' is as it was: another name was typed")


def _whole_sentence(kind: str, name: str, outcome: "Outcome", again: bool) -> str:
    if again:
        return f"The {kind} '{name}' was destroyed already, on {outcome.influence_removed_at}: nothing is left to do."
    points = f"{counted(outcome.points, 'point')} and " if kind == "dataset" else ""
    lost = f"{points}{counted(len(outcome.checkpoints), 'checkpoint')}"
    retired = [model for model in outcome.retired if model != name or kind == "dataset"]
    names = f" Retired: {', '.join(retired)}." if retired else ""
    return (
        f"Destroyed the {kind} '{name}': {lost}.{names} Request {outcome.request[:12]}, influence removed "
        f"{outcome.influence_removed_at}; the receipt says so."
    )


def _hand_out(folder: str | None, openings: "Mapping[str, Opening]") -> None:
    if folder:
        write_openings(folder, {name: opening.as_bytes() for name, opening in openings.items()})


def _print_plan(plan: "ErasurePlan") -> None:
    if not plan.found:
        click.echo("Nothing to erase: the store holds no such data.")
        return
    missing = f" Nothing found for {plan.not_found}." if plan.not_found else ""
    what = f"erase {counted(plan.points, 'point')} from {counted(len(plan.places), 'slice')}"
    if not plan.places:
        what = f"destroy {counted(sum(model.checkpoints for model in plan.models), 'checkpoint')}"
    click.echo(f"Would {what}.{missing} This is a dry run: nothing has changed.")
    if plan.places:
        print_table(
            ("dataset", "shard", "slice", "points"),
            [(place.dataset, place.shard, place.slice, place.points) for place in plan.places],
        )
    if plan.models:
        rows = [
            (m.model, " ".join(map(str, m.shards)), m.checkpoints, m.samples, m.from_scratch,
             times(m.from_scratch / m.samples) if m.samples else "–")
            for m in plan.models
        ]  # fmt: skip
        print_table(
            ("model", "shards", "checkpoints to destroy", "samples to retrain", "retraining all", "less by"), rows
        )


def _print_erased(erased: "Erased", no_build: bool, left: int) -> None:
    missing = sum(not outcome.found for outcome in erased.outcomes)
    if missing:
        which = "" if len(erased.outcomes) == 1 else f" for {missing} of {len(erased.outcomes)} requests"
        click.echo(f"Nothing found{which}: the store holds no such data.")
    before = [outcome for outcome in erased.outcomes if outcome.found and outcome.request in erased.again]
    if before:
        which = "This request was" if len(erased.outcomes) == 1 else f"{counted(len(before), 'request')} had been"
        when = max(outcome.influence_removed_at or "" for outcome in before)
        click.echo(f"{which} carried out already, on {when}; there was nothing new to erase.")
    found = [outcome for outcome in erased.outcomes if outcome.found and outcome.request not in erased.again]
    if not found:
        return
    lost = sum(outcome.points for outcome in found)
    destroyed = {checkpoint for outcome in found for checkpoint in outcome.checkpoints}
    click.echo(
        f"Erased {counted(lost, 'point')} of {counted(len(found), 'request')}; "
        f"{counted(len(destroyed), 'checkpoint')} destroyed."
    )
    rows = [
        (n, outcome.request[:12], outcome.points, len(outcome.slices), len(outcome.checkpoints),
         outcome.influence_removed_at or "", outcome.rebuilt_at or "not yet")
        for n, outcome in enumerate(erased.outcomes, start=1)
    ]  # fmt: skip
    print_table(("#", "request", "points", "slices", "checkpoints", "influence removed", "rebuilt"), rows)
    if no_build:
        click.echo(
            f"Not rebuilt: models answer from their clean prefixes; `unlearnd build` trains {left:,} samples."
            if left
            else "There is nothing to rebuild."
        )
    else:
        click.echo(trained_sentence(erased.builds, "Retrained"))


def _read_users(name: str, column: str | None) -> list[str]:
    """Return the users listed in a file, in order; empty lines do not count."""
    try:
        with click.open_file(name, encoding="utf-8-sig", errors="strict") as file:
            if column is None:
                listed = [line.rstrip("\r\n") for line in file]
            else:
                reader = csv.DictReader(file)
                if column not in (reader.fieldnames or ()):
                    # Without a header line the first person would pass for a column: say how many, not which.
                    raise InputError(f"{name} has no column '{column}' among its {len(reader.fieldnames or ())}")
                listed = [row[column] or "" for row in reader]
    except FileNotFoundError:
        raise NotFoundError(f"no file {name}") from None
    except UnicodeDecodeError:
        raise InputError(f"{name} is not UTF-8 text") from None
    except csv.Error:
        raise InputError(f"{name} is not a well-formed CSV file") from None
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from None
    listed = [user for user in listed if user]
    if not listed:
        raise InputError(f"{name} lists nobody")
    return listed
