"""The settings that a resume changes: what is said, and what the result names."""

import dataclasses
from typing import Any

from tformer_jax.config import Config
from tformer_jax.config.fields import OTHER_TRAINING


@dataclasses.dataclass(frozen=True)
class SettingChanges:
    """The changes of a resume, after those that the checkpoint records."""

    from_step: int
    """Step of the checkpoint that the run continues from."""
    texts: list[str]
    """The changes of this resume, as `optim.clip_norm: 1.0 -> 0.5`."""
    earlier: list[dict[str, Any]]

    def of_training(self, step: int) -> list[dict[str, Any]]:
        """Returns the changes that affected the training of the steps up to `step`, with the step where each began."""
        new = [
            {"from_step": self.from_step, "setting": text}
            for text in self.texts
            if Config.resume_effect(text.partition(":")[0]) == OTHER_TRAINING
        ]
        return [*self.earlier, *(new if step > self.from_step else [])]
