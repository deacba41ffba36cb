"""Settings of the model architecture."""

import dataclasses
import math
from typing import Any, ClassVar

from tformer_jax.config import kinds, layers
from tformer_jax.config.fields import OTHER_TRAINING, SAME_TRAINING, Section, section, setting

CLASSIFIER = {"family": ("classifier",)}
TEXT_READERS = {"family": ("classifier", "masked_lm")}
ENCODERS = {"family": ("seq2seq", "classifier", "masked_lm")}


@dataclasses.dataclass(frozen=True)
class ModelConfig(Section):
    """The architecture. `axes.py` explains the letters in brackets; `config/kinds.py` lists the kinds."""

    path: ClassVar[str] = "model"

    family: str = setting("seq2seq", "kind of model", choices=kinds.FAMILIES)
    vocab_size: int | None = setting(None, "[V] target (or only) vocabulary; None: the tokenizer's", low=1)
    source_vocab_size: int | None = setting(
        None, "source vocabulary; None: the tokenizer's", low=1, used_by={"family": ("seq2seq",)}
    )
    num_classes: int | None = setting(None, "number of classes; None: taken from the data", low=1, used_by=CLASSIFIER)
    max_length: int = setting(256, "maximum sequence length, in tokens", low=1)

    dim: int = setting(512, "[D] model width", low=1)
    encoder_layers: int = setting(6, "[L] encoder depth", low=0, used_by=ENCODERS)
    decoder_layers: int = setting(6, "[L] decoder depth", low=0, used_by={"family": ("seq2seq", "decoder_lm")})
    layer_pattern: tuple[str, ...] = setting(
        ("full",),
        "repeating pattern of layer kinds: full (global attention), window (sliding-window attention), nope (global "
        "attention without positions) or gated_delta (recurrence)",
        choices=kinds.LAYERS,
    )
    shared_layers: bool = setting(False, "all layers have the same parameters (ALBERT)", used_by=TEXT_READERS)
    scan_layers: bool = setting(
        False, "scan over repetitions of layer_pattern, not an unrolled stack: compiles faster, draws other parameters"
    )
    remat: str = setting(
        "none",
        "rematerialization: the jax.checkpoint_policies entry that selects saved values",
        choices=layers.REMAT_POLICIES,
        resumable=SAME_TRAINING,
    )

    attention: str = setting("multi_head", "kind of attention", choices=kinds.ATTENTIONS)
    attention_backend: str = setting(
        "auto",
        "implementation of attention; auto: chosen by platform, mask and lengths",
        choices=kinds.BACKENDS,
        resumable=SAME_TRAINING,
    )
    num_heads: int = setting(8, "[N] query heads", low=1)
    num_kv_heads: int | None = setting(
        None, "[K] key/value heads: N is MHA, 1 is MQA, between is GQA; None: N", low=1, used_by="attention"
    )
    head_dim: int | None = setting(None, "[H] size of one head; None: D / N", low=1)
    attention_projections: str = setting(
        "separate", "how query, key and value are projected", choices=layers.FUSED, used_by="attention"
    )
    attention_bias: tuple[str, ...] = setting(
        layers.PROJECTIONS, "projections that have a bias", choices=layers.PROJECTIONS, used_by="attention"
    )
    attention_scale: float | None = setting(
        None,
        "scale of the attention scores q.k; None: 1 / sqrt(size of a query head), with muP "
        "(unless head_dim is set) over sqrt(dim / base_dim)",
        above=0.0,
        used_by="attention",
    )
    attention_softcap: float | None = setting(
        None, "cap of the scores: cap * tanh(scores / cap); None: no cap", above=0.0, used_by="attention"
    )
    attention_sinks: bool = setting(
        False, "one learned score per query head in the softmax, without a key or value", used_by="attention"
    )
    attention_gate: bool = setting(
        False, "multiply the output of each head by sigmoid(x W), as Qwen3-Next does", used_by="attention"
    )
    qk_norm: bool = setting(False, "normalize queries and keys before the scores", used_by="attention")
    qk_norm_over: str = setting(
        "heads",
        "normalize each head before or after its rotation (Hunyuan), or all heads of a token together (OLMo 2)",
        choices=("heads", "rotated_heads", "width"),
        used_by={"qk_norm": (True,)},
    )
    mla: layers.MLAConfig = section(layers.MLAConfig, used_by="attention")
    gated_delta: layers.GatedDeltaConfig = section(layers.GatedDeltaConfig, used_by="attention")
    window: int | None = setting(
        None,
        "`window` layers: size of the window; a token attends to positions less than `window` away (decoders: itself "
        "and earlier ones)",
        low=1,
    )
    lookahead: int | None = setting(
        None,
        "encoder: maximum distance of the later tokens that a token attends to; None: no limit",
        low=0,
        used_by=ENCODERS,
    )
    prefix_lm: bool = setting(False, "bidirectional attention within the prompt", used_by={"family": ("decoder_lm",)})

    position: str = setting("sinusoidal", "position information", choices=kinds.POSITIONS)
    position_offset: int = setting(
        0,
        "number of the first position (BART: 2); a learned table has unused rows before it",
        low=0,
        used_by="position",
    )
    rotary: layers.RotaryConfig = section(layers.RotaryConfig, used_by="position")
    relative: layers.RelativeConfig = section(layers.RelativeConfig, used_by="position")

    ffn: str = setting("mlp", "kind of FFN", choices=kinds.FFNS)
    ffn_dim: int = setting(2048, "[F] FFN width; for moe, the width of one expert", low=1)
    activation: str = setting("relu", "FFN activation; with a gated FFN, of the gate", choices=kinds.ACTIVATIONS)
    ffn_bias: bool = setting(True, "biases in the FFN")
    moe: layers.MoEConfig = section(layers.MoEConfig, used_by="ffn")

    norm: str = setting("layernorm", "normalization", choices=kinds.NORMS)
    norm_placement: str = setting(
        "pre", "x + f(norm(x)), norm(x + f(x)), x + norm(f(norm(x))), or x + norm(f(x))", choices=layers.NORM_PLACEMENTS
    )
    norm_eps: float = setting(1e-5, "added to the variance before the square root", low=1e-12)
    norm_bias: bool = setting(True, "shift parameter of LayerNorm", used_by="norm")
    norm_unit_offset: bool = setting(False, "multiply by 1 + scale, with scale initialized to 0")
    first_norm: bool = setting(
        True, "pre: normalize the input of the first sub-layer of each stack; ModernBERT does not, after embedding_norm"
    )
    final_norm: bool | None = setting(None, "add a norm after each stack; None: unless norm_placement is post")
    embedding_norm: bool = setting(False, "normalize the input of the first layer")

    tie_embeddings: str = setting(
        "output",
        "none; output: output head = target embedding; inputs: source = target embedding; all: both (one vocabulary)",
        choices=("none", "output", "inputs", "all"),
    )
    scale_embeddings: bool = setting(True, "multiply token embeddings by sqrt(D); D is base_dim with muP")
    embedding_dim: int | None = setting(
        None,
        "width of embeddings, from which a projection leads to dim, and back in head_transform (ALBERT); None: dim",
        low=1,
        used_by=TEXT_READERS,
    )
    embedding_multiplier: float = setting(1.0, "multiply token embeddings by this number, too (Granite)", above=0.0)
    residual_multiplier: float = setting(1.0, "multiply outputs of sub-layers by this number (Granite)", above=0.0)
    token_types: int = setting(
        0, "number of token types, each with a learned embedding (BERT: 2)", low=0, used_by=TEXT_READERS
    )
    output_bias: bool = setting(False, "bias on the logits", used_by={"family": ("seq2seq", "decoder_lm", "masked_lm")})
    scale_output: bool = setting(False, "divide the input of the output head by sqrt(D); D is base_dim with muP")
    output_divisor: float = setting(1.0, "divide the input of the output head by this number (Granite)", above=0.0)
    output_softcap: float | None = setting(None, "cap of the logits: cap * tanh(logits / cap); None: no cap", above=0.0)
    pooling: str = setting("mean", "pooling over tokens", choices=kinds.POOLINGS, used_by=CLASSIFIER)
    pooler: bool = setting(False, "pooler_activation(W x + b) between pooling and logits", used_by=CLASSIFIER)
    pooler_activation: str = setting(
        "tanh", "activation of the pooler; DistilBERT: relu", choices=("tanh", "relu"), used_by=CLASSIFIER
    )
    head_transform: bool = setting(
        False, "norm(activation(W x + b)) before the output head (BERT's of masked tokens)", used_by=TEXT_READERS
    )
    transform_bias: bool = setting(True, "bias of head_transform", used_by=TEXT_READERS)
    transform_activation: str | None = setting(
        None, "activation of head_transform; None: activation", choices=kinds.ACTIVATIONS, used_by=TEXT_READERS
    )

    dropout: float = setting(0.1, "dropout rate of embeddings and of each sub-layer's output", low=0.0, below=1.0)
    token_dropout: float = setting(0.0, "dropout rate of whole token embeddings", low=0.0, below=1.0)
    attention_dropout: float = setting(
        0.0, "dropout rate of attention weights", low=0.0, below=1.0, used_by="attention"
    )
    ffn_dropout: float = setting(0.0, "dropout rate between the two FFN layers", low=0.0, below=1.0)

    initializer: str = setting(
        "xavier",
        "projection kernels: xavier (uniform), fan_in (normal, variance 1 / fan_in) or normal",
        choices=("xavier", "fan_in", "normal"),
    )
    init_std: float = setting(
        0.02, "standard deviation of `normal` kernels, and of all embeddings except token embeddings", low=0.0
    )
    embedding_std: float | None = setting(
        None,
        "standard deviation of token embeddings; None: init_std if initializer is normal, else 1 / sqrt(D); "
        "D is base_dim with muP",
        low=0.0,
    )
    scale_residual_init: bool = setting(
        False, "scale the initial kernels of residual outputs by 1 / sqrt(sub-layers of the stack)"
    )
    parameterization: str = setting(
        "standard",
        "how initialization, logits, scores and learning rates depend on D; mup (Tensor Programs V, 2022): settings "
        "tuned at one width fit others",
        choices=("standard", "mup"),
    )
    base_dim: int | None = setting(
        None,
        "mup: width at which it equals the standard parameterization; ffn_dim must be the same multiple of dim at all "
        "widths and, with head_dim=None, num_heads the same",
        low=1,
    )
    dtype: str = setting("float32", "dtype of the computation", choices=layers.DTYPES, resumable=OTHER_TRAINING)
    param_dtype: str = setting(
        "float32", "dtype of the parameters but routers, rounded to it after each step", choices=layers.DTYPES
    )
    gradient_dtype: str = setting(
        "float32",
        "dtype in which gradients are summed over tokens and devices; errors of bfloat16 grow with the devices",
        choices=layers.DTYPES,
        used_by={"dtype": ("bfloat16",)},
    )
    quantization: str | None = setting(
        None,
        "round kernels of layers (int8_weights), or also their inputs (int8), to int8",
        choices=layers.QUANTIZATIONS,
    )

    def check(self) -> None:
        self._check_heads()
        layers.check_layer_pattern(self)
        if (self.base_dim is not None) != (self.parameterization == "mup"):
            raise self.error("base_dim", "must be a width for model.parameterization='mup', and None otherwise")
        if self.shared_layers and (self.period > 1 or self.scan_layers or not self.first_norm or self.uses_experts):
            raise self.error("shared_layers", "needs layers of one kind, unrolled and without experts; write False")
        if self.embedding_dim and not (self.head_transform or self.model_class.classifies):
            raise self.error("embedding_dim", "needs model.head_transform=True, whose outputs have this width")
        if not self.first_norm and (self.norm_placement != "pre" or self.scan_layers):
            needed = "model.norm_placement='pre' and model.scan_layers=False"
            raise self.error("first_norm", f"False needs {needed}; write True")
        if self.ties_inputs and not self.model_class.reads_source:
            raise self.error("tie_embeddings", f"needs a source embedding; write 'output' for {self.family!r}")
        if self.ties_inputs and self.source_vocab_size != self.vocab_size:
            raise self.error(
                "source_vocab_size", f"must equal model.vocab_size={self.vocab_size} if embeddings are shared"
            )

    def without_effect(self) -> list[str]:
        """As `Section.without_effect`; also names settings with an unwanted effect."""
        sentences, moe = super().without_effect(), self.moe
        if self.uses_experts and moe.router_normalize and moe.experts_per_token == 1 < moe.num_experts:
            sentences.append(
                "model.moe.router_normalize=True with model.moe.experts_per_token=1 gives each expert a weight of 1, "
                "so that the loss does not train the router; write False"
            )
        if self.scan_layers and max(self.depths) < 2 * self.period:
            repeated = f"no stack repeats its first {self.period} layers"
            sentences.append(f"model.scan_layers=True has no effect, because {repeated}")
        return sentences

    def values_of(self, switch: str) -> tuple[str, ...]:
        """As `Section.values_of`; `attention` has a value for each kind in the layers."""
        return self.attentions if switch == "attention" else (getattr(self, switch),)

    def _check_heads(self) -> None:
        if self.head_dim is None and self.dim % self.num_heads:
            raise self.error("num_heads", f"must divide model.dim={self.dim}, or set model.head_dim")
        if self.num_heads % self.kv_heads:
            raise self.error("num_kv_heads", f"must divide model.num_heads={self.num_heads}")

    def size(self, name: str) -> int:
        """Returns a size that may have to be filled in from the data.

        Raises:
            ConfigError: it is still None.
        """
        value = getattr(self, name)
        if value is None:
            raise self.error(name, "must be a number before a model is built; training takes it from the data")
        return value

    def layer_kinds(self, depth: int) -> tuple[str, ...]:
        """Returns the kinds of the layers of a stack, by `layer_pattern`."""
        return tuple(self.layer_pattern[layer % len(self.layer_pattern)] for layer in range(depth))

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer of a stack, counted from 0, has a mixture of experts."""
        return self.uses_experts and layer >= self.moe.dense_layers and (layer + 1) % self.moe.every == 0

    @property
    def uses_experts(self) -> bool:
        """Whether the FFN of some layers is a mixture of experts."""
        return getattr(kinds.load(kinds.FFNS, self.ffn), "experts", False)

    @property
    def model_class(self) -> Any:
        """The class of the model in `kinds.FAMILIES`, a `models.family.Family`."""
        return kinds.load(kinds.FAMILIES, self.family)

    @property
    def depths(self) -> tuple[int, ...]:
        """Number of layers of each stack of the model."""
        return tuple(getattr(self, name) for name in self.model_class.stacks)

    @property
    def period(self) -> int:
        """Number of layers after which their kinds repeat, except for `moe.dense_layers`."""
        return math.lcm(len(self.layer_pattern), self.moe.every)

    @property
    def ties_inputs(self) -> bool:
        """Whether source and target share an embedding."""
        return self.tie_embeddings in ("inputs", "all")

    @property
    def kv_heads(self) -> int:
        """K: `num_kv_heads`, or its default N."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """H: `head_dim`, or its default D / N."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def rotary_size(self) -> int:
        """Number of features of each head that `position="rotary"` rotates."""
        return int(self._size("rotated_size") * self.rotary.fraction)

    @property
    def attentions(self) -> tuple[str, ...]:
        """Kinds of self-attention of the layers."""
        return tuple(dict.fromkeys(map(self.attention_of, self.layer_pattern)))

    def attention_of(self, layer: str) -> str:
        """Returns the kind of attention of a kind of layer."""
        return layer if layer in kinds.ATTENTIONS else self.attention

    @property
    def score_size(self) -> int:
        """Size of the query and key vectors whose dot product is an attention score."""
        return self._size("score_size")

    @property
    def value_size(self) -> int:
        """Number of features of one value head."""
        return self._size("value_size")

    def _size(self, name: str) -> int:
        """Returns a size that a kind of attention may declare as a function of the config; default: the head size."""
        size = getattr(kinds.load(kinds.ATTENTIONS, self.attention), name, None)
        return size(self) if size else self.head_size

    @property
    def fixed_dim(self) -> int:
        """The width in formulas that muP makes independent of D: `base_dim`, or D without muP."""
        return self.base_dim or self.dim

    @property
    def width_factor(self) -> float:
        """m = D / `base_dim` of muP; 1 without it."""
        return self.dim / self.fixed_dim

    @property
    def score_scale(self) -> float | None:
        """`attention_scale`; its default, with muP and head sizes that grow with D, is 1 / (sqrt(m H))."""
        if self.attention_scale is not None or self.head_dim or self.width_factor == 1:
            return self.attention_scale
        return (self.width_factor * self.head_size) ** -0.5

    @property
    def head_activation(self) -> str:
        """Activation of `head_transform`: `transform_activation`, or its default."""
        return self.transform_activation or self.activation

    @property
    def has_final_norm(self) -> bool:
        """Whether a norm follows each stack: `final_norm`, or its default (unless the placement is post)."""
        return self.norm_placement != "post" if self.final_norm is None else self.final_norm
