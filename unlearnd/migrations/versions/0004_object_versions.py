"""what became of each version of an object, and the wrapped keys of encrypted objects"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("segment", "checkpoint"):
        op.add_column(table, sa.Column("key", sa.LargeBinary(), nullable=True))
    op.create_table(
        "version",
        sa.Column("erasure_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("destroyed_at", sa.String(), nullable=True),
        sa.Column("kept", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["erasure_id"], ["erasure.id"]),
        sa.PrimaryKeyConstraint("erasure_id", "name", "version"),
    )
