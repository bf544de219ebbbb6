"""policies, the life of requests, restrictions, the suppression list, recipients"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("segment", sa.Column("held", sa.LargeBinary(), nullable=True))
    op.add_column("model", sa.Column("retired_at", sa.String(), nullable=True))
    op.create_table(
        "policy",
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("body", sa.String(), nullable=False),
        sa.Column("leaf", sa.BigInteger(), nullable=False),
        sa.Column("since", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_table(
        "docket",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("leaf", sa.BigInteger(), nullable=False),
        sa.Column("asked", sa.String(), nullable=False),
        sa.Column("handle", sa.LargeBinary(), nullable=True),
        sa.Column("dataset", sa.String(), nullable=True),
        sa.Column("position", sa.BigInteger(), nullable=True),
        sa.Column("model", sa.String(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("policy_digest", sa.String(), nullable=False),
        sa.Column("ground", sa.String(), nullable=False),
        sa.Column("requester", sa.String(), nullable=False),
        sa.Column("identity", sa.String(), nullable=False),
        sa.Column("received_at", sa.String(), nullable=False),
        sa.Column("due_at", sa.String(), nullable=False),
        sa.Column("acknowledge_by", sa.String(), nullable=True),
        sa.Column("acknowledged_at", sa.String(), nullable=True),
        sa.Column("extended", sa.Boolean(), nullable=False),
        sa.Column("paused_at", sa.String(), nullable=True),
        sa.Column("paused_days", sa.Integer(), nullable=False),
        sa.Column("resume_state", sa.String(), nullable=True),
        sa.Column("hold_basis", sa.String(), nullable=True),
        sa.Column("hold_approver", sa.String(), nullable=True),
        sa.Column("hold_review", sa.String(), nullable=True),
        sa.Column("duplicate_of", sa.String(), nullable=True),
        sa.Column("reference", sa.LargeBinary(), nullable=True),
        sa.Column("commitment", sa.String(), nullable=True),
        sa.Column("nonce", sa.LargeBinary(), nullable=True),
        sa.Column("closed_at", sa.String(), nullable=True),
        sa.Column("moves", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("reference"),
    )
    op.create_index("docket_handle", "docket", ["handle"], unique=False)
    op.create_index("docket_state", "docket", ["state"], unique=False)
    op.create_table(
        "transition",
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("at", sa.String(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("before", sa.String(), nullable=False),
        sa.Column("after", sa.String(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("why", sa.String(), nullable=False),
        sa.Column("cite", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", "number"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "restriction",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("handle", sa.LargeBinary(), nullable=False),
        sa.Column("restricted_at", sa.String(), nullable=False),
        sa.Column("taken", sa.String(), nullable=False),
        sa.Column("returned_at", sa.String(), nullable=True),
        sa.Column("returned", sa.String(), nullable=True),
        sa.Column("cleaned_at", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("restriction_request", "restriction", ["request_id"], unique=False)
    op.create_table(
        "suppressed",
        sa.Column("handle", sa.LargeBinary(), nullable=False),
        sa.Column("since", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("handle"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "recipient",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("given_at", sa.String(), nullable=False),
        sa.Column("ended_at", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "notice",
        sa.Column("erasure_id", sa.String(), nullable=False),
        sa.Column("recipient_id", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("at", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("erasure_id", "recipient_id"),
        sqlite_with_rowid=False,
    )
    _take_over_old_requests()


def _take_over_old_requests() -> None:
    """Give every request of the first release its entry: carried out, or being so, and due after thirty days.

    That release had no policies. Its requests were due thirty days to the minute after they came in, as their leaves
    and receipts say, so the entry says the same.
    """
    from datetime import datetime, timedelta

    connection = op.get_bind()
    old = connection.execute(
        sa.text(
            "SELECT request.id, request.leaf, request.handle, request.dataset, request.position, erasure.received_at, "
            "erasure.influence_removed_at FROM request JOIN erasure ON erasure.id = request.erasure_id"
        )
    ).all()
    for row in old:
        received = datetime.strptime(row.received_at, "%Y-%m-%dT%H:%M:%SZ")
        connection.execute(
            sa.text(
                "INSERT INTO docket (id, leaf, asked, handle, dataset, position, state, policy, policy_digest, ground, "
                "requester, identity, received_at, due_at, extended, paused_days, closed_at, moves) VALUES (:id, "
                ":leaf, :asked, :handle, :dataset, :position, :state, '', '', 'asked', 'operator', '', :received, "
                ":due, :extended, 0, :closed, 0)"
            ),
            {
                "id": row.id,
                "leaf": row.leaf,
                "asked": "user" if row.handle is not None else "point",
                "handle": row.handle,
                "dataset": row.dataset,
                "position": row.position,
                "state": "completed" if row.influence_removed_at else "executing",
                "received": row.received_at,
                "due": (received.replace(second=0) + timedelta(days=30)).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "extended": False,
                "closed": row.influence_removed_at,
            },
        )
