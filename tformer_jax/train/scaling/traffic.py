"""What the devices of a mesh send each other in a training step."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator

import numpy as np

from tformer_jax.config import ModelConfig
from tformer_jax.train.scaling.compiler import GPU, Compiler
from tformer_jax.train.scaling.layout import Layout
from tformer_jax.train.scaling.memory import itemsize, uses
from tformer_jax.train.scaling.parameters import Parameter, parameters

SENT = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}
"""How often (n - 1) / n of an array leave a device, in the way that needs the least: around a ring of n."""
RING = "collective-permute"


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One kind of collective with one purpose, all of a step together."""

    kind: str
    """As in XLA's programs; a collective-permute sends to one neighbour."""
    purpose: str
    axes: tuple[str, ...]
    """Of the mesh, along which it runs."""
    devices: int
    """That take part in one."""
    array: int
    """Bytes of the whole array: before an all-reduce or reduce-scatter, after an all-gather, of one device else."""

    @property
    def sent(self) -> int:
        """Bytes that leave each device."""
        return self.array if self.kind == RING else SENT[self.kind] * self.array * (self.devices - 1) // self.devices


def traffic(layout: Layout, compiler: Compiler = GPU) -> list[Transfer]:
    """All that is worth counting: parameters, gradients and activations; not norms, counts and scalars."""
    found = Counter[tuple[str, str, tuple[str, ...]]]()
    for kind, purpose, axes, size in (
        *_of_parameters(layout, compiler),
        *_of_tensor_axis(layout, compiler),
        *_of_experts(layout, compiler),
        *_of_sequences(layout, compiler),
    ):
        axes = tuple(axis for axis in axes if layout.sizes[axis] > 1)
        if axes and size:
            found[kind, purpose, axes] += size
    return [
        Transfer(kind, purpose, axes, math.prod(layout.sizes[axis] for axis in axes), size)
        for (kind, purpose, axes), size in found.items()
    ]


Entry = tuple[str, str, tuple[str, ...], int]
"""Kind, purpose, axes and the array's bytes."""


def _of_parameters(layout: Layout, compiler: Compiler) -> Iterator[Entry]:
    cfg, parts = layout.cfg, layout.cfg.train.accumulate
    for leaf in parameters(layout):
        size = leaf.used * itemsize(layout, leaf, compiler)
        if leaf.stored < leaf.used:
            yield "all-gather", "parameters, forward", ("fsdp",), parts * size
            anew = cfg.model.remat != "none" or cfg.model.scan_layers if leaf.layer else cfg.train.loss_chunk
            if compiler.gathers_again or anew:
                yield "all-gather", "parameters, backward", ("fsdp",), parts * size
        if leaf.moment < leaf.stored:
            yield "all-gather", "new parameters", ("data",), leaf.stored * leaf.dtype.itemsize
        yield from _of_gradient(layout, leaf, parts * uses(layout, leaf) * size, compiler)


def _of_gradient(layout: Layout, leaf: Parameter, size: int, compiler: Compiler) -> Iterator[Entry]:
    """A part of the sum for each device along the axes that split the moments, and then the sum of such parts."""
    if not leaf.is_split or not compiler.scatters:
        yield "all-reduce", "gradients", leaf.batch_axes, size
        return
    scattered = ("fsdp", "data") if leaf.moment < leaf.stored else ("fsdp",)
    rest = tuple(axis for axis in leaf.batch_axes if axis not in scattered)
    yield "reduce-scatter", "gradients", tuple(axis for axis in scattered if axis in leaf.batch_axes), size
    yield "all-reduce", "gradients", rest, size * leaf.moment // leaf.used


def _of_tensor_axis(layout: Layout, compiler: Compiler) -> Iterator[Entry]:
    """The sums of products whose inner axis is split, forward, and of those whose outer axis is, backward."""
    model, tensor = layout.cfg.model, ("tensor",)
    hidden = _hidden(layout, compiler)
    inputs = 3 if model.attention_projections == "separate" and not compiler.merges_sums else 1
    forward = backward = 0
    for layers, crosses in _stacks(model):
        forward += layers * (2 + crosses)
        backward += layers * (inputs + 1 + crosses * (1 + max(inputs - 1, 1)))
    again = forward - sum(layers for layers, _ in _stacks(model)) if model.remat != "none" else 0
    yield "all-reduce", "activations, forward", tensor, forward * hidden
    yield "all-reduce", "activations, computed again", tensor, again * hidden
    yield "all-reduce", "activations, backward", tensor, backward * hidden
    embeddings = 2 if model.family == "seq2seq" else 1
    vocabularies = [model.vocab_size, model.source_vocab_size][:embeddings]
    split = sum(size is not None and size % layout.sizes["tensor"] == 0 for size in vocabularies)
    yield "all-reduce", "embeddings, forward", tensor, split * hidden
    if model.family != "classifier" and model.known("vocab_size") % layout.sizes["tensor"] == 0:
        yield "all-reduce", "logits, backward", tensor, hidden


def _of_experts(layout: Layout, compiler: Compiler) -> Iterator[Entry]:
    """Each token goes to its experts and comes back, and so do the gradients."""
    model = layout.cfg.model
    if model.ffn == "moe":
        layers = sum(layers for layers, _ in _stacks(model))
        size = layers * model.experts_per_token * _hidden(layout, compiler)
        yield "all-to-all", "tokens to experts and back, forward", ("expert",), 2 * size
        yield "all-to-all", "tokens to experts and back, backward", ("expert",), 2 * size


def _of_sequences(layout: Layout, compiler: Compiler) -> Iterator[Entry]:
    """Keys and values, which every query needs: around a ring, block by block, or put together at once."""
    model, n, axis = layout.cfg.model, layout.sizes["sequence"], ("sequence",)
    heads = layout.share.kv_heads * model.head_size
    block = 2 * _hidden(layout, compiler) // model.dim * heads
    blocks = block * sum(layers * (1 + crosses) for layers, crosses in _stacks(model))
    if model.attention_backend == "ring":
        yield RING, "keys and values, forward", axis, (n - 1) * blocks
        yield RING, "keys, values and their gradients, backward", axis, 2 * (n - 1) * blocks
    else:
        yield "all-gather", "keys and values, forward", axis, n * blocks
        kind = "reduce-scatter" if compiler.scatters else "all-reduce"
        yield kind, "gradients of keys and values, backward", axis, n * blocks


def _stacks(model: ModelConfig) -> list[tuple[int, bool]]:
    """Layers of each stack, and whether they have cross-attention."""
    encoder, decoder = (model.encoder_layers, False), (model.decoder_layers, model.family == "seq2seq")
    return {"seq2seq": [encoder, decoder], "classifier": [encoder], "decoder_lm": [decoder]}[model.family]


def _hidden(layout: Layout, compiler: Compiler) -> int:
    """Bytes of one device's [B, T, D] in the dtype of the computation, of all parts of the batch together."""
    model = layout.cfg.model
    size = np.dtype(model.dtype).itemsize if compiler.bfloat16 else 4
    tokens = layout.rows * layout.cfg.train.accumulate * layout.length // layout.sizes["sequence"]
    return tokens * model.dim * size
