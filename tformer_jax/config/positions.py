"""Settings of positions."""

import dataclasses
from typing import ClassVar

from tformer_jax.config.fields import Section, setting

YARN = {"scaling": ("yarn",)}


@dataclasses.dataclass(frozen=True)
class RotaryConfig(Section):
    """Rotary position embeddings."""

    path: ClassVar[str] = "model.rotary"

    pairing: str = setting(
        "halves",
        "rotate feature i with i + R/2 (of R rotated features), or with its neighbor",
        choices=("halves", "interleaved"),
    )
    base: float = setting(
        10_000.0, "base of the wavelengths (RoPE theta); the longest is about 2 pi base tokens", low=1.0
    )
    window_base: float | None = setting(
        None, "base in `window` layers, without scaling; None: as in full layers", low=1.0
    )
    fraction: float = setting(1.0, "fraction of each head that is rotated, its first features", low=0.0, high=1.0)
    scaling: str = setting("none", "scaling of long contexts", choices=("none", "linear", "llama3", "yarn"))
    factor: float = setting(1.0, "scaling factor", low=1.0)
    original_length: int = setting(
        8192, "context length before scaling, in tokens", low=1, used_by={"scaling": ("llama3", "yarn")}
    )
    beta_fast: float = setting(
        32.0, "frequencies of at least this many rotations in original_length are kept", above=0.0, used_by=YARN
    )
    beta_slow: float = setting(
        1.0,
        "frequencies of at most this many rotations in original_length are divided by factor",
        above=0.0,
        used_by=YARN,
    )
    rounded: bool = setting(
        True, "round the indices of these frequencies outward, as YaRN's authors do; gpt-oss: False", used_by=YARN
    )
    attention_factor: float | None = setting(
        None,
        "scale of rotated queries and of rotated keys; None: 0.1 ln(factor) + 1",
        above=0.0,
        used_by=YARN,
    )

    def check(self) -> None:
        if self.scaling == "none" and self.factor != 1.0:
            raise self.error("factor", "needs model.rotary.scaling='linear', 'llama3' or 'yarn'; write 1.0")
        if self.scaling != "none" and self.factor == 1.0 and self.attention_factor is None:
            raise self.error("factor", f"must exceed 1.0 for model.rotary.scaling={self.scaling!r}")
        if self.scaling == "yarn" and self.base == 1.0:
            raise self.error("base", "must exceed 1.0 for model.rotary.scaling='yarn'")
        if self.beta_fast <= self.beta_slow:
            raise self.error("beta_fast", f"must exceed model.rotary.beta_slow={self.beta_slow}")


@dataclasses.dataclass(frozen=True)
class RelativeConfig(Section):
    """Relative position biases of T5."""

    path: ClassVar[str] = "model.relative"

    buckets: int = setting(32, "number of distance buckets", low=4)
    distance: int = setting(128, "distance, in tokens, from which all distances share a bucket", low=2)
    by_layer: bool = setting(False, "each layer has biases of its own (umT5); False: all layers of a stack share them")

    def check(self) -> None:
        if self.buckets % 4:
            raise self.error("buckets", "must be a multiple of 4")
        if self.distance <= self.buckets // 2:
            raise self.error("distance", f"must exceed half of model.relative.buckets={self.buckets}")
