"""Topics of layers: norms and their placement, feed-forward networks, experts."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tformer_jax.config import MoEConfig
from tformer_jax.lab.explain.figures import Curve, Heat, Lines
from tformer_jax.lab.explain.mathml import formula, fraction, root, row, total
from tformer_jax.lab.explain.topic import CFG, Example, Shape, Topic, make_topic, random_params, vectors
from tformer_jax.nn.activations import gelu, relu, relu_squared, silu
from tformer_jax.nn.ffn import FFN, GatedFFN
from tformer_jax.nn.layers import Residual
from tformer_jax.nn.moe import Routing, balance_loss, capacity, route
from tformer_jax.nn.norms import layer_norm, rms_norm

EPS = 1e-5
DEPTH = 12
PLACEMENTS = {
    "pre": "x + f(norm(x))",
    "post": "norm(x + f(x))",
    "both": "x + norm(f(norm(x)))",
    "output": "x + norm(f(x))",
}
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": relu,
    "gelu": gelu,
    "silu": silu,
    "relu_squared": relu_squared,
}
EXPERTS, CHOSEN = 4, 2
EXPERT_NAMES = [f"expert {number}" for number in range(EXPERTS)]
MOE = dataclasses.replace(
    CFG, ffn="moe", moe=MoEConfig(num_experts=EXPERTS, experts_per_token=CHOSEN, expert_capacity=1.0)
)


def norms(example: Example) -> Topic:
    """Explains layer normalization and RMS normalization."""
    T, D = len(example.source), CFG.dim
    x = (example.x * np.linspace(0.5, 3, T)[:, None] + np.linspace(-1, 2, T)[:, None]).astype(np.float32)
    scale, bias = np.ones(D, np.float32), np.zeros(D, np.float32)

    @jax.jit
    def compute(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return layer_norm(x, scale, bias, EPS), rms_norm(x, scale, EPS)

    normed = dict(zip(("input", "LayerNorm", "RMSNorm"), (x, *compute(x)), strict=True))
    features = [str(number) for number in range(D)]
    rows = {name: np.asarray(value)[0] for name, value in normed.items()}
    means = [Curve(name, np.arange(T), value.mean(-1), example.source) for name, value in rows.items()]
    sizes = [Curve(name, np.arange(T), np.sqrt((value**2).mean(-1)), example.source) for name, value in rows.items()]
    return make_topic(
        "norms",
        formulas=(
            formula("LayerNorm ( x ) = g", fraction("x - mean ( x )", root("var ( x ) + ε")), "+ b"),
            formula("RMSNorm ( x ) = g", fraction("x", root("mean ( x^2 ) + ε"))),
        ),
        shapes=(
            Shape("x", "B T D", x.shape, "input and output"),
            Shape("g, b", "D", scale.shape, "learned scale and bias"),
        ),
        functions=(layer_norm, layer_norm.fwd, rms_norm, rms_norm.fwd),
        figures=(
            Lines("Root of the mean square of each word", sizes, "position", "RMS"),
            Lines("Mean of each word", means, "position", "mean", "Only LayerNorm removes it."),
            *(Heat(name, value, example.source, features) for name, value in rows.items()),
        ),
    )


def placement(example: Example) -> Topic:
    """Explains where the norms of a residual connection are placed."""
    sizes = {name: _depth(name, example) for name in PLACEMENTS}
    depths = np.arange(DEPTH + 1)
    return make_topic(
        "placement",
        formulas=[formula(f"{name} : {text}") for name, text in PLACEMENTS.items()],
        shapes=(Shape("x", "B T D", example.x.shape, "residual stream"),),
        functions=(Residual,),
        figures=(
            Lines(
                f"Residual stream of a stack of {DEPTH} random sub-layers",
                [
                    Curve(f"{name}: {PLACEMENTS[name]}", depths, sizes_by_depth)
                    for name, sizes_by_depth in sizes.items()
                ],
                "sub-layers",
                "RMS",
                "Each sub-layer multiplies by a random matrix that keeps the variance.",
            ),
        ),
    )


def _depth(name: str, example: Example) -> list[float]:
    """Returns the RMS of the residual stream before each sub-layer and after the last."""
    module = Residual(dataclasses.replace(CFG, norm_placement=name, norm="rmsnorm"))
    ones = {"scale": np.ones(CFG.dim, np.float32)}
    params = {"params": {"norm": ones} | ({"norm_after": ones} if name == "both" else {})}
    kernels = np.random.default_rng(0).normal(size=(DEPTH, CFG.dim, CFG.dim)) / np.sqrt(CFG.dim)

    def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        read: Any = module.apply(params, x, method="sublayer_input")
        after: Any = module.apply(params, x, read @ kernel, train=False, method="add_output")
        return after, after

    _, after = jax.jit(lambda x, kernels: jax.lax.scan(layer, x, kernels))(example.x, kernels.astype(np.float32))
    return [float(np.sqrt(np.mean(np.square(stream)))) for stream in (example.x, *np.asarray(after))]


def ffn(example: Example) -> Topic:
    """Explains feed-forward networks and gates."""
    plain = FFN(dataclasses.replace(CFG, activation="relu"))
    gated = GatedFFN(dataclasses.replace(CFG, activation="silu"))
    params = random_params(gated, example.x)
    grid = np.linspace(-4, 2, 61, dtype=np.float32)

    @jax.jit
    def compute(x: jax.Array) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        modules = {"ReLU": plain, "SwiGLU": gated}
        hidden = {name: module.apply({"params": params}, x, method="hidden") for name, module in modules.items()}
        return hidden, {name: act(jnp.asarray(grid)) for name, act in ACTIVATIONS.items()}

    hidden, activations = compute(example.x)
    features = [str(number) for number in range(CFG.ffn_dim)]
    idle = float((np.asarray(hidden["ReLU"]) == 0).mean())
    return make_topic(
        "ffn",
        formulas=(
            formula("FFN ( x ) = act ( x W_1 + b_1 ) W_2 + b_2"),
            formula("GatedFFN ( x ) = ( act ( x W_g ) ⊙ x W_1 ) W_2"),
        ),
        shapes=(
            Shape("x", "B T D", example.x.shape, "input and output"),
            Shape("W_1, W_g", "D F", params["expand"]["kernel"].shape, "expand"),
            Shape("W_2", "F D", params["contract"]["kernel"].shape, "contract"),
            Shape("hidden", "B T F", hidden["ReLU"].shape, "hidden features"),
        ),
        functions=(FFN, GatedFFN, gelu),
        figures=(
            Lines("Activations", [Curve(name, grid, values) for name, values in activations.items()], "x", "act(x)"),
            Heat(
                "Hidden features with ReLU",
                np.asarray(hidden["ReLU"])[0],
                example.source,
                features,
                f"{idle:.0%} are 0.",
            ),
            Heat("Hidden features with SwiGLU", np.asarray(hidden["SwiGLU"])[0], example.source, features),
        ),
    )


def experts(example: Example) -> Topic:
    """Explains mixtures of experts."""
    T = len(example.source)
    router = vectors(EXPERT_NAMES, CFG.dim).T / 4
    logits = example.x @ router
    free, limited, balance = _routed(logits)
    shares = np.bincount(np.asarray(free.experts).ravel(), minlength=EXPERTS) / (T * CHOSEN)
    return make_topic(
        "experts",
        formulas=(
            formula("p = softmax ( x W_r ) , C = the k experts e with the largest p_e"),
            formula("out =", total("e ∈ C", "w_e FFN_e ( x )"), ", w_e =", fraction("p_e", row(total("i ∈ C", "p_i")))),
            formula("balance = E", total("e", "share_e mean ( p_e )")),
            formula("capacity ( n ) = min ( ⌈ c k n / E ⌉ , n ) after n tokens , c : capacity factor"),
        ),
        shapes=(
            Shape("x", "B T D", example.x.shape, "input and output"),
            Shape("W_r", "D E", router.shape, "router"),
            Shape("logits", "B T E", logits.shape, "scores of the experts"),
            Shape("chosen", "B T k", free.experts.shape, "experts of each token, and their weights"),
        ),
        functions=(route, capacity, balance_loss),
        figures=(
            _routing(
                "Weights of the chosen experts",
                free,
                example,
                f"Shares of the choices: {', '.join(f'{share:.2f}' for share in shares)}. Balance loss {balance:.3f}; "
                "1 is even use.",
            ),
            _routing("With a capacity factor of 1", limited, example, "Missing cells were dropped."),
            Lines(
                "Capacity of an expert by the number of tokens so far",
                [Curve("capacity", np.arange(T + 1), capacity(MOE, T))],
                "tokens",
                "tokens of one expert",
                f"{EXPERTS} experts, {CHOSEN} for each token.",
            ),
        ),
        values={"chosen": CHOSEN, "experts": EXPERTS},
    )


@jax.jit
def _routed(logits: jax.Array) -> tuple[Routing, Routing, jax.Array]:
    """Returns the routing of logits [1, T, E] without and with a capacity, and the balance loss of the former."""
    real = jnp.ones(logits.shape[:2], bool)
    free, limited = (route(logits, real, MOE, limited=limit) for limit in (False, True))
    return free, limited, balance_loss(logits, free.experts, real)


def _routing(title: str, routing: Routing, example: Example, caption: str) -> Heat:
    weights = np.full((len(example.source), EXPERTS), np.nan)
    experts, chosen = np.asarray(routing.experts)[0], np.asarray(routing.weights)[0]
    np.put_along_axis(weights, experts, np.where(chosen > 0, chosen, np.nan), axis=1)
    return Heat(title, weights, example.source, EXPERT_NAMES, caption)
