"""backups of an encrypted store, which can open what is rewritten after them"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "backup",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("public", sa.LargeBinary(), nullable=False),
        sa.Column("points", sa.String(), nullable=False),
        sa.Column("made_at", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
