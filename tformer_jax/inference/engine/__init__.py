"""Continuous batching: requests are added at any time, and each step serves all running requests."""

from tformer_jax.inference.engine.engine import MAX_LANES, SMOOTH_SECONDS, Engine
from tformer_jax.inference.engine.events import Event, Request
from tformer_jax.inference.engine.pool import PAGE_SIZE, pool_pages, row_pages

__all__ = ["MAX_LANES", "PAGE_SIZE", "SMOOTH_SECONDS", "Engine", "Event", "Request", "pool_pages", "row_pages"]
