"""The ledger's tables.

They are needed to make, migrate or move a ledger, and imported only then: to open one takes no SQLModel, which is a
quarter of what a command would take to start. Rows stay inside `unlearnd.ledger`; frozen dataclasses come out. Times
are ISO 8601 text in UTC, sets of positions are packed bytes, lists are JSON text. No table has room for a user id:
`users` knows a keyed handle and a random key, and the key goes when the user is erased.
"""

from typing import Any, ClassVar

from sqlalchemy import BigInteger, Column, Index, LargeBinary
from sqlmodel import Field, SQLModel

METADATA = SQLModel.metadata
"""All tables below."""

_CLUSTERED: dict[str, Any] = {"sqlite_with_rowid": False}


class DatasetRow(SQLModel, table=True):
    __tablename__ = "dataset"
    id: int | None = Field(default=None, primary_key=True)
    name: str = Field(unique=True)
    unit: str
    placement: str
    shards: int
    dtype: str
    shape: str
    columns: str
    label_kind: str
    labels: str
    """Label values by code, in the order they were first met; models sort them."""
    labels_declared: bool
    groups: str
    points: int = Field(sa_type=BigInteger)
    """How many points were ever given: the next position."""
    version: int = Field(sa_type=BigInteger)
    """Counts up whenever what may be served could have changed."""
    created_at: str
    layout: str | None = None
    """Where each group goes, frozen when the dataset was made; none where places do not depend on groups."""


class GenerationRow(SQLModel, table=True):
    """A run of slices filled together; sealed by the first build that trains on it."""

    __tablename__ = "generation"
    dataset_id: int = Field(primary_key=True, foreign_key="dataset.id")
    number: int = Field(primary_key=True)
    first_slice: int
    slices: int
    sealed_at: str | None = None


class IngestRow(SQLModel, table=True):
    """One call of ingest; while `committed_at` is empty its objects in storage belong to nobody."""

    __tablename__ = "ingest"
    id: str = Field(primary_key=True)
    dataset: str
    opened_at: str
    committed_at: str | None = None
    points: int = Field(default=0, sa_type=BigInteger)


class SegmentRow(SQLModel, table=True):
    """Some points of one slice, as one object in storage."""

    __tablename__ = "segment"
    __table_args__ = (Index("segment_place", "dataset_id", "shard", "slice"),)
    id: int | None = Field(default=None, primary_key=True)
    dataset_id: int = Field(foreign_key="dataset.id")
    shard: int
    slice: int
    first: int = Field(sa_type=BigInteger)
    """The position of its first point: segments of a slice are read in this order."""
    path: str
    digest: str
    rows: int = Field(sa_type=BigInteger)
    dropped: bytes = Field(default=b"", sa_column=Column(LargeBinary, nullable=False))
    """Positions erased but still in the object; empty again once it is rewritten."""
    live: int = Field(sa_type=BigInteger)
    replaced_at: str | None = None
    destroyed_at: str | None = None
    key: bytes | None = Field(default=None, sa_column=Column(LargeBinary, nullable=True))
    """What opens the object where it is encrypted, wrapped; gone with the object, so that no copy can be read."""
    held: bytes | None = Field(default=None, sa_column=Column(LargeBinary, nullable=True))
    """Positions of users on hold: in the object, and not trained on until they are released."""


class FeatureRow(SQLModel, table=True):
    """Features of a segment's points under one key, as one object in storage; goes with the segment's object."""

    __tablename__ = "feature"
    segment_id: int = Field(primary_key=True, foreign_key="segment.id")
    key: str = Field(primary_key=True)
    """Names all that features depend on but the points: base, network, cut, environment."""
    path: str
    digest: str


class SliceRow(SQLModel, table=True):
    """The root over the commitments of a sealed slice's live points."""

    __tablename__ = "slice"
    __table_args__: ClassVar[Any] = (_CLUSTERED,)
    dataset_id: int = Field(primary_key=True, foreign_key="dataset.id")
    shard: int = Field(primary_key=True)
    slice: int = Field(primary_key=True)
    root: str


class UserRow(SQLModel, table=True):
    __tablename__ = "users"
    __table_args__: ClassVar[Any] = (_CLUSTERED,)
    handle: bytes = Field(sa_column=Column(LargeBinary, primary_key=True))
    key: bytes | None = Field(default=None, sa_column=Column(LargeBinary, nullable=True))
    erased_at: str | None = None


