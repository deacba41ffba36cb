"""The type of a preset."""

from typing import Any

Settings = dict[str, Any]
"""Settings of `ModelConfig` that differ from its defaults, by name."""
