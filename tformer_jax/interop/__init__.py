"""Reads and writes checkpoints of other libraries. The tables are declarative and used in both directions."""
