"""plan."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from unlearnd.cli.options import opened, store_option
from unlearnd.cli.policies import own_folder
from unlearnd.cli.risks import policy_option, read_risks, risk_option
from unlearnd.cli.show import note, print_json, print_table, times

if TYPE_CHECKING:
    from unlearnd.planner import Option, Plan, Question


@click.command()
@click.option("--points", type=int, metavar="N", help="Points of the dataset.")
@click.option("--model", metavar="NAME", help="Plan for a model of a store, with what was measured there.")
@click.option("--requests", type=float, metavar="K", help="Requests that one build takes together.  [default: 1]")
@click.option("--requests-per-day", "per_day", type=float, metavar="X", help="Requests that come in, on average.")
@click.option("--every", type=float, metavar="DAYS", help="Days between builds.  [default: 1]")
@click.option("--shards", type=int, metavar="S", help="Only this many shards.")
@click.option("--slices", type=int, metavar="R", help="Only this many slices.")
@click.option("--keep", metavar="N|all", help="Only so many checkpoints kept of each shard.")
@click.option("--epochs", type=float, metavar="N", help="Epochs a constituent would train unsliced.  [default: 10]")
@click.option("--schedule", metavar="NAME", help="Epochs per slice: uniform (the paper's) or equal-work.")
@click.option("--points-per-user", "points_each", type=float, metavar="N", help="Points of one user.  [default: 1]")
@click.option("--unit", type=click.Choice(["user", "point"]), help="What is placed together.  [default: user]")
@policy_option
@risk_option
@click.option("--state-mb", type=float, metavar="MB", help="The size of one checkpoint.")
@click.option("--samples-per-second", "rate", type=float, metavar="X", help="How fast training is.")
@click.option("--compute-price", type=float, metavar="X", help="What an hour of training costs.")
@click.option("--storage-price", type=float, metavar="X", help="What a gigabyte costs for a month.")
@click.option("--plot", metavar="FILE", help="Draw speed-up against requests, shards and slices: .png or .svg.")
@store_option
def plan(
    points: int | None,
    model: str | None,
    per_day: float | None,
    keep: str | None,
    unit: str | None,
    policy: str | None,
    risk: tuple[str, ...],
    state_mb: float | None,
    rate: float | None,
    plot: str | None,
    folder: str | None,
    as_json: bool,
    **numbers: Any,
) -> None:
    """Compare numbers of shards and slices by what erasures will cost, and recommend one.

    Costs are expected samples to train again; nothing is trained and no store is needed, unless --model names one.
    """
    if points is None and model is None:
        raise click.UsageError("give --points, or --model to plan for a model of a store")
    from unlearnd.planner import make_plan  # heavy: numpy

    question = _question(
        folder,
        model,
        points=points,
        per_day=per_day,
        keep=_keep(keep),
        scattered=None if unit is None else unit == "point",
        risks=read_risks(risk, policy, own_folder(folder), needed=False) or None,
        state_bytes=None if state_mb is None else state_mb * 1e6,
        samples_per_second=rate,
        **numbers,
    )
    if plot is not None:
        from unlearnd.plots import check_plot

        check_plot(plot)
    made = make_plan(question)
    if plot is not None:
        from unlearnd.plots import draw_plan

        draw_plan(question, plot)
        note(f"Drew {plot}.")
    if as_json:
        print_json(_as_json(question, made))
        return
    _print(question, made)


def _question(folder: str | None, model: str | None, **given: Any) -> "Question":
    """Return the question: what a store knows, and what is given in its place."""
    from dataclasses import replace

    from unlearnd.planner import Question
    from unlearnd.recipes import SCHEDULES, check_schedule

    said = {name: value for name, value in given.items() if value is not None}
    check_schedule(said.get("schedule", SCHEDULES[0]))
    if model is None:
        return Question(**said)
    with opened(folder) as store:
        known = store.planning_facts(model)
    return replace(known, **said)


def _keep(given: str | None) -> int | None:
    if given is None or given == "all":
        return None
    from unlearnd.planner import read_keep  # heavy: numpy

    return read_keep(given)


def _print(question: "Question", made: "Plan") -> None:
    requests = f"{question.batch:,.4g} request{'' if question.batch == 1 else 's'}"
    often = "" if question.per_day is None else f", {question.per_day:,.4g} a day built every {question.every:,.4g}"
    rate = "" if question.samples_per_second is None else f"; {question.samples_per_second:,.0f} samples/s"
    click.echo(
        f"{question.points:,} points, {requests} in one build{often}; {question.epochs:,.4g} epochs, schedule "
        f"{question.schedule}{rate}"
    )
    columns = ["shards", "slices", "placement", "keep", "samples/erasure", "speed-up", "checkpoints"]
    extra: list[tuple[str, Any]] = []
    if question.samples_per_second is not None:
        extra.append(("s/erasure", lambda option: f"{option.seconds_per_erasure:,.3g}"))
    if question.state_bytes is not None:
        extra.append(("storage", lambda option: _size(option.storage_bytes)))
    if made.options[0].money is not None:
        extra.append(("money/month", lambda option: f"{option.money:,.{2 if option.money >= 1 else 4}f}"))
    rows = [
        (
            option.shards,
            option.slices,
            option.placement + (" *" if option == made.recommended else ""),
            "all" if option.kept is None else str(len(option.kept)),
            round(option.samples_per_erasure),
            times(option.speedup),
            option.checkpoints,
            *(show(option) for _, show in extra),
        )
        for option in made.options
    ]
    print_table([*columns, *(name for name, _ in extra)], rows)
    if made.formula_speedup is not None and made.exact_speedup is not None:
        click.echo(
            f"Placed uniformly, the paper's formulas multiply to {made.formula_speedup:.2f}×; exactly it is "
            f"{made.exact_speedup:.2f}×."
        )
    click.echo(made.sentence)


def _as_json(question: "Question", made: "Plan") -> dict[str, Any]:
    """Return a plan for a script."""
    return {
        "question": {**asdict(question), "requests": question.batch},
        "formula_speedup": made.formula_speedup,
        "exact_speedup": made.exact_speedup,
        "options": [_option_json(option) for option in made.options],
        "recommended": _option_json(made.recommended),
        "recommendation": made.sentence,
    }


def _option_json(option: "Option") -> dict[str, Any]:
    return {**asdict(option), "kept": None if option.kept is None else list(option.kept)}


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"
