"""Continuous batching: requests come and go at any time, and every step serves all that run."""

from tformer_jax.inference.engine.engine import SMOOTH, Engine, Event, Request

__all__ = ["SMOOTH", "Engine", "Event", "Request"]
