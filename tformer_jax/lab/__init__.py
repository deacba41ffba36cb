"""The laboratory: measurements, checks and explanations that no other layer needs; a reader may skip it."""
