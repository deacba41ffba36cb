"""Continuous batching: requests come and go at any time, and every step serves all that run."""

from tformer_jax.inference.engine.engine import PAGE_SIZE, SMOOTH, Engine, Event, Request

__all__ = ["PAGE_SIZE", "SMOOTH", "Engine", "Event", "Request"]
