"""status, plugins, migrate."""

from dataclasses import asdict

import click

from unlearnd.cli.options import as_json, opened, store_option
from unlearnd.cli.show import counted, print_json, print_table


@click.command()
@store_option
def status(folder: str | None, as_json: bool) -> None:
    """Show datasets, models, and how far every constituent is clean."""
    with opened(folder) as store:
        found = store.status()
        where = store.folder
    if as_json:
        print_json(asdict(found))
        return
    click.echo(f"Store {where}")
    if not found.datasets:
        click.echo("No dataset yet: `unlearnd ingest DATASET FILE… --user COL --label COL` adds points.")
        return
    print_table(
        ("dataset", "points", "shards", "slices", "open slices", "classes"),
        [(d.name, d.points, d.shards, d.slices, d.open_slices, d.classes) for d in found.datasets],
    )
    if found.models:
        print_table(
            ("model", "dataset", "backend", "clean prefix of each shard", "degraded", "to train"),
            [
                (m.name, m.dataset, m.backend, _prefixes(m.prefixes, m.slices), m.degraded, m.samples_missing)
                for m in found.models
            ],
        )
    elif not found.retired:
        click.echo("No model yet: `unlearnd train MODEL --dataset D --backend NAME` makes one.")
    if found.retired:
        gone = ", ".join(f"{name} ({at[:10]})" for name, at in found.retired.items())
        click.echo(f"Destroyed by orders and retired: {gone}.")
    if found.requests:
        states = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in sorted(found.requests.items()))
        due = f"; the first answer is due {found.next_due}" if found.next_due else ""
        click.echo(f"Open requests: {states}{due}. Policy: {found.policy}.")
    if found.unfinished:
        click.echo(f"{counted(found.unfinished, 'erasure')} not carried out to the end: run `unlearnd build`.")
    if found.to_rebuild:
        click.echo(f"{counted(found.to_rebuild, 'erasure')} carried out and not rebuilt yet: run `unlearnd build`.")


@click.command()
@as_json
def plugins(as_json: bool) -> None:
    """List the plugins that are installed and what they bring."""
    from unlearnd.plugins import load_plugins  # heavy: whatever the plugins import

    installed = load_plugins().installed
    if as_json:
        print_json([asdict(plugin) for plugin in installed])
    else:
        print_table(
            ("plugin", "package", "version", "brings"),
            [(p.name, p.distribution, f"v{p.version}", ", ".join(p.brings)) for p in installed],
        )


@click.command()
@store_option
def migrate(folder: str | None, as_json: bool) -> None:
    """Bring the ledger of an older release up to this one's schema."""
    import os
    from pathlib import Path

    from unlearnd.config import find_store
    from unlearnd.store import migrate_store  # heavy: sqlmodel, alembic

    named = folder or click.get_current_context().find_root().obj or os.environ.get("UNLEARND_STORE")
    before, after = migrate_store(Path(named) if named else find_store(Path.cwd()))
    if as_json:
        print_json({"before": before, "after": after})
    elif before == after:
        click.echo(f"The ledger has schema {after} already.")
    else:
        click.echo(f"Brought the ledger from schema {before} to {after}.")


def _prefixes(prefixes: tuple[int, ...], slices: int) -> str:
    if all(prefix == slices for prefix in prefixes):
        return f"all {len(prefixes)} complete ({slices} slices)"
    shown = " ".join(map(str, prefixes[:20])) + (" …" if len(prefixes) > 20 else "")
    behind = sum(prefix < slices for prefix in prefixes)
    return f"{shown} of {slices} ({behind} behind)"
