"""init, ingest, where."""

from dataclasses import asdict
from pathlib import Path

import click

from unlearnd.cli.options import as_json, opened, read_pairs, store_option
from unlearnd.cli.policies import own_folder
from unlearnd.cli.risks import policy_option, read_risks, risk_option
from unlearnd.cli.show import counted, counting, print_json, print_table


@click.command()
@click.argument("folder", metavar="DIR")
@click.option("--ledger", default="sqlite:///ledger.sqlite", show_default=True, metavar="URL", help="The database.")
@click.option("--storage", default="storage", show_default=True, metavar="URL", help="Where slices and checkpoints go.")
@click.option(
    "--storage-option",
    "storage_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="How to reach the storage, such as endpoint_url=…; repeat it. No secrets: those come from the environment.",
)
@click.option(
    "--encrypt",
    is_flag=False,
    flag_value="file",
    metavar="[WRAPPER]",
    help="Encrypt slices and checkpoints, each under a key of its own; wrapped by a key file, or by a plugin.",
)
@click.option("--receipts", metavar="URL", help="Where receipts go, if not to the storage; may have object lock.")
@click.option(
    "--placement-key",
    metavar="FILE",
    help="Use this placement key, so that the store places users as another one does.",
)
@click.option("--policy", default="default", show_default=True, metavar="NAME", help="Whose rules requests follow.")
@click.option(
    "--signer", default="file", show_default=True, metavar="NAME", help="Who signs: key files, or a plugin's."
)
@as_json
def init(
    folder: str,
    ledger: str,
    storage: str,
    storage_options: tuple[str, ...],
    receipts: str | None,
    encrypt: str | None,
    placement_key: str | None,
    policy: str,
    signer: str,
    as_json: bool,
) -> None:
    """Make a new store in DIR; refuse to overwrite one."""
    from unlearnd.store import Store  # heavy: sqlmodel, numpy

    options = read_pairs("--storage-option", storage_options)
    with Store.create(
        folder,
        ledger=ledger,
        storage=storage,
        storage_options=options,
        receipts=receipts,
        encrypt=encrypt,
        placement_key=placement_key,
        policy=policy,
        signer=signer,
    ) as store:
        if as_json:
            print_json({"store": str(store.folder), "id": store.config.store_id, "policy": store.config.policy})
        else:
            click.echo(f"Made a store in {store.folder}. Its keys are in keys/: keep them secret and back them up.")
            if store.folder != Path.cwd():
                click.echo(f"Go there with `cd {folder}`, or name it with --store or UNLEARND_STORE.")


@click.command()
@click.argument("dataset")
@click.argument("files", nargs=-1, required=True, metavar="FILE…")
@click.option("--user", required=True, metavar="COL", help="The column that says whose data a row is.")
@click.option("--label", required=True, metavar="COL", help="The column to predict: integers or text.")
@click.option("--group", metavar="COL", help="A column of groups (country, tier, …).")
@click.option("--features", metavar="COL,…", help="Feature columns in order; by default all others. npz: the array.")
@click.option("--shards", type=int, metavar="S", help="Shards of a new dataset.  [default: 5]")
@click.option(
    "--slices", type=int, metavar="R", help="Slices per shard: of a new dataset [default: 10], or to add [default: 1]."
)
@click.option("--unit", type=click.Choice(["user", "point"]), help="What is placed together.  [default: user]")
@click.option("--placement", metavar="NAME", help="How users are placed: uniform, aware, …  [default: uniform]")
@policy_option
@risk_option
@click.option("--classes", metavar="N|A,B,…", help="Declare the labels instead of taking them from the data.")
@click.option("--readmit", is_flag=True, help="Take in users who were erased; otherwise their rows are left out.")
@store_option
def ingest(
    dataset: str,
    files: tuple[str, ...],
    user: str,
    label: str,
    group: str | None,
    features: str | None,
    shards: int | None,
    slices: int | None,
    unit: str | None,
    placement: str | None,
    policy: str | None,
    risk: tuple[str, ...],
    classes: str | None,
    readmit: bool,
    folder: str | None,
    as_json: bool,
) -> None:
    """Add points from CSV, Parquet or npz files to DATASET: all of them or none.

    The first call fixes the layout. An npz file holds the arrays x, the label and the user.
    """
    with opened(folder) as store, counting("reading", as_json) as advance:
        added = store.ingest(
            dataset,
            list(files),
            user=user,
            label=label,
            group=group,
            features=features.split(",") if features else None,
            shards=shards,
            slices=slices,
            unit=unit,
            placement=placement,
            risk=read_risks(risk, policy, own_folder(folder)) if risk else None,
            policy=policy,
            classes=_classes(classes),
            readmit=readmit,
            on_progress=advance,
        )
    first, last = added.slices
    if as_json:
        print_json(
            {
                "dataset": dataset,
                "points": added.points,
                "left_out": added.left_out,
                "first": added.first,
                "shards": added.dataset.shards,
                "slices": [first, last],
                "classes": list(added.dataset.labels),
            }
        )
    else:
        click.echo(
            f"Added {counted(added.points, 'point')} to '{dataset}': {counted(added.dataset.shards, 'shard')}, "
            f"{f'slices {first} to {last}' if last > first else f'slice {first}'}, "
            f"{len(added.dataset.labels)} classes."
        )
        if added.left_out:
            click.echo(
                f"Left out {counted(added.left_out, 'row')} of users who were erased for good or are on hold; "
                "--readmit takes in the erased."
            )


@click.command()
@click.option("--user", metavar="U", help="Where all points of this user are.")
@click.option("--point", metavar="ID", help="Where one point is, given as dataset:position.")
@store_option
def where(user: str | None, point: str | None, folder: str | None, as_json: bool) -> None:
    """Show in which shard and slice a user or a point trains."""
    if (user is None) == (point is None):
        raise click.UsageError("give either --user or --point")
    with opened(folder) as store:
        found = store.where_user(user) if user is not None else store.where_point(point or "")
    if as_json:
        print_json([asdict(place) for place in found])
    elif not found:
        click.echo("Nothing found.")
    else:
        rows = [(p.dataset, p.shard, p.slice, len(p.positions), _short(p.positions)) for p in found]
        print_table(("dataset", "shard", "slice", "points", "positions"), rows)


def _classes(given: str | None) -> "list[int | str] | int | None":
    """Read `10` as labels 0 to 9, and `a,b` or `1,2` as those."""
    if given is None:
        return None
    parts: list[int | str] = [part.strip() for part in given.split(",")]
    numbers = [int(part) for part in parts if str(part).lstrip("-").isdigit()]
    if len(parts) == 1 and numbers:
        return numbers[0]
    return [*numbers] if len(numbers) == len(parts) else parts


def _short(positions: tuple[int, ...]) -> str:
    shown = " ".join(map(str, positions[:8]))
    return shown if len(positions) <= 8 else f"{shown} …"
