"""JSON in one canonical form, with a checksum: whatever is flipped, cut off or edited is found when it is read."""

from __future__ import annotations

import json
from typing import Any

import xxhash


def seal(content: Any) -> bytes:
    """`content`: what JSON has words for; no NaN."""
    body = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return b'{"checksum":"%s","content":%s}\n' % (xxhash.xxh3_128_hexdigest(body).encode(), body)


def unseal(data: bytes) -> Any:
    """Raises ValueError unless `data` is, byte for byte, what `seal` gives."""
    try:
        content = json.loads(data)["content"]
        same = seal(content) == data
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is no manifest ({error!r})") from error
    if not same:
        raise ValueError("it is not what was written")
    return content
