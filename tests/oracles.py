"""The formulas in NumPy float64, written from the papers with plain loops and without any code of the package.

Functions with a parameter `p` read the package's parameter trees, in float64 (`f64`) and with separate projections.
"""

import math
from types import SimpleNamespace

import numpy as np

from tests import position_oracles
from tformer_jax.special_tokens import BOS, PAD, PAD_TOKEN


def f64(tree):
    """Converts a parameter tree to NumPy float64."""
    return {k: f64(v) for k, v in tree.items()} if isinstance(tree, dict) else np.asarray(tree, np.float64)


def softmax(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention_core(q, k, v, mask=None, scale=None, softcap=None, bias=None, sinks=None):
    """q [B, T, N, H], k and v [B, S, K, H], mask [B, N, T, S], bias [N, T, S], sinks [N] -> [B, T, N, H].

    A row without keys gives zeros. A sink is the score of one more key, whose value is 0.
    """
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    mask = np.ones((B, N, T, S), bool) if mask is None else np.broadcast_to(mask, (B, N, T, S))
    scale = 1 / math.sqrt(H) if scale is None else scale
    out = np.zeros((B, T, N, v.shape[-1]))
    for b, t, n in np.ndindex(B, T, N):
        seen = [s for s in range(S) if mask[b, n, t, s]]
        if seen:
            head = n * K // N
            scores = np.array([scale * (q[b, t, n] @ k[b, s, head]) for s in seen])
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            if bias is not None:
                scores = scores + bias[n, t, seen]
            weights = softmax(scores if sinks is None else np.append(scores, sinks[n]))[: len(seen)]
            out[b, t, n] = sum(w * v[b, s, head] for w, s in zip(weights, seen, strict=True))
    return out


def layer_norm(x, scale, bias, eps):
    mean = x.sum(-1, keepdims=True) / x.shape[-1]
    variance = ((x - mean) ** 2).sum(-1, keepdims=True) / x.shape[-1]
    return (x - mean) / np.sqrt(variance + eps) * scale + bias


def rms_norm(x, scale, eps):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) / x.shape[-1] + eps) * scale


def norm(x, p, cfg):
    scale = p["scale"] + (1 if cfg.norm_unit_offset else 0)
    if cfg.norm == "rmsnorm":
        return rms_norm(x, scale, cfg.norm_eps)
    return layer_norm(x, scale, p.get("bias", 0), cfg.norm_eps)


ACTIVATIONS = {
    "relu": lambda x: np.where(x > 0, x, 0),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_sigmoid": lambda x: x / (1 + np.exp(-1.702 * x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "relu_squared": lambda x: np.where(x > 0, x, 0) ** 2,
}


def linear(x, p):
    """Contracts the kernel's first axis, or its first two if x ends in them: (N, H) -> D."""
    contracted = 2 if p["kernel"].ndim == 3 and x.shape[-2:] == p["kernel"].shape[:2] else 1
    return np.tensordot(x, p["kernel"], contracted) + p.get("bias", 0)


def attention(p, query, key, value, mask=None, cfg=None, *, position=None, kind="full", bias=None):
    """The whole layer: query [B, T, D], key and value [B, S, D] -> [B, T, D]; `position` is the kind of position."""
    q, k, v = linear(query, p["query"]), linear(key, p["key"]), linear(value, p["value"])
    if cfg is None:
        return linear(attention_core(q, k, v, mask), p["output"])
    over = cfg.qk_norm_over if cfg.qk_norm else None
    if over == "width":
        q, k = (
            norm(x.reshape(*x.shape[:2], -1), p[name], cfg).reshape(x.shape)
            for x, name in ((q, "query_norm"), (k, "key_norm"))
        )
    if over == "heads":
        q, k = norm(q, p["query_norm"], cfg), norm(k, p["key_norm"], cfg)
    if position == "rotary" and kind != "nope":
        q, k = position_oracles.rotate(q, cfg, kind), position_oracles.rotate(k, cfg, kind)
    if over == "rotated_heads":
        q, k = norm(q, p["query_norm"], cfg), norm(k, p["key_norm"], cfg)
    heads = attention_core(q, k, v, mask, cfg.attention_scale, cfg.attention_softcap, bias, p.get("sinks"))
    return linear(heads, p["output"])


def basic_attention(x, memory, mask=None, bias=None):
    """softmax(x m^T) m, row by row: x [B, T, D], m [B, S, D], mask [B, 1, T, S]."""
    m = memory[:, :, None]
    return attention_core(x[:, :, None], m, m, mask, 1.0, bias=bias)[:, :, 0]


