"""Whole objects to a bucket and back with little Python between: signed by botocore, sent by urllib3.

A build saves states by the thousand while it trains. What a client library does around a request holds the interpreter
for two milliseconds, and training waits for it; signing and sending take a quarter of that. Settings, credentials and
addresses are those of s3fs, and what a server answers is raised as s3fs raises it. Where settings ask for more than
that, there is no straight way, and s3fs does it all.
"""

import re
from typing import Any
from urllib.parse import quote, urlsplit

_AT_ONCE = 32
_CONNECT_SECONDS, _READ_SECONDS = 10.0, 60.0


class Straight:
    """The straight way to one bucket."""

    def __init__(self, base: str, region: str, credentials: Any, authorities: str) -> None:
        import urllib3  # with s3fs, heavy

        self._base, self._region, self._credentials = base, region, credentials
        timeout = urllib3.Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS)
        self._pool = urllib3.PoolManager(maxsize=_AT_ONCE, retries=False, timeout=timeout, ca_certs=authorities)

    def put(self, key: str, data: bytes) -> None:
        """Store an object."""
        self._send("PUT", key, data)

    def get(self, key: str) -> bytes:
        """Return the bytes of an object."""
        return self._send("GET", key)

    def _send(self, method: str, key: str, data: bytes | None = None) -> bytes:
        from botocore.auth import S3SigV4Auth  # with s3fs, heavy
        from botocore.awsrequest import AWSRequest
        from urllib3.exceptions import HTTPError, ProtocolError

        url = self._base + quote(key, safe="/~")
        request = AWSRequest(method, url, {} if data is None else {"Content-Type": "application/octet-stream"}, data)
        # Credentials as they are now: those of a role are renewed every few hours.
        S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", self._region).add_auth(request)
        headers = dict(request.headers.items())
        try:
            try:
                answer = self._pool.request(method, url, body=data, headers=headers, decode_content=False)
            except ProtocolError:
                # A server closes lines that were idle, and one may be used again just then. Neither request minds.
                answer = self._pool.request(method, url, body=data, headers=headers, decode_content=False)
        except HTTPError as error:
            raise ConnectionError(str(error)) from error
        if answer.status != 200:
            raise _refusal(method, answer.status, answer.data)
        return answer.data


def straight_to(fs: Any, bucket: str) -> Straight | None:
    """Return the straight way to a bucket that s3fs reaches; None where something is asked for that only s3fs knows."""
    from botocore.httpsession import get_cert_path  # with s3fs, heavy
    from botocore.session import Session
    from botocore.utils import get_environ_proxies
    from fsspec.asyn import sync

    asked = {*fs.client_kwargs, *fs.s3_additional_kwargs, *fs.req_kw, *fs.kwargs} - {"region_name", "profile"}
    if asked or fs.anon or fs.key or fs.secret or fs.token or "signature_version" in fs.config_kwargs:
        return None
    session = Session(profile=fs.kwargs.get("profile"))
    credentials = session.get_credentials()
    # Asked once, s3fs tells how the bucket is addressed: by its name in the host or in the path.
    address = urlsplit(fs.url(f"{bucket}/x"))
    base = f"{address.scheme}://{address.netloc}{address.path.removesuffix('x')}"
    if credentials is None or get_environ_proxies(base):
        return None
    region = sync(fs.loop, fs.get_s3, bucket).meta.region_name or "us-east-1"
    return Straight(base, region, credentials, session.get_config_variable("ca_bundle") or get_cert_path(True))


def _refusal(method: str, status: int, body: bytes) -> BaseException:
    """Return what s3fs raises for such an answer."""
    from botocore.exceptions import ClientError  # with s3fs, heavy
    from s3fs.errors import translate_boto_error

    said = {word: re.search(rb"<%b>([^<]*)</%b>" % (word, word), body) for word in (b"Code", b"Message")}
    code, message = (found.group(1).decode(errors="replace") if found else str(status) for found in said.values())
    told = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error: BaseException = translate_boto_error(ClientError(told, f"{method.title()}Object"))
    return error
