"""The parts of a Transformer: pure functions over arrays, and thin Linen modules that own their parameters."""
