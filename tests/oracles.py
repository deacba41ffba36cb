"""The formulas in NumPy float64, written from the papers with plain loops and without any code of the package.

Functions with a parameter `p` read the package's parameter trees, in float64 (`f64`) and with separate projections.
"""

import math

import numpy as np


def f64(tree):
    """A parameter tree as NumPy float64."""
    return {k: f64(v) for k, v in tree.items()} if isinstance(tree, dict) else np.asarray(tree, np.float64)


def softmax(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention_core(q, k, v, mask=None, scale=None):
    """q [B, T, N, H], k and v [B, S, K, H], mask [B, N, T, S] -> [B, T, N, H]; a row without keys gives zeros."""
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    mask = np.ones((B, N, T, S), bool) if mask is None else np.broadcast_to(mask, (B, N, T, S))
    scale = 1 / math.sqrt(H) if scale is None else scale
    out = np.zeros((B, T, N, H))
    for b, t, n in np.ndindex(B, T, N):
        seen = [s for s in range(S) if mask[b, n, t, s]]
        if seen:
            head = n * K // N
            weights = softmax(np.array([scale * (q[b, t, n] @ k[b, s, head]) for s in seen]))
            out[b, t, n] = sum(w * v[b, s, head] for w, s in zip(weights, seen, strict=True))
    return out


def layer_norm(x, scale, bias, eps):
    mean = x.sum(-1, keepdims=True) / x.shape[-1]
    variance = ((x - mean) ** 2).sum(-1, keepdims=True) / x.shape[-1]
    return (x - mean) / np.sqrt(variance + eps) * scale + bias


def rms_norm(x, scale, eps):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) / x.shape[-1] + eps) * scale


def norm(x, p, kind, eps):
    return rms_norm(x, p["scale"], eps) if kind == "rmsnorm" else layer_norm(x, p["scale"], p.get("bias", 0), eps)


def sinusoid(position, dim):
    """One position's vector [D]."""
    angles = [position / 10_000 ** (i / dim) for i in range(0, dim, 2)]
    return np.array([f(angle) for angle in angles for f in (math.sin, math.cos)])


ACTIVATIONS = {
    "relu": lambda x: np.where(x > 0, x, 0),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def linear(x, p):
    """Contracts the kernel's first axis, or its first two where x ends in them: (N, H) -> D."""
    contracted = 2 if p["kernel"].ndim == 3 and x.shape[-2:] == p["kernel"].shape[:2] else 1
    return np.tensordot(x, p["kernel"], contracted) + p.get("bias", 0)


def attention(p, query, key, value, mask=None):
    """The whole layer: query [B, T, D], key and value [B, S, D] -> [B, T, D]."""
    heads = attention_core(linear(query, p["query"]), linear(key, p["key"]), linear(value, p["value"]), mask)
    return linear(heads, p["output"])


def ffn(p, x, activation):
    return linear(ACTIVATIONS[activation](linear(x, p["expand"])), p["contract"])


def residual(x, p, cfg, f):
    """The connection around f, with its norm in p."""
    if cfg.norm_placement == "pre":
        return x + f(norm(x, p["norm"], cfg.norm, cfg.norm_eps))
    return norm(x + f(x), p["norm"], cfg.norm, cfg.norm_eps)


def layer(x, p, cfg, mask=None, memory=None, memory_mask=None):
    x = residual(x, p["self_attention_residual"], cfg, lambda h: attention(p["self_attention"], h, h, h, mask))
    if memory is not None:
        x = residual(
            x,
            p["cross_attention_residual"],
            cfg,
            lambda h: attention(p["cross_attention"], h, memory, memory, memory_mask),
        )
    return residual(x, p["ffn_residual"], cfg, lambda h: ffn(p["ffn"], h, cfg.activation))


def stack(x, p, cfg, depth, mask=None, memory=None, memory_mask=None):
    for number in range(depth):
        x = layer(x, p[f"layers_{number}"], cfg, mask, memory, memory_mask)
    return norm(x, p["norm"], cfg.norm, cfg.norm_eps) if "norm" in p else x


def embed(tokens, table, positions, cfg):
    """`positions` holds the learned table under "positions", where there is one."""
    x = table["embedding"][tokens] * (math.sqrt(cfg.dim) if cfg.scale_embeddings else 1)
    for t in range(tokens.shape[1]):
        if cfg.position == "sinusoidal":
            x[:, t] += sinusoid(t, cfg.dim)
        if cfg.position == "learned":
            x[:, t] += positions["positions"]["embedding"][t]
    return x


def logits(x, p, tied):
    """`tied` is the embedding that is also the output head, or None."""
    return x @ (tied["embedding"].T if tied else p["kernel"]) + p.get("bias", 0)


def padding_mask(real):
    return real[:, None, None, :]


def causal_mask(length):
    return np.tril(np.ones((length, length), bool))[None, None]


def decoder_lm(p, cfg, tokens, real):
    """tokens and real [B, T] -> [B, T, V]."""
    x = embed(tokens, p["embedding"], p.get("input"), cfg)
    x = stack(x, p["decoder"], cfg, cfg.decoder_layers, causal_mask(tokens.shape[1]) & padding_mask(real))
    return logits(x, p.get("head", {}), None if cfg.tie_embeddings == "none" else p["embedding"])


def seq2seq(p, cfg, source, target, source_real, target_real):
    """source and source_real [B, S], target and target_real [B, T] -> [B, T, V]."""
    source_table = p["target_embedding" if cfg.tie_embeddings == "all" else "source_embedding"]
    memory = embed(source, source_table, p.get("source_input"), cfg)
    memory = stack(memory, p["encoder"], cfg, cfg.encoder_layers, padding_mask(source_real))
    x = embed(target, p["target_embedding"], p.get("target_input"), cfg)
    mask = causal_mask(target.shape[1]) & padding_mask(target_real)
    x = stack(x, p["decoder"], cfg, cfg.decoder_layers, mask, memory, padding_mask(source_real))
    return logits(x, p.get("head", {}), None if cfg.tie_embeddings == "none" else p["target_embedding"])


def classifier(p, cfg, tokens, real):
    """tokens and real [B, S] -> [B, classes]."""
    x = embed(tokens, p["embedding"], p.get("input"), cfg)
    x = stack(x, p["encoder"], cfg, cfg.encoder_layers, padding_mask(real))
    pooled = [row[keep].sum(0) / max(keep.sum(), 1) for row, keep in zip(x, real, strict=True)]
    return logits(np.array(pooled), p["head"], None)