class HoldingRow(SQLModel, table=True):
    """What a user has in one slice: the placement of each of those points."""

    __tablename__ = "holding"
    __table_args__: ClassVar[Any] = (_CLUSTERED,)
    handle: bytes = Field(sa_column=Column(LargeBinary, primary_key=True))
    dataset_id: int = Field(primary_key=True)
    shard: int = Field(primary_key=True)
    slice: int = Field(primary_key=True)
    first: int = Field(primary_key=True, sa_type=BigInteger)
    positions: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class ModelRow(SQLModel, table=True):
    __tablename__ = "model"
    id: int | None = Field(default=None, primary_key=True)
    name: str = Field(unique=True)
    dataset_id: int = Field(foreign_key="dataset.id")
    spec: str
    sliceable: bool
    deterministic: bool
    seed: int = Field(sa_type=BigInteger)
    declared_at: str
    kept: str | None = None
    """The slices whose checkpoints are kept; none for all."""
    retired_at: str | None = None
    """Destroyed by an order: never built again."""


class CheckpointRow(SQLModel, table=True):
    __tablename__ = "checkpoint"
    __table_args__ = (Index("checkpoint_place", "model_id", "shard", "slice"),)
    id: int | None = Field(default=None, primary_key=True)
    model_id: int = Field(foreign_key="model.id")
    shard: int
    slice: int
    recipe: str
    file: str
    tensors: str
    path: str
    size: int = Field(sa_type=BigInteger)
    samples: int = Field(sa_type=BigInteger)
    seconds: float
    environment: str
    built_at: str
    destroyed_at: str | None = None
    destroyed_by: str | None = None
    """The erasure that had it destroyed."""
    key: bytes | None = Field(default=None, sa_column=Column(LargeBinary, nullable=True))
    """As of a segment."""


class BuildRow(SQLModel, table=True):
    __tablename__ = "build"
    id: str = Field(primary_key=True)
    model_id: int = Field(foreign_key="model.id")
    started_at: str
    ended_at: str | None = None
    samples: int = Field(default=0, sa_type=BigInteger)
    from_scratch: int = Field(default=0, sa_type=BigInteger)
    checkpoints: int = 0
    seconds: float = 0.0
    number: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": "0"})
    """Counts up: builds of one second are told in the order they ended."""


class ErasureRow(SQLModel, table=True):
    """Requests carried out together: their steps, each durable before the next."""

    __tablename__ = "erasure"
    id: str = Field(primary_key=True)
    received_at: str
    marked_at: str | None = None
    influence_removed_at: str | None = None
    rebuilt_at: str | None = None
    touched: str = "[]"
    """[dataset id, shard] pairs whose data and checkpoints are to be cleaned."""


class VersionRow(SQLModel, table=True):
    """A version of an object that an erasure set out to destroy, where storage keeps versions."""

    __tablename__ = "version"
    erasure_id: str = Field(primary_key=True, foreign_key="erasure.id")
    name: str = Field(primary_key=True)
    version: str = Field(primary_key=True)
    destroyed_at: str | None = None
    kept: str | None = None
    """Why it is still there."""


class RequestRow(SQLModel, table=True):
    """One user or one point to erase, and what came of it."""

    __tablename__ = "request"
    __table_args__ = (Index("request_handle", "handle"), Index("request_erasure", "erasure_id"))
    id: str = Field(primary_key=True)
    erasure_id: str = Field(foreign_key="erasure.id")
    number: int
    handle: bytes | None = Field(default=None, sa_column=Column(LargeBinary, nullable=True))
    dataset: str | None = None
    position: int | None = Field(default=None, sa_type=BigInteger)
    leaf: int = Field(default=0, sa_type=BigInteger)
    """The leaf that says it was received."""
    commitment: str | None = None
    """To the user id, with the nonce below: what the receipt says about whose it is."""
    nonce: bytes | None = Field(default=None, sa_column=Column(LargeBinary, nullable=True))
    """Handed to the user with the receipt, then destroyed."""
    outcome: str | None = None


class PolicyRow(SQLModel, table=True):
    """A policy as it was when it was first applied here; never changed."""

    __tablename__ = "policy"
    digest: str = Field(primary_key=True)
    name: str
    body: str
    leaf: int = Field(sa_type=BigInteger)
    since: str


