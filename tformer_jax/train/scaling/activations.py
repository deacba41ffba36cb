"""What the forward pass keeps for the backward pass, found by tracing it."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tformer_jax.config import ModelConfig
from tformer_jax.models import registry
from tformer_jax.models.losses import batch_loss

# fmt: off
ELEMENTWISE = {
    "abs", "add", "and", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "copy", "cos", "div",
    "eq", "erf", "exp", "exp2", "expand_dims", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "reshape", "rsqrt", "select_n",
    "sharding_constraint", "sign", "sin", "slice", "split", "sqrt", "square", "squeeze", "stop_gradient", "sub",
    "tanh", "transpose", "xor",
}
# fmt: on
"""Operations whose results a compiler may compute again inside whatever reads them."""


@dataclasses.dataclass(frozen=True)
class Source:
    """What a value comes from."""

    inputs: frozenset[str] = frozenset()
    """Some of params, batch and random."""
    arrays: frozenset[tuple[int, int]] = frozenset()
    """Number and bytes of the arrays from which elementwise operations give it."""


class Kept(NamedTuple):
    """Residuals of the backward pass."""

    arrays: tuple[int, ...]
    """Bytes of each array of numbers. Parameters, and what follows from them alone, are not among them."""
    dropped: int
    """Numbers that dropout decides about."""


def kept(cfg: ModelConfig, rows: int, length: int, loss_chunk: int | None = None, *, fused: bool = False) -> Kept:
    """What a training step keeps of `rows` rows of `length` tokens on each side.

    Masks are computed again where they are read, and what dropout leaves from what it saw: dropout costs its own
    decisions alone. With `fused`, so is whatever elementwise operations give, where that needs less.
    """
    drops: dict[str, Any] = {
        name: 0.0 for name in ("dropout", "attention_dropout", "ffn_dropout") if getattr(cfg, name)
    }
    read = [
        (aval, source)
        for aval, source in _residuals(dataclasses.replace(cfg, **drops), rows, length, loss_chunk)
        if source.inputs != {"params"}
    ]
    masks = _residuals(cfg, rows, length, loss_chunk) if drops else []
    numbers = tuple(_bytes(aval) for aval, _ in read if jnp.issubdtype(aval.dtype, jnp.number))
    beginnings = tuple(size for _, size in sorted(frozenset[tuple[int, int]]().union(*(s.arrays for _, s in read))))
    dropped = sum(aval.size for aval, source in masks if aval.dtype == bool and source.inputs == {"random"})
    return Kept(min(numbers, beginnings, key=sum) if fused else numbers, dropped)


def of_layer(cfg: ModelConfig, rows: int, length: int, *, fused: bool = False) -> Kept:
    """What one more layer, of the decoder where there is one, keeps without `remat`."""

    def of(layers: int) -> Kept:
        encoder = layers if cfg.family == "classifier" else 1
        plain = dataclasses.replace(cfg, remat="none", scan_layers=False)
        plain = dataclasses.replace(plain, encoder_layers=encoder, decoder_layers=layers)
        return kept(plain, rows, length, fused=fused)

    one, two = of(1), of(2)
    return Kept(tuple((Counter(two.arrays) - Counter(one.arrays)).elements()), two.dropped - one.dropped)


def _residuals(cfg: ModelConfig, rows: int, length: int, loss_chunk: int | None) -> list[tuple[Any, Source]]:
    """Shape, dtype and source of each array that the backward pass reads."""
    model = registry.build(cfg)
    params = nn.unbox(registry.shapes(model))
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, registry.example_batch(cfg, rows, length)))

    def residuals(params: Any, batch: Any, key: jax.Array) -> list[jax.Array]:
        def loss(params: Any) -> jax.Array:
            sums, auxiliary = batch_loss(model, params, batch, chunk=loss_chunk, dropout_key=key)
            return sums.loss + auxiliary

        return [leaf for leaf in jax.tree.leaves(jax.vjp(loss, params)[1]) if isinstance(leaf, jax.Array)]

    traced = jax.make_jaxpr(residuals)(params, batch, jax.random.key(0)).jaxpr
    kinds = ["params"] * len(jax.tree.leaves(params)) + ["batch"] * len(jax.tree.leaves(batch)) + ["random"]
    found = zip(traced.outvars, sources(traced, [Source(frozenset([kind])) for kind in kinds]), strict=True)
    return list({id(var): (var.aval, source) for var, source in found}.values())


def sources(jaxpr: Any, inputs: Sequence[Source]) -> list[Source]:
    """What each result of a traced function comes from, given what its arguments do."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Source:
        return Source() if isinstance(atom, jax.extend.core.Literal) else known.get(atom, Source())

    for equation in jaxpr.eqns:
        arguments = [read(atom) for atom in equation.invars]
        known |= zip(equation.outvars, _results(equation, arguments), strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _results(equation: Any, arguments: list[Source]) -> list[Source]:
    name, params = equation.primitive.name, equation.params
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    if name == "scan":
        found = _of_loop(inner, arguments, params["num_consts"], params["num_carry"])
        return [_new(source, var) for source, var in zip(found, equation.outvars, strict=True)]
    if name == "checkpoint":
        return [_new(source, var) for source, var in zip(sources(inner, arguments), equation.outvars, strict=True)]
    if inner is not None and len(inner.invars) == len(arguments):
        return sources(inner, arguments)
    together = _together(arguments)
    return [together if name in ELEMENTWISE else _new(together, var) for var in equation.outvars]


def _of_loop(body: Any, arguments: list[Source], constants: int, carried: int) -> list[Source]:
    """What the results of a loop come from: what it carries may bring an input more each time, three at most."""
    for _ in range(3):
        found = sources(body, arguments)
        again = [_together(pair) for pair in zip(arguments[constants : constants + carried], found, strict=False)]
        arguments = [*arguments[:constants], *again, *arguments[constants + carried :]]
    return sources(body, arguments)


def _together(found: Sequence[Source]) -> Source:
    return Source(
        frozenset[str]().union(*(source.inputs for source in found)),
        frozenset[tuple[int, int]]().union(*(source.arrays for source in found)),
    )


def _new(source: Source, var: Any) -> Source:
    """An array of its own, unless nothing but parameters or chance gives it."""
    counts = "batch" in source.inputs and hasattr(var.aval, "dtype")
    return Source(source.inputs, frozenset([(id(var), _bytes(var.aval))]) if counts else frozenset())


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize
