"""What a page explains: formulas, shapes, functions, figures and mistakes, as plain values."""

import dataclasses
import functools
import inspect
import re
import textwrap
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.lab.explain.figures import Heat, Lines
from tformer_jax.lab.explain.mathml import Math
from tformer_jax.nn.attention import Attention
from tformer_jax.nn.attention_ops import Operands, attention_weights
from tformer_jax.nn.module import WATCHED

MIN_TOKENS, MAX_TOKENS = 2, 32
"""Numbers of tokens that a text may have."""
WORDS = "words, punctuation, Chinese characters"
_CJK = "\u3040-\u30ff\u3400-\u9fff"
_TOKEN = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+|[^\w\s]")


@dataclasses.dataclass(frozen=True)
class Example:
    """The sentence of the figures and its translation, in tokens: of `from_text`, or of a run's tokenizer."""

    source: tuple[str, ...]
    target: tuple[str, ...]

    @classmethod
    def from_text(cls, text: str, target: str | None = None) -> "Example":
        """Splits the texts into words, punctuation and Chinese characters; without a target, it is the text backwards.

        Raises:
            UserError: a text has fewer than `MIN_TOKENS` or more than `MAX_TOKENS` tokens.
        """
        source = tuple(_TOKEN.findall(text))
        return cls.from_tokens(source, source[::-1] if target is None else tuple(_TOKEN.findall(target)), WORDS)

    @classmethod
    def from_tokens(
        cls, source: Sequence[str], target: Sequence[str], kind: str, translated: str | None = None
    ) -> "Example":
        """Returns the example with these tokens.

        Args:
            kind: what the tokens are, for errors.
            translated: the target as text if a run has translated the source; None: the user wrote it.

        Raises:
            UserError: as for `from_text`.
        """
        by_run = "" if translated is None else f", in place of the run's translation {translated!r}"
        for name, tokens in (("--text", source), (f"--target{by_run}", target)):
            if not MIN_TOKENS <= len(tokens) <= MAX_TOKENS:
                raise UserError(f"{name}: write {MIN_TOKENS} to {MAX_TOKENS} tokens ({kind}), not {len(tokens)}")
        return cls(tuple(source), tuple(target))

    @property
    def x(self) -> np.ndarray:
        """The embeddings of the source, float32 [1, T, `CFG.dim`]."""
        return vectors(self.source, CFG.dim)[None]


CFG = ModelConfig(
    family="seq2seq", dim=16, num_heads=4, num_kv_heads=2, ffn_dim=32, encoder_layers=1, decoder_layers=1, dropout=0.0
)
"""The model of the figures: D = 16, N = 4, K = 2, H = 4, F = 32."""


def vectors(tokens: Sequence[str], size: int) -> np.ndarray:
    """Draws a vector from N(0, 1) for each distinct token: float32 [T, size]. The case of letters is ignored."""
    rows = [np.random.default_rng(zlib.crc32(token.lower().encode())).normal(size=size) for token in tokens]
    return np.array(rows, np.float32)


def random_params(module: nn.Module, *arguments: Any, **options: Any) -> dict[str, Any]:
    """Draws all parameters of a module from N(0, 1/4), from a fixed seed."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(functools.partial(module.init, **options), jax.random.key(0), *arguments)["params"]
    return jax.tree.map(lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), leaf.dtype), nn.unbox(shapes))


@functools.partial(jax.jit, static_argnums=0)
def run_attention(module: Attention, params: Any, *inputs: jax.Array) -> tuple[jax.Array, Operands, jax.Array]:
    """Returns the output of an attention module, its operands, and its weights [B, N, T, S]."""
    (out, _), collected = module.apply({"params": params}, *inputs, mutable=[WATCHED])
    (operands,) = collected[WATCHED]["operands"]
    return out, operands, attention_weights(operands)


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array of a topic."""

    name: str
    letters: str
    """Its axes in the legend's letters, such as "B T N H"."""
    sizes: tuple[int, ...]
    """Its axes in the figures."""
    meaning: str


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A mistake that is often made, and the test that catches it."""

    text: str
    test: str
    """Such as "nn/test_masks.py::test_rules_are_combined", below tests/."""


@dataclasses.dataclass(frozen=True)
class Topic:
    """One mechanism."""

    title: str
    text: str
    formulas: Sequence[Math]
    shapes: Sequence[Shape]
    functions: Sequence[Any]
    """Functions and classes that compute it."""
    figures: Sequence[Heat | Lines]
    mistakes: Sequence[Mistake]

    def sources(self) -> list[tuple[str, str]]:
        """Returns the qualified name and the source of each function."""
        plain = [inspect.unwrap(function) for function in self.functions]
        return [
            (f"{function.__module__}.{function.__qualname__}", textwrap.dedent(inspect.getsource(function)).strip())
            for function in plain
        ]


def make_topic(name: str, *, values: Mapping[str, Any] | None = None, **parts: Any) -> Topic:
    """Returns a topic with the title, the text and the mistakes that `topics.toml` has for `name`.

    Args:
        values: numbers in the text, by their names in braces.
        parts: the other fields of `Topic`.
    """
    prose = _read_prose()[name]
    text = prose["text"].format(**values) if values else prose["text"]
    return Topic(prose["title"], text, mistakes=[Mistake(*mistake) for mistake in prose["mistakes"]], **parts)


@functools.cache
def _read_prose() -> dict[str, Any]:
    return tomllib.loads((resources.files("tformer_jax.lab.explain") / "topics.toml").read_text(encoding="utf-8"))
