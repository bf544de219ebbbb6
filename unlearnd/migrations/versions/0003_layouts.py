"""layouts by risk, and kept checkpoints"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("dataset", sa.Column("layout", sa.String(), nullable=True))
    op.add_column("model", sa.Column("kept", sa.String(), nullable=True))
