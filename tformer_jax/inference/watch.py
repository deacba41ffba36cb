"""Attention weights, norms of the residual stream, and predictions by layer of a trained model."""

import functools
from collections.abc import Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig, kinds
from tformer_jax.models import registry
from tformer_jax.models.conversions import convert_layers
from tformer_jax.models.ensemble import Ensemble
from tformer_jax.models.family import Family
from tformer_jax.nn.attention_ops import Operands, attention_weights
from tformer_jax.nn.module import WATCHED

SUBLAYERS = ("self_attention", "cross_attention", "ffn")
PREDICTIONS = 5
"""Maximum number of predictions per layer and token."""


@flax.struct.dataclass
class Watched:
    """What a model computes for B rows. Results of `tj.Run.watch` are NumPy arrays of one row, without B and padding.

    The dictionaries are by attention, "encoder", "decoder" and "cross", or by stack, "encoder" and "decoder".
    """

    tokens: dict[str, jax.Array]
    """int32 [B, T] by batch key."""
    weights: dict[str, jax.Array]
    """Attention weights, float32 [B, L, N, T, S]; 0 for a query that may attend to no key."""
    masks: dict[str, jax.Array]
    """bool [B, L, T, S]: True = may attend."""
    norms: dict[str, jax.Array]
    """L2 norms of the residual stream before each of P sub-layers and after the last, float32 [B, P + 1, T]."""
    added: dict[str, jax.Array]
    """L2 norms of what each sub-layer adds to the residual stream, float32 [B, P, T]."""
    predictions: jax.Array
    """Most probable tokens (or classes, with T = 1) by the logit lens: int32 [B, L + 1, T, k], best first.

    The output head reads the residual stream before layers 0, ..., L - 1 and after the last one.
    """
    probabilities: jax.Array
    """Probabilities of `predictions`, float32 [B, L + 1, T, k]."""


def check(model: nn.Module) -> None:
    """Raises `UserError` if `watch` would raise it for this model, without computing anything."""
    if isinstance(model, Ensemble):
        raise UserError("attention is shown for a single run: leave out the other runs of the ensemble")
    params, batch = nn.unbox(registry.shapes(model)), registry.example_batch(model.cfg)
    jax.eval_shape(functools.partial(watch, model), params, batch)


@functools.partial(jax.jit, static_argnames="model")
def watch(model: nn.Module, params: Any, batch: registry.Batch) -> Watched:
    """Runs a model on a batch, as for `registry.forward`, and returns its intermediate values.

    Raises:
        UserError: a layer has no attention weights, or its module does not store its operands.
    """
    if recurrent := [*filter(kinds.is_recurrent, model.cfg.attentions)]:
        raise UserError(f"layers with attention {min(recurrent)!r} have no attention weights, but a recurrent state")
    cfg, arguments = model.cfg, model.arguments(batch)
    _, collected = model.apply({"params": params}, **arguments, mutable=[WATCHED])
    stacks = convert_layers(collected[WATCHED], cfg, scan_layers=False)
    depths = {"encoder": cfg.encoder_layers, "decoder": cfg.decoder_layers}
    layers = {
        name: [_layer(stacks[name], number, shared=cfg.shared_layers) for number in range(depth)]
        for name, depth in depths.items()
        if name in stacks
    }
    operands = {
        name: [_operands(layer, name, cfg.attention) for layer in layers["decoder" if name == "cross" else name]]
        for name in model.attentions
    }
    residuals = {name: _residuals(stack) for name, stack in layers.items()}
    last = {name: stacks[name]["stream"] for name in layers}
    read = "decoder" if "decoder" in layers else "encoder"
    streams = [layer["self_attention_residual"]["stream"] for layer in layers[read]] + [last[read]]
    predictions, probabilities = lens(model, params, jnp.stack([x for (x,) in streams]), arguments)
    return Watched(
        tokens={key: batch[key] for key in model.inputs},
        weights={name: _stack(map(attention_weights, layers)) for name, layers in operands.items() if layers},
        masks={name: _stack(map(_dense_mask, layers)) for name, layers in operands.items() if layers},
        norms={name: _norms([*(layer["stream"] for layer in parts), last[name]]) for name, parts in residuals.items()},
        added={name: _norms([layer["added"] for layer in parts]) for name, parts in residuals.items() if parts},
        predictions=jnp.moveaxis(predictions, 0, 1),
        probabilities=jnp.moveaxis(probabilities, 0, 1),
    )


