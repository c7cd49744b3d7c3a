"""JSON in one form, with a checksum: whatever is flipped, cut off or edited is found when it is read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import xxhash

from graphft.errors import plain


def parse_json(data: bytes | str) -> Any:
    """Parses a file that may be damaged. Raises ValueError, also for what is nested too deep."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def readable_json(content: Any) -> str:
    """Encodes over several lines, for people and programs."""
    return msgspec.json.format(encode_json(content), indent=1).decode()


def encode_json(content: Any) -> bytes:
    """Encodes what is not finite as null; what is no text (a folder's name may be bytes) has escapes."""
    try:
        return msgspec.json.encode(content)
    except UnicodeEncodeError:
        return msgspec.json.encode(plain(content))


def seal(content: Any) -> bytes:
    """Encodes `content`, of JSON's words without NaN, with a checksum."""
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return b'{"checksum":"%s","content":%s}\n' % (xxhash.xxh3_128_hexdigest(body).encode(), body)


def unseal(data: bytes) -> Any:
    """Raises ValueError unless `data` is, byte for byte, what `seal` gives."""
    try:
        content = parse_json(data)["content"]
        same = seal(content) == data
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is no manifest ({error!r})") from error
    if not same:
        raise ValueError("it is not what was written")
    return content
