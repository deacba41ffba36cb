"""Memory of one device in a training step."""

import dataclasses
from collections import Counter
from collections.abc import Iterable

import jax
import numpy as np

from tformer_jax.models import registry
from tformer_jax.train import optimizers, state
from tformer_jax.train.scaling import activations
from tformer_jax.train.scaling.compiler import GPU, Compiler
from tformer_jax.train.scaling.layout import Layout
from tformer_jax.train.scaling.parameters import Parameter, parameters, share

FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device by part."""

    held: dict[str, int]
    """From step to step, and the batch."""
    backward: dict[str, int]
    """At the start of the backward pass: all that the forward pass kept is there."""
    update: dict[str, int]
    """At its end: all gradients are there."""
    reused: tuple[int, int]
    """Of these two moments' bytes, those that take places of what is held."""

    @property
    def moments(self) -> tuple[int, int]:
        """All bytes at the start of the backward pass, and at its end."""
        parts = (self.backward, self.update)
        found = [sum(self.held.values()) + sum(part.values()) for part in parts]
        return found[0] - self.reused[0], found[1] - self.reused[1]

    @property
    def peak(self) -> int:
        """The larger of both."""
        return max(self.moments)


def memory(layout: Layout, compiler: Compiler = GPU) -> Memory:
    """What a device of the mesh needs for `train/step.py`, with programs as a compiler makes them."""
    found = parameters(layout)
    kept = _kept(layout, compiler)
    held, slots = _held(layout)
    others = {}
    if layout.cfg.train.accumulate > 1:
        others["gradients of earlier parts"] = FLOAT32 * sum(leaf.moment for leaf in found)
    if compiler.copies_state:
        others["copy of the optimizer's state"] = sum(slots)
    logits, head = logit_bytes(layout), sum(leaf.used * leaf.dtype.itemsize for leaf in found if is_head(layout, leaf))
    loss, layer = 2 * logits + head, _layer_again(layout, compiler)
    backward = {
        "activations kept": sum(kept),
        **({"a layer computed again": layer} if layer > loss else {"logits, their and the head's gradient": loss}),
        "parameters put together": _gathered(layout, found, compiler),
    }
    looped = [size for leaf in found if leaf.repetitions > 1 for size in _gradients(layout, leaf, GPU)]
    backward |= {"gradients of the loop over layers": sum(looped)} if looped else {}
    gradients = [size for leaf in found for size in _gradients(layout, leaf, compiler)]
    tables = [leaf for leaf in found if leaf.is_split and is_table(leaf)]
    copies = 1 if compiler.reduces_in_place else 2
    unsplit = copies * sum(uses(layout, leaf) * leaf.used * leaf.dtype.itemsize for leaf in tables)
    update = {"gradients": sum(gradients), "gradients of embeddings, before they are split": unsplit}
    reused = (0, 0)
    if compiler.copies_state:
        reused = (_fitting(slots, [*kept, *looped, logits, logits, head]), _fitting(slots, gradients))
    return Memory(held, backward | others, update | others, reused)


def logit_bytes(layout: Layout) -> int:
    """Of the logits that are there at once, float32."""
    cfg, share = layout.cfg, layout.share
    if cfg.model.family == "classifier":
        return FLOAT32 * layout.rows * share.known("num_classes")
    positions = min(cfg.train.loss_chunk or layout.length, layout.length)
    return FLOAT32 * layout.rows * positions * share.known("vocab_size") // layout.sizes["sequence"]


def is_head(layout: Layout, leaf: Parameter) -> bool:
    """Whether logits are a product with this parameter."""
    embedding = "target_embedding" if layout.cfg.model.family == "seq2seq" else "embedding"
    tied = layout.cfg.model.tie_embeddings in ("output", "all") and layout.cfg.model.family != "classifier"
    return leaf.name == (f"{embedding}/embedding" if tied else "head/kernel")


def is_table(leaf: Parameter) -> bool:
    """Whether it is an embedding, whose rows are looked up whole."""
    return leaf.name.endswith("embedding/embedding")


def uses(layout: Layout, leaf: Parameter) -> int:
    """How often a step computes with a parameter. The gradients of a tied embedding are summed apart."""
    tie = layout.cfg.model.tie_embeddings
    if not is_table(leaf) or leaf.name.startswith("source"):
        return 1
    return 1 + (tie in ("output", "all") and is_head(layout, leaf)) + (tie in ("inputs", "all"))