def latent_attention(p, query, key, mask, cfg, *, position=None, kind="full", bias=None):
    """DeepSeek-V2, equations 9 to 19: all keys and values are written out. query [B, T, D], key [B, S, D]."""
    H, N, rotary = cfg.head_size, cfg.num_heads, SimpleNamespace(head_size=cfg.mla.rotary_dim, rotary=cfg.rotary)
    if cfg.mla.query_latent_dim:
        query = norm(linear(query, p["query_latent"]), p["query_latent_norm"], cfg)
    q, latent = linear(query, p["query"]), norm(linear(key, p["latent"]), p["latent_norm"], cfg)
    rotated = linear(key, p["rotated"])[:, :, None]
    if position == "rotary" and kind != "nope":
        q = np.concatenate([q[..., :H], position_oracles.rotate(q[..., H:], rotary, kind)], axis=-1)
        rotated = position_oracles.rotate(rotated, rotary, kind)
    k = np.concatenate([linear(latent, p["key"]), np.repeat(rotated, N, axis=2)], axis=-1)
    heads = attention_core(q, k, linear(latent, p["value"]), mask, cfg.attention_scale, cfg.attention_softcap, bias)
    return linear(heads, p["output"])


def delta_rule(q, k, v, log_decay, beta, state=None):
    """Gated Delta Networks, equation 10: S <- a S (I - b k k^T) + b v k^T, o = S q, with S [V, H].

    q and k [T, H], v [T, V], log_decay and beta [T]; returns [T, V] and the last S.
    """
    state = np.zeros((v.shape[-1], k.shape[-1])) if state is None else state
    out = []
    for q_t, k_t, v_t, g, b in zip(q, k, v, log_decay, beta, strict=True):
        state = math.exp(g) * state @ (np.eye(len(k_t)) - b * np.outer(k_t, k_t)) + b * np.outer(v_t, k_t)
        out.append(state @ q_t)
    return np.array(out), state


