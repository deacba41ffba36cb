"""The type of what models read."""

from collections.abc import Mapping
from typing import Any

Batch = Mapping[str, Any]
"""Arrays by key, such as int32 `tokens` [batch, tokens]."""
