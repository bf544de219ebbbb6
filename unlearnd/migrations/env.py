"""Alembic's entry: run migrations on the connection that `unlearnd.ledger.migrate` hands over."""

from alembic import context

from unlearnd.ledger import tables  # noqa: F401  (registers the tables)
from unlearnd.ledger.tables import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