def _layer(stack: Any, number: int, *, shared: bool) -> Any:
    """Returns the values that a layer stored; a shared layer stores one for each use."""
    if not shared:
        return stack[f"layers_{number}"]
    stored, use = stack["layers_0"], slice(number, number + 1)
    return jax.tree.map(lambda values: values[use], stored, is_leaf=lambda part: isinstance(part, tuple))


def lens(model: nn.Module, params: Any, streams: jax.Array, arguments: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Predicts from residual streams [L, B, T, D] by the model's last norm and output head (the logit lens).

    Args:
        arguments: the model's arguments.

    Returns:
        The most probable tokens or classes, int32 [L, B, T or 1, k], and their probabilities, float32.
    """
    padding_mask = (arguments["padding_mask"],) if model.classifies else ()

    def predict(stream: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits: Any = model.apply({"params": params}, stream, *padding_mask, method="lens")
        logits = logits.reshape(len(stream), -1, logits.shape[-1])
        probabilities, tokens = jax.lax.top_k(jax.nn.softmax(logits), min(PREDICTIONS, logits.shape[-1]))
        return tokens, probabilities

    predictions: tuple[jax.Array, jax.Array] = jax.lax.map(predict, streams)
    return predictions


def rollout(weights: np.ndarray) -> np.ndarray:
    """Computes attention rollout ("Quantifying Attention Flow in Transformers", 2020): [L, N, T, T] -> [L, T, T].

    Entry l is the product of `(W + I) / 2` of layers l, ..., 0, where W is the mean of the weights over heads.
    """
    steps = (weights.mean(axis=1, dtype=np.float64) + np.eye(weights.shape[-1])) / 2
    products = [steps[0]] if len(steps) else []
    for step in steps[1:]:
        products.append(step @ products[-1])
    return np.stack(products) if products else steps


def weight_shapes(cfg: ModelConfig, lengths: Mapping[str, int]) -> dict[str, tuple[int, int, int, int]]:
    """Returns the shapes [L, N, T, S] of the attention weights of one row; `lengths` are as for `without_padding`."""
    depths = {"encoder": cfg.encoder_layers, "decoder": cfg.decoder_layers, "cross": cfg.decoder_layers}
    sides = cfg.model_class.attentions.items()
    return {
        name: (depths[name], cfg.num_heads, lengths[queries], lengths[keys])
        for name, (queries, keys) in sides
        if depths[name]
    }


def without_padding(watched: Watched, family: type[Family], lengths: dict[str, int]) -> Watched:
    """Removes the padding of one row, whose arrays have no axis B; `lengths` are numbers of tokens by batch key."""
    sides = {name: tuple(lengths[key] for key in keys) for name, keys in family.attentions.items()}
    queries = {name: T for name, (T, _) in sides.items()}
    T = 1 if family.classifies else queries.get("decoder", queries.get("encoder"))
    return Watched(
        tokens={key: tokens[: lengths[key]] for key, tokens in watched.tokens.items()},
        weights={name: x[..., : sides[name][0], : sides[name][1]] for name, x in watched.weights.items()},
        masks={name: x[..., : sides[name][0], : sides[name][1]] for name, x in watched.masks.items()},
        norms={name: x[..., : queries[name]] for name, x in watched.norms.items()},
        added={name: x[..., : queries[name]] for name, x in watched.added.items()},
        predictions=watched.predictions[:, :T],
        probabilities=watched.probabilities[:, :T],
    )


def _operands(layer: dict[str, Any], name: str, kind: str) -> Operands:
    module = "cross_attention" if name == "cross" else "self_attention"
    if "operands" not in layer.get(module, {}):
        raise UserError(f"model.attention={kind!r} does not store its operands: call `nn.module.watch` in the module")
    (operands,) = layer[module]["operands"]
    return operands


def _residuals(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the residual connections of all sub-layers, in order."""
    names = [f"{sublayer}_residual" for sublayer in SUBLAYERS]
    return [layer[name] for layer in layers for name in names if name in layer]


def _dense_mask(x: Operands) -> jax.Array:
    B, T, S = x.q.shape[0], x.q.shape[1], x.k.shape[1]
    dense = x.mask.dense(T, S)
    return jnp.ones((B, T, S), bool) if dense is None else jnp.broadcast_to(dense[:, 0], (B, T, S))


def _norms(streams: list[tuple[jax.Array]]) -> jax.Array:
    return _stack(jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for (x,) in streams)


def _stack(layers: Any) -> jax.Array:
    return jnp.stack(list(layers), axis=1)
