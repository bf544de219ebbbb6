"""builds are counted, so that their order does not hang on how a database numbers rows"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("build", sa.Column("number", sa.BigInteger(), server_default="0", nullable=False))
    if op.get_bind().dialect.name == "sqlite":
        op.execute("UPDATE build SET number = rowid")
