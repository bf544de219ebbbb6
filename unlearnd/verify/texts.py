"""Read the small pieces that every format here is made of: base64, hexadecimal digits, decimal numbers, moments.

Each has exactly one spelling. A second spelling of the same value would let two files that look different be the same
statement, or one file be read in two ways.
"""

import base64
import binascii
import re
from datetime import UTC, datetime

from unlearnd.errors import FormatError

_HEX = re.compile(r"[0-9a-f]{64}")
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,18}")
_MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


def read_base64(text: str, what: str) -> bytes:
    """Return the bytes of standard base64 with padding, refusing any other spelling of them."""
    try:
        value = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise FormatError(f"{what} is not base64") from None
    if base64.b64encode(value).decode() != text:
        raise FormatError(f"{what} is not canonical base64")
    return value


def read_either_base64(text: str, what: str) -> bytes:
    """Return the bytes of base64 in the standard or the URL-safe alphabet, as DSSE asks for."""
    if "-" in text or "_" in text:
        if "+" in text or "/" in text:
            raise FormatError(f"{what} mixes two alphabets of base64")
        text = text.replace("-", "+").replace("_", "/")
    return read_base64(text, what)


def read_digest(text: object, what: str) -> bytes:
    """Return the 32 bytes of 64 lower-case hexadecimal digits."""
    if not isinstance(text, str) or not _HEX.fullmatch(text):
        raise FormatError(f"{what} is not 64 lower-case hexadecimal digits")
    return bytes.fromhex(text)


def read_decimal(text: str, what: str) -> int:
    """Return a number below 2^63 written without sign or leading zeros."""
    if not _DECIMAL.fullmatch(text) or int(text) >= 2**63:
        raise FormatError(f"{what} is not a decimal number below 2^63")
    return int(text)


def read_moment(text: object, what: str) -> datetime:
    """Return the moment of `YYYY-MM-DDTHH:MM:SSZ`."""
    if not isinstance(text, str) or not _MOMENT.fullmatch(text):
        raise FormatError(f"{what} is not a moment like 2026-01-31T12:00:00Z")
    try:
        return datetime(*(int(part) for part in re.split("[-T:Z]", text[:-1])), tzinfo=UTC)  # type: ignore[misc,arg-type]
    except ValueError:
        raise FormatError(f"{what} is not a moment of the calendar") from None


def show_moment(moment: datetime) -> str:
    """Return a moment as it is written in receipts."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
