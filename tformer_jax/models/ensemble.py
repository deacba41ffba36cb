"""Several models with one vocabulary that predict as one: the mean of their probabilities at each token.

An ensemble has the interface of a model that decodes. Features and encoder outputs of the members stand side by side in
the last axis, and a cache has the layers of all members after each other, which share its slots and positions.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, ModelConfig
from tformer_jax.config.layers import MEANS
from tformer_jax.nn.decoder_cache import DecoderCache, mask_kinds


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """Members of one class of models that decode, such as `Seq2Seq`; parameters are a tuple, one tree per member."""

    members: tuple[Any, ...]
    mean: str = MEANS[0]

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the first member: of its class, such as `continues`, or its config."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.members[0], name)

    def apply(
        self, variables: Any, *arguments: Any, method: str = "__call__", mutable: Any = False, **options: Any
    ) -> Any:
        """Applies a method of the members, as `flax.linen.Module.apply` does; see the module's docstring."""
        each = []
        for number, (member, params) in enumerate(zip(self.members, variables["params"], strict=True)):
            own = (self._part_of(method, number, arguments[0]), *arguments[1:]) if arguments else ()
            if method == "decode_step":
                own = (arguments[0], self._cache_of(number, arguments[1]), *arguments[2:])
            each.append(member.apply({"params": params}, *own, method=method, **options))
        result = self._combined(method, each)
        return result if mutable is False else (result, {})

    def _part_of(self, method: str, number: int, array: Any) -> Any:
        """Returns the features or encoder outputs of a member; other arguments are the same for all members."""
        if method != "logits" and (method != "init_cache" or not self.members[number].reads_source):
            return array
        starts = np.cumsum([0, *(member.cfg.dim for member in self.members)])
        return array[..., starts[number] : starts[number + 1]]

    def _cache_of(self, number: int, cache: DecoderCache) -> DecoderCache:
        starts = np.cumsum([0, *(member.cfg.decoder_layers for member in self.members)])
        return dataclasses.replace(cache, layers=cache.layers[starts[number] : starts[number + 1]])

    def _combined(self, method: str, each: Sequence[Any]) -> Any:
        if method in ("features", "encode"):
            return jnp.concatenate(each, axis=-1)
        if method == "init_cache":
            return joined_caches(each)
        if method == "decode_step":
            logits, caches = zip(*each, strict=True)
            return self._mean(logits), joined_caches(caches)
        return self._mean(each)

    def _mean(self, logits: Sequence[jax.Array]) -> jax.Array:
        """Returns the log-probabilities of the mean: float32 [..., V]."""
        each = jnp.stack([jax.nn.log_softmax(member.astype(jnp.float32)) for member in logits])
        if self.mean == MEANS[1]:
            return jax.nn.log_softmax(each.mean(axis=0))
        return jax.nn.logsumexp(each, axis=0) - jnp.log(len(logits))


def first_member(model: Any, params: Any) -> tuple[Any, Any]:
    """Returns the first member of an ensemble with its parameters, or the model itself."""
    return (model.members[0], params[0]) if isinstance(model, Ensemble) else (model, params)


def member_configs(model: Any) -> list[ModelConfig]:
    """Returns the configs of the members of an ensemble, or of the only model."""
    return [member.cfg for member in (model.members if isinstance(model, Ensemble) else (model,))]


def joined_caches(caches: Sequence[DecoderCache]) -> DecoderCache:
    """Returns a cache with the layers of all caches, and the slots and lengths of the first."""
    return dataclasses.replace(caches[0], layers=tuple(layer for cache in caches for layer in cache.layers))


def check_member(first: Config, other: Config, name: str) -> None:
    """Raises `UserError` if a run cannot decode together with the first one."""
    if not first.model.model_class.decodes:
        raise UserError(f"an ensemble needs models that decode, unlike the {first.model.family} of the first run")
    mine, theirs = _shared_settings(first), _shared_settings(other)
    for setting, value in mine.items():
        if theirs[setting] != value:
            raise UserError(
                f"{name} cannot decode together with the first run: {setting} is {theirs[setting]!r}, not {value!r}; "
                "train it with the same value"
            )


def _shared_settings(cfg: Config) -> dict[str, Any]:
    """Returns what all members share: the shapes of their inputs and caches, and how texts become inputs."""
    model, data = cfg.model, cfg.data
    names = ("family", "max_length", "vocab_size", "source_vocab_size", "prefix_lm")
    return {f"model.{name}": getattr(model, name) for name in names} | {
        "model.layer_pattern": tuple(mask_kinds(model)),
        "data.source_tags": data.source_tags,
        "data.target_tags": data.target_tags,
        "data.transforms": tuple(transform for transform in data.transforms if transform.is_format),
        "embed.only": cfg.embed.only,
    }
