"""Read the small pieces that every format here is made of: base64, hexadecimal digits, decimal numbers, moments.

Each has exactly one spelling. A second spelling of the same value would let two files that look different be the same
statement, or one file be read in two ways.
"""

from __future__ import annotations

from binascii import Error, a2b_base64, b2a_base64
from datetime import UTC, datetime

from unlearnd.errors import FormatError

_HEX = "0123456789abcdef"
_MOMENT = "0000-00-00T00:00:00Z"
_TO_ZERO = str.maketrans("123456789", "000000000")


def read_base64(text: str, what: str) -> bytes:
    """Return the bytes of standard base64 with padding, refusing any other spelling of them."""
    try:
        value = a2b_base64(text.encode("ascii"), strict_mode=True)
    except (Error, UnicodeEncodeError):
        raise FormatError(f"{what} is not base64") from None
    if show_base64(value) != text:
        raise FormatError(f"{what} is not canonical base64")
    return value


def show_base64(value: bytes) -> str:
    """Return bytes in standard base64 with padding."""
    return b2a_base64(value, newline=False).decode()


def read_either_base64(text: str, what: str) -> bytes:
    """Return the bytes of base64 in the standard or the URL-safe alphabet, as DSSE asks for."""
    if "-" in text or "_" in text:
        if "+" in text or "/" in text:
            raise FormatError(f"{what} mixes two alphabets of base64")
        text = text.replace("-", "+").replace("_", "/")
    return read_base64(text, what)


def read_digest(text: object, what: str) -> bytes:
    """Return the 32 bytes of 64 lower-case hexadecimal digits."""
    if not isinstance(text, str) or not is_hex(text, 64):
        raise FormatError(f"{what} is not 64 lower-case hexadecimal digits")
    return bytes.fromhex(text)


def is_hex(text: str, digits: int) -> bool:
    """Say whether a text is so many lower-case hexadecimal digits and nothing else."""
    return len(text) == digits and not text.strip(_HEX)


def read_decimal(text: str, what: str) -> int:
    """Return a number below 2^63 written without sign or leading zeros."""
    if not is_decimal(text, 19) or int(text) >= 2**63:
        raise FormatError(f"{what} is not a decimal number below 2^63")
    return int(text)


def is_decimal(text: str, digits: int) -> bool:
    """Say whether a text is a number of at most so many digits, without sign or leading zeros."""
    return len(text) <= digits and text.isascii() and text.isdigit() and (text[0] != "0" or text == "0")


def read_moment(text: object, what: str) -> datetime:
    """Return the moment of `YYYY-MM-DDTHH:MM:SSZ`."""
    if not isinstance(text, str) or len(text) != len(_MOMENT) or text.translate(_TO_ZERO) != _MOMENT:
        raise FormatError(f"{what} is not a moment like 2026-01-31T12:00:00Z")
    try:
        year, month, day, hour, minute, second = map(int, text[:-1].replace("T", "-").replace(":", "-").split("-"))
        return datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        raise FormatError(f"{what} is not a moment of the calendar") from None


def show_moment(moment: datetime) -> str:
    """Return a moment as it is written in receipts."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
