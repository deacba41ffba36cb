"""Serves a trained model over HTTP, on top of the continuous-batching engine."""
