"""train, build, predict, evaluate, checkpoints."""

import os
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from unlearnd.cli.options import building, opened, read_pairs, store_option
from unlearnd.cli.show import build_json, counted, note, print_json, print_table, trained_sentence, watching
from unlearnd.errors import InputError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from unlearnd.serving import Answers

aggregate_option = click.option(
    "--aggregate", default="vote", show_default=True, metavar="NAME", help="How answers are put together: vote, mean."
)
device_option = click.option("--device", metavar="NAME", help="Where to compute.")


@click.command()
@click.argument("model")
@click.option("--dataset", required=True, metavar="D", help="The dataset to train on.")
@click.option("--backend", required=True, metavar="NAME", help="How to learn: mlp, linear, …")
@click.option("--epochs", type=str, metavar="N", help="Epochs a constituent would train unsliced.  [default: 10]")
@click.option("--seed", type=int, metavar="N", help="The model's seed; drawn once where it is not given.")
@click.option("--schedule", metavar="NAME", help="Epochs per slice: uniform (the paper's) or equal-work.")
@click.option("--keep", metavar="N|all", help="Save only the N best checkpoints of each shard.  [default: all]")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of the backend; repeat it.")
@building
@store_option
def train(
    model: str,
    dataset: str,
    backend: str,
    epochs: str | None,
    seed: int | None,
    schedule: str | None,
    keep: str | None,
    settings: tuple[str, ...],
    workers: int | None,
    executor: str | None,
    device: str | None,
    folder: str | None,
    as_json: bool,
) -> None:
    """Declare MODEL and build it; run again, it goes on where it stopped."""
    with opened(folder) as store, watching(as_json) as watch:
        built = store.train(
            model,
            dataset=dataset,
            backend=backend,
            epochs=_epochs(epochs),
            seed=seed,
            settings=read_pairs("--set", settings) if settings else None,
            schedule=schedule,
            keep=keep,
            executor=executor,
            workers=workers,
            device=device,
            watch=watch,
        )
    if as_json:
        print_json(build_json(built))
    else:
        click.echo(trained_sentence([built], "Trained"))


@click.command()
@click.argument("names", nargs=-1, metavar="[MODEL…]")
@click.option(
    "--retrain-damaged", is_flag=True, help="Look into every checkpoint for damage, and take it that all may be lost."
)
@building
@store_option
def build(
    names: tuple[str, ...],
    retrain_damaged: bool,
    workers: int | None,
    executor: str | None,
    device: str | None,
    folder: str | None,
    as_json: bool,
) -> None:
    """Make every missing checkpoint: after a crash, an erasure, new data."""
    with opened(folder) as store, watching(as_json) as watch:
        discarded = store.discard_damaged(names) if retrain_damaged else 0
        if discarded:
            note(f"Discarded {counted(discarded, 'damaged checkpoint')}.")
        built = store.build(names, executor=executor, workers=workers, device=device, watch=watch)
    if as_json:
        print_json([build_json(one) for one in built])
    else:
        click.echo(trained_sentence(built, "Trained"))


@click.command()
@click.argument("model")
@click.argument("file")
@click.option("-o", "--out", metavar="OUT", help="Write CSV there instead of printing it.")
@aggregate_option
@device_option
@store_option
def predict(
    model: str, file: str, out: str | None, aggregate: str, device: str | None, folder: str | None, as_json: bool
) -> None:
    """Answer for every row of FILE: its label and the label's score."""
    with opened(folder) as store:
        answers = store.predict(model, file, aggregate=aggregate, device=device)
        if as_json:
            print_json([{"row": row, "label": label, "score": score} for row, label, score in _rows(answers)])
        elif out is None:
            for row, label, score in _rows(answers):
                if row == 1:
                    click.echo("row,label,score")
                click.echo(f"{row},{_cell(label)},{score:.6f}")
        else:
            note(f"Answered for {counted(_write_csv(out, answers), 'row')}; see {out}.")


@click.command()
@click.argument("model")
@click.argument("file")
@click.option("--label", required=True, metavar="COL", help="The column with the right answers.")
@click.option("--group", metavar="COL", help="A column of groups: measure for each by itself.")
@aggregate_option
@device_option
@store_option
def evaluate(
    model: str,
    file: str,
    label: str,
    group: str | None,
    aggregate: str,
    device: str | None,
    folder: str | None,
    as_json: bool,
) -> None:
    """Measure how often MODEL is right on FILE."""
    with opened(folder) as store:
        if group is not None:
            found = store.evaluate_groups(model, file, label=label, group=group, aggregate=aggregate, device=device)
            if as_json:
                print_json({name: asdict(result) for name, result in found.items()})
            else:
                rows = [(name, result.points, f"{100 * result.top1:.2f} %") for name, result in found.items()]
                print_table(("group", "points", "top-1"), rows)
            return
        result = store.evaluate(model, file, label=label, aggregate=aggregate, device=device)
    if as_json:
        print_json(asdict(result))
        return
    top5 = "" if result.top5 is None else f", top-5 {100 * result.top5:.2f} %"
    asleep = f" ({result.abstaining} abstain)" if result.abstaining else ""
    click.echo(
        f"top-1 {100 * result.top1:.2f} %{top5} on {counted(result.points, 'point')}, "
        f"{counted(result.constituents, 'constituent')}{asleep}."
    )


@click.command()
@click.argument("model")
@store_option
def checkpoints(model: str, folder: str | None, as_json: bool) -> None:
    """List every checkpoint of MODEL that is in force."""
    with opened(folder) as store:
        found = store.checkpoints(model)
    if as_json:
        print_json({"model": model, "checkpoints": [asdict(checkpoint) for checkpoint in found]})
        return
    rows = [
        (c.shard, c.slice, c.recipe[:16], c.file[:16], c.tensors[:16], c.size, c.samples, f"{c.seconds:.2f}")
        for c in found
    ]
    print_table(("shard", "slice", "recipe", "file", "tensors", "bytes", "samples", "seconds"), rows)


def _epochs(given: str | None) -> Any:
    from fractions import Fraction

    try:
        # As a number first: a fraction of a huge power of ten would take for ever to write out.
        return None if given is None else Fraction(given) if float(given) < 1e9 else float(given)
    except (ValueError, OverflowError):
        raise InputError(f"epochs must be a number, not '{given}'") from None


def _rows(answers: "Iterator[Answers]") -> "Iterator[tuple[int, Any, float]]":
    row = 0
    for answer in answers:
        place = {label: index for index, label in enumerate(answer.classes)}
        for label, scores in zip(answer.labels.tolist(), answer.scores, strict=True):
            row += 1
            yield row, label, float(scores[place[label]])


def _write_csv(out: str, answers: "Iterator[Answers]") -> int:
    import csv

    row, unfinished = 0, f"{out}.part"
    try:
        with open(unfinished, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("row", "label", "score"))
            for row, label, score in _rows(answers):
                writer.writerow((row, label, f"{score:.6f}"))
        os.replace(unfinished, out)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            os.unlink(unfinished)
    return row


def _cell(label: Any) -> str:
    text = str(label)
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\n') else text
