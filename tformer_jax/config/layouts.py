"""Values of settings about dtypes, stored layouts and rematerialization."""

DTYPES = ("float32", "bfloat16")
QUANTIZATIONS = ("int8_weights", "int8")
PROJECTIONS = ("query", "key", "value", "output")
FUSED = {"separate": (), "fused_qkv": ("query", "key", "value"), "fused_kv": ("key", "value")}
"""Projections that each value of `attention_projections` fuses into one."""
REMAT_POLICIES = (
    "none",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
)
NORM_PLACEMENTS = ("pre", "post", "both", "output")
MEANS = ("probabilities", "log_probabilities")
"""What an ensemble averages; the mean of log-probabilities is normalized."""
