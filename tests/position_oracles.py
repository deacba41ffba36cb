"""The formulas of positions in NumPy float64, written from the papers with plain loops, without code of the package."""

import math

import numpy as np


def sinusoid(position, dim):
    """Returns the vector [D] of one position."""
    angles = [position / 10_000 ** (i / dim) for i in range(0, dim, 2)]
    return np.array([f(angle) for angle in angles for f in (math.sin, math.cos)])


def rotary_frequencies(cfg, kind="full"):
    """Returns the radians per token of each pair of features."""
    local = kind == "window" and cfg.rotary.window_base is not None
    base = cfg.rotary.window_base if local else cfg.rotary.base
    rates, R = [], int(cfg.head_size * cfg.rotary.fraction)
    for i in range(R // 2):
        rate = 1 / base ** (2 * i / R)
        if not local and cfg.rotary.scaling == "linear":
            rate /= cfg.rotary.factor
        if not local and cfg.rotary.scaling == "llama3":
            wavelength, original = 2 * math.pi / rate, cfg.rotary.original_length
            if wavelength > original / 1:
                rate /= cfg.rotary.factor
            elif wavelength >= original / 4:
                smooth = (original / wavelength - 1) / (4 - 1)
                rate = (1 - smooth) * rate / cfg.rotary.factor + smooth * rate
        if not local and cfg.rotary.scaling == "yarn":
            first, last = (yarn_index(cfg, beta) for beta in (cfg.rotary.beta_fast, cfg.rotary.beta_slow))
            first, last = max(math.floor(first), 0), min(math.ceil(last), R - 1)
            ramp = min(max((i - first) / (last - first), 0), 1)
            rate = ramp * rate / cfg.rotary.factor + (1 - ramp) * rate
        rates.append(rate)
    return rates


def yarn_index(cfg, beta):
    """Returns the fractional index i of the pair with beta rotations in the original context (YaRN, section 3.2).

    They are original_length / wavelength, where the wavelength is 2 pi base^(2i / R).
    """
    R, wavelength = int(cfg.head_size * cfg.rotary.fraction), cfg.rotary.original_length / beta
    return R / 2 * math.log(wavelength / (2 * math.pi), cfg.rotary.base)


def rotate(x, cfg, kind="full", start=0):
    """Multiplies each pair of features, as a complex number, by e^(i * position * rate): x [B, T, N, H]."""
    R, out = int(x.shape[-1] * cfg.rotary.fraction), np.array(x, np.float64)
    local, factor = kind == "window" and cfg.rotary.window_base is not None, 1.0
    if cfg.rotary.scaling == "yarn" and not local:
        factor = cfg.rotary.attention_factor or 0.1 * math.log(cfg.rotary.factor) + 1
    for t in range(x.shape[1]):
        for i, rate in enumerate(rotary_frequencies(cfg, kind)):
            a, b = (2 * i, 2 * i + 1) if cfg.rotary.pairing == "interleaved" else (i, i + R // 2)
            turned = factor * (x[:, t, :, a] + 1j * x[:, t, :, b]) * np.exp(1j * (start + t) * rate)
            out[:, t, :, a], out[:, t, :, b] = turned.real, turned.imag
    return out


def alibi_bias(N, T, S):
    """Returns [N, T, S] for a power of two N: slopes 2^(-8/N), 2^(-16/N), ..."""
    return np.array([[[-(2 ** (-8 * (n + 1) / N)) * abs(t - s) for s in range(S)] for t in range(T)] for n in range(N)])


def relative_bucket(offset, buckets, farthest, bidirectional):
    """Returns T5's bucket of key - query, as the paper describes it."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if offset > 0 else 0
        distance = abs(offset)
    else:
        distance = max(-offset, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    steps = math.log(distance / exact) / math.log(farthest / exact) * (buckets - exact)
    return first + min(exact + int(steps), buckets - 1)


def relative_bias(table, T, S, farthest, bidirectional):
    """table [buckets, N] -> [N, T, S]."""
    rows = [[table[relative_bucket(s - t, len(table), farthest, bidirectional)] for s in range(S)] for t in range(T)]
    return np.moveaxis(np.array(rows), -1, 0)