def _held(layout: Layout) -> tuple[dict[str, int], list[int]]:
    """What is held, and of the optimizer's state each array."""
    cfg = layout.cfg
    model = registry.build(layout.model)
    boxed = registry.shapes(model)
    whole = state.abstract(
        model, optimizers.build(cfg, boxed), dataclasses.replace(cfg, model=layout.model), layout.mesh
    )

    def of(tree: object) -> list[int]:
        return [share(leaf.shape, leaf.sharding) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)]

    batch = registry.example_batch(layout.model, 1, layout.length).values()
    rows = layout.rows * cfg.train.accumulate
    held = {
        "parameters": sum(of(whole.params)),
        "optimizer state": sum(of(whole.opt_state)),
        "running mean of the parameters": sum(of(whole.ema)),
        "batch": rows * sum(array.nbytes for array in batch),
    }
    return {name: size for name, size in held.items() if size}, of(whole.opt_state)


def _kept(layout: Layout, compiler: Compiler) -> list[int]:
    """Bytes of each array that is kept, without the logits."""
    cfg, model = layout.cfg, layout.share
    if not (compiler.keeps_remat or model.scan_layers):
        model = dataclasses.replace(model, remat="none")
    if not compiler.bfloat16:
        model = dataclasses.replace(model, dtype="float32")
    found = activations.kept(model, layout.rows, layout.length, cfg.train.loss_chunk, fused=compiler.fuses)
    arrays = Counter(found.arrays)
    if cfg.train.loss_chunk is None:
        arrays.subtract([logit_bytes(layout) * layout.sizes["sequence"]])
    masks = [compiler.dropped_bytes * found.dropped]
    return [size // layout.sizes["sequence"] for size in [*arrays.elements(), *masks]]


def _layer_again(layout: Layout, compiler: Compiler) -> int:
    """What the backward pass has of the layer that it computes again, and of one gradient; 0 without `model.remat`."""
    model = layout.share
    if model.remat == "none" or not (compiler.keeps_remat or model.scan_layers):
        return 0
    layer = activations.of_layer(model, layout.rows, layout.length, fused=compiler.fuses)
    largest = max(layer.arrays, default=0)
    return (sum(layer.arrays) + largest + compiler.dropped_bytes * layer.dropped) // layout.sizes["sequence"]


def _gathered(layout: Layout, found: list[Parameter], compiler: Compiler) -> int:
    """Parameters that rest in parts elsewhere: those of one layer and of none, or all where they stay."""
    outside, layers = 0, Counter[str]()
    for leaf in found:
        if leaf.used == leaf.stored:
            continue
        size = leaf.used * itemsize(layout, leaf, compiler)
        if leaf.layer is None:
            outside += size
        else:
            layers[leaf.layer] += size // leaf.repetitions
    stay = not (compiler.gathers_again or layout.cfg.model.scan_layers)
    return outside + (sum(layers.values()) if stay else max(layers.values(), default=0))


def itemsize(layout: Layout, leaf: Parameter, compiler: Compiler) -> int:
    """Bytes of one number of a parameter, or of its gradient, when it travels: in the dtype of the computation."""
    return min(np.dtype(layout.cfg.model.dtype).itemsize, leaf.dtype.itemsize) if compiler.bfloat16 else FLOAT32


def _gradients(layout: Layout, leaf: Parameter, compiler: Compiler) -> list[int]:
    """Bytes of the gradient of one parameter when all are there; a device's own stands beside the sum of all."""
    size = leaf.moment * leaf.dtype.itemsize
    if leaf.is_split or not leaf.batch_axes or compiler.reduces_in_place:
        return [size]
    return 2 * uses(layout, leaf) * [size]


def _fitting(slots: Iterable[int], arrays: Iterable[int]) -> int:
    """How many bytes of arrays find a place in slots, each of which holds one."""
    found, waiting = 0, sorted(arrays)
    for slot in sorted(slots, reverse=True):
        while waiting and waiting[-1] > slot:
            waiting.pop()
        if waiting:
            found += waiting.pop()
    return found
