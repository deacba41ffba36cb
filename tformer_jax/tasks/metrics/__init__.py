"""Metrics of texts; `kinds.METRICS` names them."""
