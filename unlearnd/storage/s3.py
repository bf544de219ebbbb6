"""Objects in an S3 bucket, through s3fs: every version of them, and what becomes of each request.

A bucket may keep what was deleted: older versions, markers, uploads that never ended. Whoever destroys must list
all of them, delete each, and list again. What the server does not let go (an object lock, a missing right) is handed
back and never swallowed. Throttling and failures of the server are tried again with growing, jittered waits; what
the server refuses is not.
"""

import base64
import hashlib
import http.client
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from posixpath import dirname
from typing import Any, TypeVar

from unlearnd.errors import StorageError
from unlearnd.storage.straight import Straight, straight_to

T = TypeVar("T")

ATTEMPTS = 6
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0
_AT_ONCE = 16
_WHOLE = 64 << 20
"""Objects of more bytes than this go up in parts."""
_PART = 16 << 20
_SMALL = 1 << 20
_PASSING = {429, 500, 502, 503, 504}
_PASSING_CODES = {"SlowDown", "RequestTimeout", "RequestLimitExceeded", "Throttling", "ThrottlingException"}
_EXISTS = {"PreconditionFailed", "ConditionalRequestConflict", "OperationAborted", "412", "409"}
_UNKNOWN = {"NotImplemented", "MethodNotAllowed", "501", "405"}


@dataclass(frozen=True)
class Version:
    """One version of an object, a marker that hides it, or an upload of it that has not ended."""

    name: str
    id: str
    kind: str
    """`version`, `marker` or `upload`."""
    latest: bool
    size: int


@dataclass(frozen=True)
class Kept:
    """A version that could not be destroyed, and why."""

    name: str
    version: str
    why: str


@dataclass(frozen=True)
class Abilities:
    """What a probe of the place showed."""

    exclusive: bool
    """Two writers of one new name: exactly one succeeds."""
    versioning: str
    """`enabled`, `suspended` or `off`."""
    object_lock: bool