def gated_delta(p, x, cfg):
    """The layer on rows without padding: x [B, T, D] -> [B, T, D]."""

    def convolved(p):
        h, W = linear(x, p["project"]), len(p["conv_kernel"])
        out = np.zeros_like(h)
        for t in range(x.shape[1]):
            for back in range(min(W, t + 1)):
                out[:, t] += p["conv_kernel"][W - 1 - back] * h[:, t - back]
        return ACTIVATIONS["silu"](out)

    def unit(x):
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    q, k, v = convolved(p["queries"]), convolved(p["keys"]), convolved(p["values"])
    B, _, N, H = *v.shape[:3], q.shape[-1]
    group = N // q.shape[2]
    q, k = unit(q) / math.sqrt(H), unit(k)
    log_decay = -np.exp(p["A_log"]) * np.log1p(np.exp(linear(x, p["decay"]) + p["dt_bias"]))
    beta = ACTIVATIONS["sigmoid"](linear(x, p["beta"]))
    out = np.zeros_like(v)
    for b, n in np.ndindex(B, N):
        out[b, :, n], _ = delta_rule(
            q[b, :, n // group], k[b, :, n // group], v[b, :, n], log_decay[b, :, n], beta[b, :, n]
        )
    return linear(rms_norm(out, p["scale"], cfg.norm_eps) * ACTIVATIONS["silu"](linear(x, p["gate"])), p["output"])


def ffn(p, x, cfg):
    if "router" in p:
        return mixture(p, x, cfg)
    hidden = linear(x, p["expand"])
    if "gate" in p:
        return linear(ACTIVATIONS[cfg.activation](linear(x, p["gate"])) * hidden, p["contract"])
    return linear(ACTIVATIONS[cfg.activation](hidden), p["contract"])


def mixture(p, x, cfg, real=None, segments=None, train=False):
    """Loops over all tokens: each uses its experts, which in training read a share of the tokens up to it."""
    B, T, D = x.shape
    E, k, out = cfg.moe.num_experts, cfg.moe.experts_per_token, np.zeros((B, T, D))
    real = np.ones((B, T), bool) if real is None else real
    for b in range(B):
        for t in range(T):
            if t == 0 or (segments is not None and segments[b, t] != segments[b, t - 1]):
                read, tokens = [0] * E, 0
            if not real[b, t]:
                continue
            tokens += 1
            probabilities = softmax(x[b, t] @ p["router"])
            ranked = sorted(range(E), key=lambda e, pr=probabilities: -pr[e])[:k]
            total = sum(probabilities[e] for e in ranked) if cfg.moe.router_normalize else 1
            for expert in ranked:
                limited = train and cfg.moe.expert_capacity is not None
                if limited and read[expert] + 1 > math.ceil(cfg.moe.expert_capacity * k * tokens / E):
                    continue
                read[expert] += 1
                out[b, t] += probabilities[expert] / total * expert_ffn(p, expert, x[b, t], cfg)
    if cfg.moe.shared_dim is not None:
        gate = 1 / (1 + np.exp(-(x @ p["shared_gate"]))) if cfg.moe.shared_gate else 1
        out = out + gate * ffn(p["shared"], x, cfg)
    return out


def expert_ffn(p, e, x, cfg):
    """Applies expert e to x [..., D]."""

    def affine(name, x):
        return x @ p[f"{name}_kernel"][e] + (p[f"{name}_bias"][e] if cfg.ffn_bias else 0)

    activation = ACTIVATIONS[cfg.activation]
    if cfg.moe.expert_gated:
        return affine("contract", activation(affine("gate", x)) * affine("expand", x))
    return affine("contract", activation(affine("expand", x)))


def residual(x, p, cfg, f):
    """Applies the residual connection around f, with its norms in p."""
    m = cfg.residual_multiplier
    if cfg.norm_placement == "pre":
        return x + m * f(norm(x, p["norm"], cfg) if "norm" in p else x)
    if cfg.norm_placement == "both":
        return x + m * norm(f(norm(x, p["norm"], cfg)), p["norm_after"], cfg)
    if cfg.norm_placement == "output":
        return x + m * norm(f(x), p["norm"], cfg)
    return norm(x + m * f(x), p["norm"], cfg)


def layer(x, p, cfg, mask=None, memory=None, memory_mask=None, kind="full", bias=None):
    if kind == "window":
        near = [[abs(t - s) < cfg.window for s in range(x.shape[1])] for t in range(x.shape[1])]
        mask = np.array(near) if mask is None else mask & np.array(near)

    def self_attention(h):
        if cfg.attention == "basic":
            return basic_attention(h, h, mask, bias)
        if "gated_delta" in (cfg.attention, kind):
            return gated_delta(p["self_attention"], h, cfg)
        if cfg.attention == "mla":
            return latent_attention(p["self_attention"], h, h, mask, cfg, position=cfg.position, kind=kind, bias=bias)
        return attention(p["self_attention"], h, h, h, mask, cfg, position=cfg.position, kind=kind, bias=bias)

    x = residual(x, p.get("self_attention_residual", {}), cfg, self_attention)

    def cross_attention(h):
        if cfg.attention == "basic":
            return basic_attention(h, memory, memory_mask)
        if cfg.attention == "mla":
            return latent_attention(p["cross_attention"], h, memory, memory_mask, cfg)
        return attention(p["cross_attention"], h, memory, memory, memory_mask, cfg)

    if memory is not None:
        x = residual(x, p["cross_attention_residual"], cfg, cross_attention)
    return residual(x, p["ffn_residual"], cfg, lambda h: ffn(p["ffn"], h, cfg))


def stack(x, p, cfg, depth, mask=None, memory=None, memory_mask=None, bidirectional=False):
    T, bias = x.shape[1], None
    if bidirectional and cfg.lookahead is not None:
        mask = mask & np.array([[s - t <= cfg.lookahead for s in range(T)] for t in range(T)])
    if cfg.position == "alibi":
        bias = position_oracles.alibi_bias(cfg.num_heads, T, T)
    for number in range(depth):
        kind = cfg.layer_pattern[number % len(cfg.layer_pattern)]
        if cfg.position == "relative" and kind not in ("nope", "gated_delta"):
            table = (p[f"layers_{number}"] if cfg.relative.by_layer else p)["attention_positions"]["embedding"]
            bias = position_oracles.relative_bias(table, T, T, cfg.relative.distance, bidirectional)
        added = None if kind == "nope" else bias
        x = layer(x, p[f"layers_{number}"], cfg, mask, memory, memory_mask, kind, added)
    return norm(x, p["norm"], cfg) if "norm" in p else x


def embed(tokens, table, extra, cfg):
    """Embeds tokens [B, T] -> [B, T, D]; `extra` holds positions, types and a norm, if the config has them."""
    factor = cfg.embedding_multiplier * (math.sqrt(cfg.dim) if cfg.scale_embeddings else 1)
    x = table["embedding"][np.where(tokens == PAD, 0, tokens)] * factor
    for t in range(tokens.shape[1]):
        if cfg.position == "sinusoidal":
            x[:, t] += position_oracles.sinusoid(t, cfg.dim)
        if cfg.position == "sinusoidal_halves":
            x[:, t] += np.concatenate(
                [position_oracles.sinusoid(t, cfg.dim)[0::2], position_oracles.sinusoid(t, cfg.dim)[1::2]]
            )
        if cfg.position == "sinusoidal_fairseq":
            angles = (cfg.position_offset + t) / 10_000 ** (np.arange(cfg.dim // 2) / (cfg.dim // 2 - 1))
            x[:, t] += np.concatenate([np.sin(angles), np.cos(angles)])
        if cfg.position == "learned":
            x[:, t] += extra["positions"]["embedding"][cfg.position_offset + t]
    if cfg.token_types:
        x = x + extra["types"][0]
    return norm(x, extra["norm"], cfg) if cfg.embedding_norm else x


def logits(x, p, tied, cfg):
    """`tied` is the embedding that is also the output head, or None."""
    if cfg.scale_output:
        x = x / math.sqrt(cfg.dim)
    x = x / cfg.output_divisor
    result = x @ (tied["embedding"].T if tied else p["kernel"]) + p.get("bias", 0)
    return result if cfg.output_softcap is None else cfg.output_softcap * np.tanh(result / cfg.output_softcap)


def padding_mask(real):
    return real[:, None, None, :]


def causal_mask(length):
    return np.tril(np.ones((length, length), bool))[None, None]


def prefix_mask(prefix, length):
    """Returns the mask [B, 1, T, T]: causal, but all tokens attend to the first prefix[b] keys of row b."""
    rows = [[[s <= t or s < first for s in range(length)] for t in range(length)] for first in prefix]
    return np.array(rows)[:, None]


def decoder_lm(p, cfg, tokens, real, prefix=None):
    """tokens and real [B, T], prefix [B] -> [B, T, V]."""
    x = embed(tokens, p["embedding"], p.get("input"), cfg)
    T = tokens.shape[1]
    mask = causal_mask(T) if prefix is None else prefix_mask(prefix, T)
    x = stack(x, p["decoder"], cfg, cfg.decoder_layers, mask & padding_mask(real))
    return logits(x, p.get("head", {}), None if cfg.tie_embeddings == "none" else p["embedding"], cfg)


def seq2seq(p, cfg, source, target, source_real, target_real):
    """source and source_real [B, S], target and target_real [B, T] -> [B, T, V]."""
    source_table = p["target_embedding" if cfg.tie_embeddings in ("inputs", "all") else "source_embedding"]
    memory = embed(source, source_table, p.get("source_input"), cfg)
    memory = stack(memory, p["encoder"], cfg, cfg.encoder_layers, padding_mask(source_real), bidirectional=True)
    x = embed(target, p["target_embedding"], p.get("target_input"), cfg)
    mask = causal_mask(target.shape[1]) & padding_mask(target_real)
    x = stack(x, p["decoder"], cfg, cfg.decoder_layers, mask, memory, padding_mask(source_real))
    return logits(x, p.get("head", {}), p["target_embedding"] if cfg.tie_embeddings in ("output", "all") else None, cfg)


def transformed(x, p, cfg):
    """Applies the transform before the output head, if there is one."""
    if not cfg.head_transform:
        return x
    return norm(ACTIVATIONS[cfg.head_activation](linear(x, p["transform"])), p["transform_norm"], cfg)


def masked_lm(p, cfg, tokens, real):
    """tokens and real [B, T] -> [B, T, V]."""
    x = embed(tokens, p["embedding"], p.get("input"), cfg)
    x = stack(x, p["encoder"], cfg, cfg.encoder_layers, padding_mask(real), bidirectional=True)
    return logits(
        transformed(x, p, cfg), p.get("head", {}), None if cfg.tie_embeddings == "none" else p["embedding"], cfg
    )


def sampled(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Returns the probabilities that tokens are sampled with, [V] -> [V], computed by sorting."""
    row = np.float64(logits) / temperature
    row[[PAD_TOKEN, BOS]] = -np.inf
    if top_k:
        row[np.argsort(row)[:-top_k]] = -np.inf
    order = np.argsort(-row)
    probabilities = softmax(row)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    row[order[1:][before[1:] >= top_p]] = -np.inf
    row[softmax(row) < min_p * softmax(row).max()] = -np.inf
    return softmax(row)


def classifier(p, cfg, tokens, real):
    """tokens and real [B, S] -> [B, classes]."""
    x = embed(tokens, p["embedding"], p.get("input"), cfg)
    x = stack(x, p["encoder"], cfg, cfg.encoder_layers, padding_mask(real), bidirectional=True)
    pooled = []
    for row, keep in zip(x, real, strict=True):
        remaining = row[keep]
        mean = remaining.sum(0) / max(len(remaining), 1)
        pooled.append(mean if cfg.pooling == "mean" else remaining[0 if cfg.pooling == "first" else -1])
    pooled = np.array(pooled)
    if cfg.pooler:
        pooled = {"tanh": np.tanh, **ACTIVATIONS}[cfg.pooler_activation](linear(pooled, p["pooler"]))
    return logits(transformed(pooled, p, cfg), p["head"], None, cfg)
