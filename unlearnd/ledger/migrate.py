"""Bring a ledger to this release's schema.

A new ledger is made from the tables at once and stamped; an old one goes through Alembic's migrations. A test
holds the two to the same result.
"""

from pathlib import Path

from unlearnd import migrations
from unlearnd.errors import RefusedError
from unlearnd.ledger.connection import Ledger
from unlearnd.ledger.database import SCHEMA


def migrate(url: str, schema: str = SCHEMA) -> tuple[str | None, str]:
    """Upgrade the ledger at `url` to a schema; return the ones before and after. None: it had none."""
    from alembic import command  # heavy, and needed only here
    from alembic.config import Config
    from alembic.util.exc import CommandError

    ledger = Ledger(url)
    try:
        with ledger.write() as connection:
            if connection.dialect.has_table(connection, "alembic_version"):
                before = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
            else:
                before = None
                ledger.make_room(connection)
            config = Config()
            config.set_main_option("script_location", str(Path(migrations.__file__).parent))
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, schema)
            except CommandError:
                raise RefusedError(
                    f"the ledger has schema {before}, which a newer release made: install that"
                ) from None
    finally:
        ledger.close()
    return before, schema