def options_for(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what s3fs is opened with for our own settings; `options` among them goes through as it is."""
    client: dict[str, Any] = {}
    if "region" in given:
        client["region_name"] = given["region"]
    checksums = given.get("checksums", "when_required")
    config = {
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": 2 * _AT_ONCE,
        "request_checksum_calculation": checksums,
        "response_checksum_validation": checksums,
        "s3": {"addressing_style": given.get("addressing_style", "auto")},
    }
    options: dict[str, Any] = {"use_listings_cache": False, "config_kwargs": config, "client_kwargs": client}
    if "endpoint_url" in given:
        options["endpoint_url"] = given["endpoint_url"]
    return options


class Bucket:
    """The objects of a bucket by their full paths, `bucket/key`."""

    def __init__(self, fs: Any, attempts: int = ATTEMPTS) -> None:
        self._fs, self._attempts = fs, attempts
        self._ways: dict[str, Straight | None] = {}
        # Trying again is ours: s3fs knows neither jitter nor which answers are worth it.
        fs.retries = 1

    def check(self, path: str) -> None:
        """Raise `StorageError` unless the bucket of `path` is there and may be looked at."""
        bucket = _split(path)[0]
        try:
            self._call("head_bucket", Bucket=bucket)
        except FileNotFoundError:
            raise StorageError(f"there is no bucket '{bucket}' at {self._where()}") from None
        except PermissionError:
            raise StorageError(f"the bucket '{bucket}' may not be used with the credentials given") from None

    def put(self, path: str, data: bytes, locked: bool = False) -> None:
        """Store an object; large ones go up in parts, and are there only once all parts are.

        The signature covers a digest of the bytes, so the server notices what a line changes. A bucket with object lock
        wants another one besides.
        """
        bucket, key = _split(path)
        if len(data) > _WHOLE:
            self._put_parts(bucket, key, data)
        elif not locked and (straight := self._way(bucket)):
            self._persist(lambda: straight.put(key, data))
        else:
            self._call("put_object", Bucket=bucket, Key=key, Body=data, **(_checked(data) if locked else {}))

    def create(self, path: str, data: bytes) -> bool:
        """Store a small object unless there is one of that name; say whether it was stored."""
        bucket, key = _split(path)
        try:
            self._call("put_object", Bucket=bucket, Key=key, Body=data, IfNoneMatch="*", **_checked(data))
        except OSError as error:
            if isinstance(error, FileExistsError) or _code(error) in _EXISTS:
                return False
            raise
        return True

    def get(self, path: str, version: str | None = None) -> bytes:
        """Return the bytes of an object, or of one version of it."""
        bucket, key = _split(path)
        if version is None and (straight := self._way(bucket)):
            return self._persist(lambda: straight.get(key))
        # One request: pieces fetched side by side may be of two objects when somebody writes in between.
        return bytes(self._persist(lambda: self._fs.cat_file(path, version_id=version, max_concurrency=1)))

    def sizes(self, path: str) -> dict[str, int]:
        """Return the objects below a folder with their sizes, by full path."""
        bucket, key = _split(path)
        prefix = f"{key}/" if key else ""
        pages = self._pages("list_objects_v2", bucket, prefix, ContinuationToken="NextContinuationToken")
        return {f"{bucket}/{entry['Key']}": int(entry["Size"]) for page in pages for entry in page.get("Contents", ())}

    def is_empty(self, path: str) -> bool:
        """Say whether there is nothing below a folder, no older version and no unfinished upload either."""
        bucket, key = _split(path)
        found = self._call("list_objects_v2", Bucket=bucket, Prefix=f"{key}/" if key else "", MaxKeys=1)
        return not found.get("Contents") and not self.versions(path)

    def versions(self, path: str) -> list[Version]:
        """Return every version, marker and unfinished upload below a folder, named by full path."""
        bucket, key = _split(path)
        prefix = f"{key}/" if key else ""
        try:
            found = list(self._listed(bucket, prefix))
        except OSError as error:
            if _code(error) not in _UNKNOWN:
                raise
            # The server knows no versions: what it lists is all there is.
            found = [Version(name, "", "version", True, size) for name, size in self.sizes(path).items()]
        return found + self._uploads(bucket, prefix)

    def exists(self, path: str) -> bool:
        """Say whether there is an object of that name."""
        bucket, key = _split(path)
        try:
            self._call("head_object", Bucket=bucket, Key=key)
        except FileNotFoundError:
            return False
        return True

    def versions_of(self, paths: Iterable[str]) -> list[Version]:
        """Return every version, marker and unfinished upload of these objects."""
        wanted = set(paths)
        folders = sorted({dirname(path) for path in wanted})
        return [one for folder in folders for one in self.versions(folder) if one.name in wanted]

    def destroy(self, doomed: Sequence[Version]) -> tuple[list[Version], list[Kept]]:
        """Destroy these versions, list again, and return which are gone and what is still there of their objects."""
        refused = {}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for one, why in zip(doomed, pool.map(self._delete, doomed), strict=True):
                if why:
                    refused[one.name, one.id] = why
        left = self.versions_of(one.name for one in doomed)
        still = {(one.name, one.id) for one in left}
        gone = [one for one in doomed if (one.name, one.id) not in still]
        why_not = "it is still listed after it was deleted"
        return gone, [Kept(one.name, one.id, refused.get((one.name, one.id), why_not)) for one in left]

    def probe(self, path: str, name: str) -> Abilities:
        """Find out what the bucket can do, with an object `name` of ours that is destroyed again."""
        bucket = _split(path)[0]
        lock = self._ask("get_object_lock_configuration", bucket).get("ObjectLockConfiguration", {})
        versioning = str(self._ask("get_bucket_versioning", bucket).get("Status") or "off").lower()
        exclusive = False
        try:
            exclusive = self.create(f"{path}/{name}", b"one") and not self.create(f"{path}/{name}", b"two")
        except OSError as error:
            if _code(error) not in _UNKNOWN:
                raise
        locked = lock.get("ObjectLockEnabled") == "Enabled"
        kept = self.destroy(self.versions_of([f"{path}/{name}"]))[1]
        if kept and not locked:
            raise StorageError(f"the bucket '{bucket}' does not let go what was stored in it: {kept[0].why}")
        return Abilities(exclusive, versioning, locked)

    def _put_parts(self, bucket: str, key: str, data: bytes) -> None:
        upload = self._call("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
        about = {"Bucket": bucket, "Key": key, "UploadId": upload}

        def send(number: int) -> dict[str, Any]:
            part = bytes(memoryview(data)[number * _PART : (number + 1) * _PART])
            tag = self._call("upload_part", PartNumber=number + 1, Body=part, **about)["ETag"]
            return {"PartNumber": number + 1, "ETag": tag}

        try:
            with ThreadPoolExecutor(4) as pool:
                parts = list(pool.map(send, range(-(-len(data) // _PART))))
            self._call("complete_multipart_upload", MultipartUpload={"Parts": parts}, **about)
        except BaseException:
            self._call("abort_multipart_upload", **about)
            raise

    def _delete(self, one: Version) -> str | None:
        """Delete one version; return why it stays, if the server says that it must."""
        bucket, key = _split(one.name)
        try:
            if one.kind == "upload":
                self._call("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=one.id)
            else:
                version = {"VersionId": one.id} if one.id else {}
                self._call("delete_object", Bucket=bucket, Key=key, **version)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            return f"the server refuses: {error}"
        return None

    def _listed(self, bucket: str, prefix: str) -> Iterator[Version]:
        markers = {"KeyMarker": "NextKeyMarker", "VersionIdMarker": "NextVersionIdMarker"}
        for page in self._pages("list_object_versions", bucket, prefix, **markers):
            for kind, entries in (("version", page.get("Versions", ())), ("marker", page.get("DeleteMarkers", ()))):
                for entry in entries:
                    size, name = int(entry.get("Size", 0)), f"{bucket}/{entry['Key']}"
                    yield Version(name, entry.get("VersionId") or "", kind, bool(entry.get("IsLatest")), size)

    def _uploads(self, bucket: str, prefix: str) -> list[Version]:
        markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        try:
            pages = list(self._pages("list_multipart_uploads", bucket, prefix, **markers))
        except OSError as error:
            if _code(error) in _UNKNOWN:
                return []
            raise
        listed = [entry for page in pages for entry in page.get("Uploads", ())]
        return [Version(f"{bucket}/{entry['Key']}", entry["UploadId"], "upload", False, 0) for entry in listed]

    def _pages(self, method: str, bucket: str, prefix: str, **markers: str) -> Iterator[Mapping[str, Any]]:
        """Yield a listing page by page; `markers` are what to ask the next page with, and where the last one has it."""
        more: dict[str, Any] = {}
        while True:
            page = self._call(method, Bucket=bucket, Prefix=prefix, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            more = {ask: page[answer] for ask, answer in markers.items() if page.get(answer)}

    def _ask(self, method: str, bucket: str) -> Mapping[str, Any]:
        """Return what a bucket says about itself; nothing where the server does not know the question."""
        try:
            return self._call(method, Bucket=bucket)
        except FileNotFoundError:
            return {}
        except OSError as error:
            if _code(error) in _UNKNOWN | {"ObjectLockConfigurationNotFoundError", "AccessDenied", "404"}:
                return {}
            raise

    def _way(self, bucket: str) -> Straight | None:
        if bucket not in self._ways:
            # Two threads may both find out, and find the same.
            self._ways[bucket] = straight_to(self._fs, bucket)
        return self._ways[bucket]

    def _call(self, method: str, **arguments: Any) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self._persist(lambda: self._fs.call_s3(method, **arguments))
        return answer

    def _persist(self, call: Callable[[], T]) -> T:
        """Call; after a failure that may pass, wait and call again."""
        for attempt in range(1, self._attempts + 1):
            try:
                return call()
            except Exception as error:  # from s3fs, botocore or aiohttp, which share no base
                if attempt == self._attempts or not _may_pass(error):
                    raise
            # All writers wait for another while: those who failed together must not come back together.
            time.sleep(min(_LONGEST_WAIT, _FIRST_WAIT * 2**attempt) * secrets.randbelow(1000) / 1000)
        raise AssertionError("at least one attempt is made")

    def _where(self) -> str:
        return str(self._fs.endpoint_url or "Amazon S3")


def _checked(data: bytes) -> dict[str, str]:
    """Return what a bucket with object lock has the server check a small object by; it takes none without."""
    if len(data) > _SMALL:
        return {}
    return {"ContentMD5": base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()}


def _split(path: str) -> tuple[str, str]:
    bucket, _, key = path.partition("/")
    return bucket, key


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _response(error: BaseException) -> Mapping[str, Any]:
    found = (getattr(one, "response", None) for one in _chain(error))
    return next((answer for answer in found if isinstance(answer, Mapping)), {})


def _code(error: BaseException) -> str:
    """Return the error code of a server's answer; empty where it did not answer."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def _may_pass(error: BaseException) -> bool:
    """Say whether it may help to ask again: the server is busy or failed, or the line broke."""
    answer = _response(error)
    if answer:
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status in _PASSING or _code(error) in _PASSING_CODES
    return any(_broke(one) for one in _chain(error))


def _broke(error: BaseException) -> bool:
    from aiohttp import ClientPayloadError  # with s3fs, heavy
    from botocore.exceptions import HTTPClientError
    from botocore.parsers import ResponseParserError

    lines = (
        HTTPClientError,
        ResponseParserError,
        ClientPayloadError,
        ConnectionError,
        TimeoutError,
        http.client.IncompleteRead,
    )
    return isinstance(error, lines)
