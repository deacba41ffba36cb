"""Maps our parameters to another library's names and layouts: one rule per parameter, used in both directions."""

import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tformer_jax.base.errors import UserError
from tformer_jax.interop.files import StoredArrays
from tformer_jax.nn.module import named_leaves, parameter_name

Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Conversion of an array between their shape and ours; both directions only move elements."""

    ours: Callable[[np.ndarray, tuple[int, ...]], np.ndarray]
    """Their array and our shape -> our array."""
    theirs: Callable[[np.ndarray], np.ndarray]
    """Our array -> theirs."""


def kernel(inputs: int = 1) -> Layout:
    """Layout of torch's Linear: theirs [out, in], ours [*in, *out] with `inputs` input axes."""

    def theirs(array: np.ndarray) -> np.ndarray:
        rows = int(np.prod(array.shape[:inputs]))
        return array.reshape(rows, -1).T

    return Layout(lambda array, shape: array.T.reshape(shape), theirs)


def untransposed(inputs: int = 1) -> Layout:
    """Layout of GPT-2's Conv1D: theirs [in, out], ours [*in, *out] with `inputs` input axes."""
    return Layout(
        lambda array, shape: array.reshape(shape),
        lambda array: array.reshape(int(np.prod(array.shape[:inputs])), -1),
    )


SAME = Layout(lambda array, shape: array, lambda array: array)
FLAT = Layout(lambda array, shape: array.reshape(shape), lambda array: array.reshape(-1))
"""Theirs is a vector."""
ROW = Layout(lambda array, shape: array.reshape(shape), lambda array: array.reshape(1, -1))
"""Theirs is a matrix of one row."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Our path and their name of a parameter; `{i}` is the layer, `{e}` the expert (the first axis of our array)."""

    ours: str
    theirs: str
    layout: Layout = SAME


Part = tuple[str, str, Layout]
"""The fields of a rule, with names that lack their beginnings."""

AFFINE: tuple[Part, ...] = (("kernel", "weight", kernel()), ("bias", "bias", FLAT))
NORM: tuple[Part, ...] = (("scale", "weight", SAME), ("bias", "bias", SAME))


def parts(ours: str, theirs: str, leaves: Iterable[Part]) -> tuple[Part, ...]:
    """Returns the parts of a module, given its parameters' names below it."""
    return tuple((f"{ours}/{leaf}", f"{theirs}.{name}", layout) for leaf, name, layout in leaves)


def attention_parts(ours: str, theirs: Iterable[str]) -> tuple[Part, ...]:
    """Returns the parts of an attention, given their names of the query, key, value and output projections."""
    *inputs, output = theirs
    return (
        *(
            part
            for role, name in zip(("query", "key", "value"), inputs, strict=True)
            for part in parts(f"{ours}/{role}", name, AFFINE)
        ),
        (f"{ours}/output/kernel", f"{output}.weight", kernel(2)),
        (f"{ours}/output/bias", f"{output}.bias", SAME),
    )


def rules_below(ours: str, theirs: str, parts: Iterable[Part]) -> tuple[Rule, ...]:
    """Returns the rules of parts, given the beginnings of their names."""
    return tuple(Rule(f"{ours}{a}", f"{theirs}{b}", layout) for a, b, layout in parts)


def to_ours(rules: Iterable[Rule], arrays: Arrays, shapes: Any, *, ignored: Collection[str] = ()) -> Any:
    """Converts their arrays to our parameters, a tree like `shapes` (of `jax.ShapeDtypeStruct`).

    Args:
        arrays: their arrays; each one is read once.
        shapes: our shapes, dtypes and, optionally, shardings.
        ignored: patterns of names of their arrays that are not read.

    Raises:
        UserError: an array is missing, unused, of another size or not floating-point.
    """
    rules, used = list(rules), set()

    def find(ours: str, leaf: Any) -> jax.Array:
        rule, place = _find_rule(ours, rules)
        names = _array_names(rule, place, leaf.shape)
        for name in names:
            if name not in arrays:
                raise UserError(f"the checkpoint has no array {name!r} for the parameter {ours}")
            used.add(name)
        shape = leaf.shape[1:] if "{e}" in rule.theirs else leaf.shape
        parts = [_reshape(rule, name, np.asarray(arrays[name]), shape) for name in names]
        whole = np.stack(parts) if "{e}" in rule.theirs else parts[0]
        aliases = whole.flags.c_contiguous  # JAX would use the pages of the file
        stored = whole.astype(leaf.dtype, copy=aliases)
        if whole.dtype != leaf.dtype and not np.array_equal(stored.astype(whole.dtype), whole):
            rounded.append(ours)
        return jax.device_put(stored, leaf.sharding)

    named = dict(named_leaves(shapes))
    rounded: list[str] = []
    by_size = sorted(named, key=lambda ours: -named[ours].size)  # at the end, only small arrays are in memory twice
    loaded = {ours: find(ours, named[ours]) for ours in by_size}
    params = jax.tree_util.tree_map_with_path(lambda path, _: loaded[parameter_name(path)], shapes)
    left = [name for name in arrays if name not in used and not any(re.fullmatch(p, name) for p in ignored)]
    if left:
        raise UserError(f"the checkpoint has arrays that the model does not: {', '.join(sorted(left)[:5])}")
    if rounded:
        dtype, names = named[rounded[0]].dtype, ", ".join(sorted(rounded)[:5])
        logging.getLogger(__name__).warning("%d arrays are rounded to %s: %s", len(rounded), dtype, names)
    return params


