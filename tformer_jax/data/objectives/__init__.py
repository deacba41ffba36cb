"""Pre-training objectives: corrupted texts as inputs, and what they lack as labels."""

from tformer_jax.data.objectives.objective import Objective, objective_of
from tformer_jax.data.objectives.windows import CorruptedWindows, covering_corrupted

__all__ = ["CorruptedWindows", "Objective", "covering_corrupted", "objective_of"]
