"""What users have registered, in order. `extension` fills it; the key of the cache asks for it without loading that."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ferrite.extension import UserPass

registered: list[UserPass] = []


def digest() -> str:
    """Of all that is registered: part of what a compiled result depends on."""
    return hashlib.sha256("".join(entry.digest() for entry in registered).encode()).hexdigest()