@dataclasses.dataclass(frozen=True)
class Fusion:
    """One of their arrays that holds several arrays of the rules; names lack their beginnings."""

    parts: tuple[str, ...]
    split: Callable[[np.ndarray], Sequence[np.ndarray]]
    """Their array -> its parts."""
    join: Callable[[Sequence[np.ndarray]], np.ndarray]
    """Inverts `split`."""


Fusions = Mapping[str, Fusion]
"""Fusions by the ends of their names."""


def fused_rows(whole: str, *modules: str, sizes: Sequence[int] | None = None, groups: int = 1) -> Fusions:
    """Returns the fusions of a module that stacks the rows of several modules.

    Args:
        sizes: the number of rows of each module; None: equal numbers.
        groups: number of groups of rows, each with rows of all modules.
    """
    bounds = len(modules) if sizes is None else np.cumsum(sizes)[:-1]

    def grouped(array: np.ndarray) -> np.ndarray:
        return array.reshape(groups if len(array) % groups == 0 else 1, -1, *array.shape[1:])

    def split(array: np.ndarray) -> list[np.ndarray]:
        return [part.reshape(-1, *array.shape[1:]) for part in np.array_split(grouped(array), bounds, axis=1)]

    def join(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([grouped(array) for array in arrays], axis=1).reshape(-1, *arrays[0].shape[1:])

    return {
        f"{whole}.{leaf}": Fusion(tuple(f"{module}.{leaf}" for module in modules), split, join)
        for leaf in ("weight", "bias")
    }


def split_fused(arrays: StoredArrays, fusions: Fusions) -> StoredArrays:
    """Returns arrays in which the parts replace each fused array; reading a part reads the whole array."""

    def reader(name: str, fusion: Fusion, part: int) -> Callable[[], np.ndarray]:
        return lambda: fusion.split(np.asarray(arrays[name]))[part]

    readers, fused = {}, []
    for name in arrays:
        for whole in filter(name.endswith, fusions):
            fused.append(name)
            for i, part in enumerate(fusions[whole].parts):
                readers[name.removesuffix(whole) + part] = reader(name, fusions[whole], i)
    return arrays.replaced(fused, readers)


def join_fused(arrays: dict[str, np.ndarray], fusions: Fusions) -> dict[str, np.ndarray]:
    """Inverts `split_fused`."""
    joined = dict(arrays)
    for whole, fusion in fusions.items():
        for name in filter(lambda name: name.endswith(fusion.parts[0]), arrays):
            below = name.removesuffix(fusion.parts[0])
            joined[below + whole] = fusion.join([joined.pop(below + part) for part in fusion.parts])
    return joined


def to_theirs(rules: Iterable[Rule], params: Any) -> dict[str, np.ndarray]:
    """Converts our parameters to their arrays, by name."""
    rules, result = list(rules), {}
    for ours, leaf in named_leaves(params):
        rule, place = _find_rule(ours, rules)
        names = _array_names(rule, place, leaf.shape)
        parts = np.asarray(leaf) if "{e}" in rule.theirs else np.asarray(leaf)[None]
        for name, part in zip(names, parts, strict=True):
            result[name] = np.ascontiguousarray(rule.layout.theirs(part))
    return result


def their_rule(ours: str, rules: Iterable[Rule]) -> tuple[Rule, str]:
    """Returns the rule and their name of our parameter; names of experts keep their `{e}`."""
    rule, place = _find_rule(ours, list(rules))
    return rule, rule.theirs.replace("{i}", place)


def _find_rule(name: str, rules: list[Rule]) -> tuple[Rule, str]:
    """Returns the rule for our parameter `name` and its layer number, "" outside of layers."""
    for rule in rules:
        match = re.fullmatch(re.escape(rule.ours).replace(r"\{i\}", r"(\d+)"), name)
        if match:
            return rule, match[1] if match.groups() else ""
    raise UserError(f"the architecture has no array for the parameter {name}")


def _array_names(rule: Rule, place: str, shape: tuple[int, ...]) -> list[str]:
    name = rule.theirs.replace("{i}", place)
    return [name.replace("{e}", str(e)) for e in range(shape[0])] if "{e}" in name else [name]


def _reshape(rule: Rule, name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise UserError(f"{name} of the checkpoint has dtype {array.dtype}, not a floating-point dtype")
    expected = rule.layout.theirs(np.broadcast_to(np.float32(0), shape)).shape
    if array.shape != expected:
        raise UserError(f"{name} of the checkpoint has the shape {array.shape}; expected: {expected}")
    return rule.layout.ours(array, shape)
