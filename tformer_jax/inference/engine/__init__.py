"""Continuous batching: requests are added at any time, and each step serves all running requests."""

from tformer_jax.inference.engine.engine import PAGE_SIZE, SMOOTH_SECONDS, Engine, Event, Request

__all__ = ["PAGE_SIZE", "SMOOTH_SECONDS", "Engine", "Event", "Request"]
