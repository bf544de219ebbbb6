"""the first schema"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "dataset",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("unit", sa.String(), nullable=False),
        sa.Column("placement", sa.String(), nullable=False),
        sa.Column("shards", sa.Integer(), nullable=False),
        sa.Column("dtype", sa.String(), nullable=False),
        sa.Column("shape", sa.String(), nullable=False),
        sa.Column("columns", sa.String(), nullable=False),
        sa.Column("label_kind", sa.String(), nullable=False),
        sa.Column("labels", sa.String(), nullable=False),
        sa.Column("labels_declared", sa.Boolean(), nullable=False),
        sa.Column("groups", sa.String(), nullable=False),
        sa.Column("points", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "erasure",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("received_at", sa.String(), nullable=False),
        sa.Column("marked_at", sa.String(), nullable=True),
        sa.Column("influence_removed_at", sa.String(), nullable=True),
        sa.Column("rebuilt_at", sa.String(), nullable=True),
        sa.Column("touched", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "holding",
        sa.Column("handle", sa.LargeBinary(), nullable=False),
        sa.Column("dataset_id", sa.Integer(), nullable=False),
        sa.Column("shard", sa.Integer(), nullable=False),
        sa.Column("slice", sa.Integer(), nullable=False),
        sa.Column("first", sa.BigInteger(), nullable=False),
        sa.Column("positions", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("handle", "dataset_id", "shard", "slice", "first"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "ingest",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("dataset", sa.String(), nullable=False),
        sa.Column("opened_at", sa.String(), nullable=False),
        sa.Column("committed_at", sa.String(), nullable=True),
        sa.Column("points", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "leaf",
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_table(
        "lease",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.Column("wanted", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "node",
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("level", "number"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "signing_key",
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("public", sa.LargeBinary(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.Column("until", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("key_id"),
    )
    op.create_table(
        "tree_head",
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("note", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("size"),
    )
    op.create_table(
        "users",
        sa.Column("handle", sa.LargeBinary(), nullable=False),
        sa.Column("key", sa.LargeBinary(), nullable=True),
        sa.Column("erased_at", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("handle"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "generation",
        sa.Column("dataset_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("first_slice", sa.Integer(), nullable=False),
        sa.Column("slices", sa.Integer(), nullable=False),
        sa.Column("sealed_at", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["dataset_id"],
            ["dataset.id"],
        ),
        sa.PrimaryKeyConstraint("dataset_id", "number"),
    )
    op.create_table(
        "model",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("dataset_id", sa.Integer(), nullable=False),
        sa.Column("spec", sa.String(), nullable=False),
        sa.Column("sliceable", sa.Boolean(), nullable=False),
        sa.Column("deterministic", sa.Boolean(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("declared_at", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["dataset_id"],
            ["dataset.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "request",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("erasure_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("handle", sa.LargeBinary(), nullable=True),
        sa.Column("dataset", sa.String(), nullable=True),
        sa.Column("position", sa.BigInteger(), nullable=True),
        sa.Column("leaf", sa.BigInteger(), nullable=False),
        sa.Column("commitment", sa.String(), nullable=True),
        sa.Column("nonce", sa.LargeBinary(), nullable=True),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["erasure_id"],
            ["erasure.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("request", schema=None) as batch_op:
        batch_op.create_index("request_erasure", ["erasure_id"], unique=False)
        batch_op.create_index("request_handle", ["handle"], unique=False)

    op.create_table(
        "segment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("dataset_id", sa.Integer(), nullable=False),
        sa.Column("shard", sa.Integer(), nullable=False),
        sa.Column("slice", sa.Integer(), nullable=False),
        sa.Column("first", sa.BigInteger(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("dropped", sa.LargeBinary(), nullable=False),
        sa.Column("live", sa.BigInteger(), nullable=False),
        sa.Column("replaced_at", sa.String(), nullable=True),
        sa.Column("destroyed_at", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["dataset_id"],
            ["dataset.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("segment", schema=None) as batch_op:
        batch_op.create_index("segment_place", ["dataset_id", "shard", "slice"], unique=False)

    op.create_table(
        "slice",
        sa.Column("dataset_id", sa.Integer(), nullable=False),
        sa.Column("shard", sa.Integer(), nullable=False),
        sa.Column("slice", sa.Integer(), nullable=False),
        sa.Column("root", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["dataset_id"],
            ["dataset.id"],
        ),
        sa.PrimaryKeyConstraint("dataset_id", "shard", "slice"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "build",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.String(), nullable=False),
        sa.Column("ended_at", sa.String(), nullable=True),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("from_scratch", sa.BigInteger(), nullable=False),
        sa.Column("checkpoints", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"],
            ["model.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "checkpoint",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.Column("shard", sa.Integer(), nullable=False),
        sa.Column("slice", sa.Integer(), nullable=False),
        sa.Column("recipe", sa.String(), nullable=False),
        sa.Column("file", sa.String(), nullable=False),
        sa.Column("tensors", sa.String(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("environment", sa.String(), nullable=False),
        sa.Column("built_at", sa.String(), nullable=False),
        sa.Column("destroyed_at", sa.String(), nullable=True),
        sa.Column("destroyed_by", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["model_id"],
            ["model.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("checkpoint", schema=None) as batch_op:
        batch_op.create_index("checkpoint_place", ["model_id", "shard", "slice"], unique=False)

    op.create_table(
        "receipt",
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("leaf", sa.BigInteger(), nullable=False),
        sa.Column("detail", sa.String(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["request_id"],
            ["request.id"],
        ),
        sa.PrimaryKeyConstraint("request_id"),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'the log is append-only'; END $$"
        )
        for table in ("leaf", "node"):
            op.execute(
                f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
                "FOR EACH STATEMENT EXECUTE FUNCTION refuse_change()"
            )
        return
    for table in ("leaf", "node"):
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_{verb.lower()} BEFORE {verb} ON {table} "
                "BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END"
            )
