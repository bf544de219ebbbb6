"""demo."""

import click


@click.command()
@click.argument("folder", metavar="[DIR]", required=False)
def demo(folder: str | None) -> None:
    """The whole story on handwritten digits: ingest, train, erase, rebuild, compare; under a minute.

    Works in DIR, or in a new temporary folder.
    """
    from unlearnd.demo import run  # heavy: numpy, scikit-learn, a backend

    run(folder)
