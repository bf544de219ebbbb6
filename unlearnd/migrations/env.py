"""Alembic's entry: run migrations on the connection that `unlearnd.ledger.migrate` hands over."""

from alembic import context
from sqlmodel import SQLModel

from unlearnd.ledger import tables  # noqa: F401  (registers the tables)

context.configure(
    connection=context.config.attributes["connection"], target_metadata=SQLModel.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
