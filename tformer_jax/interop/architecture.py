"""Descriptions of Hugging Face architectures, by which their checkpoints are read and written."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.config import ModelConfig
from tformer_jax.interop.mapping import Fusions, Rule

ACTIVATIONS = {
    "relu": "relu",
    "gelu_python": "gelu",
    "gelu": "gelu",
    **dict.fromkeys(("gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh"),
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
    "swish": "silu",
    "silu": "silu",
    "relu2": "relu_squared",
    "sigmoid": "sigmoid",
}


Settings = dict[str, Any]
"""Settings by name: fields of a `config.json`, or settings of `ModelConfig`."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Description of the checkpoints of one `model_type`. "Their" is Hugging Face's, "our" is this package's."""

    name: str
    """Name of their class."""
    settings: Callable[[Settings], Settings]
    """Their config.json -> our settings, except `tie_embeddings` and `output_bias`, which the arrays determine."""
    config: Callable[[ModelConfig], Settings]
    """Our settings -> their config.json."""
    rules: Callable[[ModelConfig], tuple[Rule, ...]]
    ignored: tuple[str, ...] = ()
    """Patterns of names of their arrays that are not read: buffers, and heads of other tasks."""
    prefix: str = ""
    """Name prefix of the base model's arrays, which checkpoints of a base model alone omit."""
    heads: tuple[str, ...] = ("lm_head.", "classifier.", "cls.", "final_logits_bias")
    """Name prefixes of arrays outside of the base model."""
    shared: str = ""
    """Name of their token embedding, which other arrays may repeat."""
    two_embeddings: bool = False
    """Whether an encoder-decoder's sources have an embedding of their own."""
    head: str = "lm_head.weight"
    """Name of the output head of a language model."""
    ties_missing_head: bool = False
    """Whether a missing output head is the embedding, whatever `tie_word_embeddings` says."""
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of arrays that must equal another array if they are present, and the name of that array."""
    head_bias: str = "final_logits_bias"
    """Name of the bias of the output head."""
    classifier: str = "classifier"
    """Name of the output head of a classifier."""
    fused: Callable[[ModelConfig], Fusions] = lambda cfg: {}
    """Our settings -> their arrays that each hold several of the arrays named in `rules`."""
    attentions: tuple[str, ...] = ("multi_head",)
    """Our kinds of attention that it has."""
    projections: str = "separate"
    """Our `attention_projections` with the same layout."""
    inputs_first: bool = False
    """Whether matrices of the base model are [in, out] (GPT-2), unlike the output head."""
    stored_sinusoids: bool = False
    """Whether its checkpoints may hold sinusoids, which replace those that transformers computes."""
    float32: tuple[str, ...] = ()
    """Patterns of names of arrays that are float32 also in checkpoints of another dtype."""

    def has_inputs_first(self, module: str) -> bool:
        """Returns whether the weight of one of their linear layers is [in, out]."""
        return self.inputs_first and module.startswith(self.prefix)


def our_settings(names: Mapping[str, str], hf: Settings) -> Settings:
    """Returns our settings with the values of their fields; `names` maps fields to settings.

    Activations, whose names differ, are converted.
    """
    return {ours: our_activation(hf[name]) if ours == "activation" else hf[name] for name, ours in names.items()}


def their_fields(names: Mapping[str, str], cfg: ModelConfig) -> Settings:
    """Inverts `our_settings`."""
    activation = {"activation": transformers_activation(cfg.activation)}
    return {name: activation.get(ours) or getattr(cfg, ours) for name, ours in names.items()}


def our_activation(name: str) -> str:
    """Returns our name for their activation."""
    check(name in ACTIVATIONS, f"activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def transformers_activation(name: str) -> str:
    """Returns the name of our activation in transformers, or our name if it has none."""
    return next((theirs for theirs, ours in reversed(ACTIVATIONS.items()) if ours == name), name)


def class_names(hf: Settings) -> dict[Any, Any]:
    """Returns the names of classes by number: `id2label`, or else `num_labels` names as transformers makes them.

    They are made also if `id2label` has another number of names.
    """
    count, names = hf.get("num_labels"), hf.get("id2label")
    if names and count in (None, len(names)):
        return dict(names)
    return {i: f"LABEL_{i}" for i in range(2 if count is None else count)}


def label_fields(names: Sequence[str]) -> Settings:
    """Returns the fields of config.json for the names of classes, in the order of their logits."""
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}


UNREADABLE = "this checkpoint cannot be read: "


def check(fits: bool, problem: str) -> None:
    """Raises `UserError` with `problem` unless `fits` is true, that is, unless the checkpoint is supported."""
    if not fits:
        raise UserError(UNREADABLE + problem)


def require(hf: dict[str, Any], **supported: Any) -> None:
    """Raises `UserError` if one of their settings differs from its only supported value."""
    for name, value in supported.items():
        given = hf.get(name)
        check(given is None or given == value, f"{name}={given!r} is not supported, only {value!r} is")


LAYERS = {"sliding_attention": "window", "full_attention": "full", "linear_attention": "gated_delta"}
"""Our kinds of layers by theirs."""


def read_layer_types(hf: Settings, *pattern: str) -> list[str]:
    """Returns their kind of each layer: `layer_types`, or else a repeated pattern such as "sliding", "full"."""
    kinds, depth = hf.get("layer_types"), hf["num_hidden_layers"]
    if not kinds:
        return [f"{kind}_attention" for kind in itertools.islice(itertools.cycle(pattern), depth)]
    check(len(kinds) == depth, f"layer_types has the length {len(kinds)}, but num_hidden_layers is {depth}")
    return list(kinds)


def our_layer_pattern(kinds: Sequence[str], *supported: str) -> tuple[str, ...]:
    """Returns `layer_pattern` for their kinds of layers; `supported` lists the allowed kinds, such as "sliding"."""
    other = sorted({*kinds} - {f"{kind}_attention" for kind in supported})
    check(not other, f"layer_types {other} are not supported")
    return shortest_pattern([LAYERS[kind] for kind in kinds])


def layer_types(cfg: ModelConfig, depth: int) -> list[str]:
    """Returns their kind of each layer of a stack; a kind that they lack keeps our name, which reading back rejects."""
    names = {ours: theirs for theirs, ours in LAYERS.items()}
    return [names.get(kind, kind) for kind in cfg.layer_kinds(depth)]


def shortest_pattern(kinds: Sequence[str]) -> tuple[str, ...]:
    """Returns the shortest pattern whose repetition gives `kinds`; ("full",) for no kinds."""
    for period in range(1, len(kinds) + 1):
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
            return tuple(kinds[:period])
    return ("full",)


REQUIRED = None
"""Default of an argument that must be given."""


def check_arguments(given: Settings, arrays: Settings, defaults: Settings) -> Settings:
    """Returns the given "model_args" of a state dict, with defaults.

    Args:
        arrays: arguments that the arrays determine, which may be given as well.

    Raises:
        UserError: an argument is unknown or missing, or contradicts the arrays.
    """
    for name, value in given.items():
        if name not in arrays and name not in defaults:
            supported = ", ".join([*arrays, *defaults])
            raise UserError(f"model_args: {name}={value!r} is not supported; supported are {supported}")
        if name in arrays and arrays[name] != value:
            raise UserError(f"model_args: {name}={value!r}, but the arrays have {arrays[name]!r}")
    values = defaults | given
    for name, default in defaults.items():
        if default is REQUIRED and values[name] is REQUIRED:
            raise UserError(
                f"model_args: {name} is missing and cannot be inferred from the arrays: add --model-args {name}=..."
            )
    return values
