"""JSON objects whose last field is a digest of everything before it: any single flipped bit is detected."""

from __future__ import annotations

from hashlib import blake2b


def with_digest(plain: bytes) -> bytes:
    """Append the digest to a JSON object as its last field."""
    body = plain.removesuffix(b"}")
    return body + _field(body)


def digest_mismatch(content: bytes) -> str | None:
    """How the stored digest differs from the content's; None if they are equal."""
    body, found = content[:-_FIELD_BYTES], content[-_FIELD_BYTES:]
    expected = _field(body)
    return None if found == expected else f"ends with {found!r}, and its content requires {expected!r}"


def has_digest(content: bytes) -> bool:
    """Whether the last field is a digest, right or wrong."""
    return content[-_FIELD_BYTES:].startswith(b',"digest":"')


def _field(body: bytes) -> bytes:
    return b',"digest":"%s"}' % blake2b(body, digest_size=16).hexdigest().encode()


_FIELD_BYTES = len(_field(b""))
