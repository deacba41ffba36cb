"""Building blocks of Transformers: pure functions of arrays, and thin Linen modules that own their parameters."""