class DocketRow(SQLModel, table=True):
    """The life of one request, from the day it came in; `request` has it once it is being carried out."""

    __tablename__ = "docket"
    __table_args__ = (Index("docket_handle", "handle"), Index("docket_state", "state"))
    id: str = Field(primary_key=True)
    leaf: int = Field(sa_type=BigInteger)
    asked: str
    handle: bytes | None = Field(default=None, sa_column=Column(LargeBinary, nullable=True))
    dataset: str | None = None
    position: int | None = Field(default=None, sa_type=BigInteger)
    model: str | None = None
    state: str
    policy: str
    policy_digest: str
    ground: str
    requester: str
    identity: str
    received_at: str
    due_at: str
    acknowledge_by: str | None = None
    acknowledged_at: str | None = None
    extended: bool = False
    paused_at: str | None = None
    paused_days: int = 0
    resume_state: str | None = None
    hold_basis: str | None = None
    hold_approver: str | None = None
    hold_review: str | None = None
    duplicate_of: str | None = None
    reference: bytes | None = Field(default=None, sa_column=Column(LargeBinary, nullable=True, unique=True))
    """Keyed: by this a row that is given again is known."""
    commitment: str | None = None
    nonce: bytes | None = Field(default=None, sa_column=Column(LargeBinary, nullable=True))
    closed_at: str | None = None
    moves: int = 0


class TransitionRow(SQLModel, table=True):
    """One step in the life of a request: who took it, when and why."""

    __tablename__ = "transition"
    __table_args__: ClassVar[Any] = (_CLUSTERED,)
    request_id: str = Field(primary_key=True)
    number: int = Field(primary_key=True)
    at: str
    action: str
    before: str
    after: str
    actor: str
    why: str
    cite: str


class RestrictionRow(SQLModel, table=True):
    """A user's points taken out of training without being erased, and put back."""

    __tablename__ = "restriction"
    __table_args__ = (Index("restriction_request", "request_id"),)
    id: str = Field(primary_key=True)
    request_id: str
    handle: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    restricted_at: str
    taken: str
    """Where the points stood, as [dataset, shard, slice, root before, root after, [[rank, commitment], …]] lists."""
    returned_at: str | None = None
    returned: str | None = None
    cleaned_at: str | None = None
    """When the checkpoints that no longer fit were destroyed, after the last of the two."""


class SuppressedRow(SQLModel, table=True):
    """A user whose data is not taken in again."""

    __tablename__ = "suppressed"
    __table_args__: ClassVar[Any] = (_CLUSTERED,)
    handle: bytes = Field(sa_column=Column(LargeBinary, primary_key=True))
    since: str


class RecipientRow(SQLModel, table=True):
    """Who was given which model."""

    __tablename__ = "recipient"
    id: str = Field(primary_key=True)
    name: str
    model: str
    given_at: str
    ended_at: str | None = None


class NoticeRow(SQLModel, table=True):
    """What came of telling a recipient of an erasure."""

    __tablename__ = "notice"
    __table_args__: ClassVar[Any] = (_CLUSTERED,)
    erasure_id: str = Field(primary_key=True)
    recipient_id: str = Field(primary_key=True)
    outcome: str
    reason: str
    at: str


class BackupRow(SQLModel, table=True):
    """A backup of an encrypted store: who holds it can open what erasures rewrite of the points that it has."""

    __tablename__ = "backup"
    id: str = Field(primary_key=True)
    public: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    points: str
    """How many points each dataset had, as JSON, by its id."""
    made_at: str


class LeaseRow(SQLModel, table=True):
    __tablename__ = "lease"
    name: str = Field(primary_key=True)
    holder: str
    expires: float
    wanted: bool = False
    """Somebody with a better claim is waiting: let go at the next chance."""


class LeafRow(SQLModel, table=True):
    """What happened, in order. Never changed: a trigger refuses it.

    The trigger is a seat belt, not evidence: whoever holds the database can drop it, and the tree heads then show it.
    """

    __tablename__ = "leaf"
    number: int = Field(primary_key=True, sa_type=BigInteger)
    body: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class NodeRow(SQLModel, table=True):
    """Hashes of perfect subtrees of the log; level 0 are the leaves'."""

    __tablename__ = "node"
    __table_args__: ClassVar[Any] = (_CLUSTERED,)
    level: int = Field(primary_key=True)
    number: int = Field(primary_key=True, sa_type=BigInteger)
    hash: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class TreeHeadRow(SQLModel, table=True):
    __tablename__ = "tree_head"
    size: int = Field(primary_key=True, sa_type=BigInteger)
    note: str


class SigningKeyRow(SQLModel, table=True):
    """A public key and the indexes at which it counts."""

    __tablename__ = "signing_key"
    key_id: str = Field(primary_key=True)
    role: str
    public: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    since: int = Field(sa_type=BigInteger)
    until: int | None = Field(default=None, sa_type=BigInteger)


class ReceiptRow(SQLModel, table=True):
    __tablename__ = "receipt"
    request_id: str = Field(primary_key=True, foreign_key="request.id")
    leaf: int = Field(sa_type=BigInteger)
    detail: str
    key_id: str | None = None
    """The key that signed it; None until the receipt is written."""
