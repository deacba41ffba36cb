"""Pre-training objectives: inputs are corrupted texts, and labels are the tokens to restore."""

from tformer_jax.data.objectives.objective import Objective, objective_of
from tformer_jax.data.objectives.windows import CorruptedWindows, covering_corrupted

__all__ = ["CorruptedWindows", "Objective", "covering_corrupted", "objective_of"]
