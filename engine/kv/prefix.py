"""Content hashes of KV blocks. Pure.

A block's keys and values depend on all tokens up to its end, so its hash chains over its parent's:

    h(0) = sha256(root, tokens 0 ... B-1)      h(i) = sha256(h(i-1), tokens iB ... (i+1)B-1)

The root is random per process and is mixed with whatever else changes the values or must keep prefixes apart (an
adapter's name, the client's `cache_salt`). So nobody can craft a collision or probe another tenant's prompts by time.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_hash(secret: bytes, *, adapter: str = "", cache_salt: str = "") -> bytes:
    """The parent of a request's first block."""
    digest = hashlib.sha256(secret)
    for part in (adapter, cache_salt):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block that holds `token_ids` and comes after the block `parent`."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()
