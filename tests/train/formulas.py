"""Update rules of the optimizers over three steps, in NumPy float64, by parameter, gradients and weight decay."""

import numpy as np

RATES = (0.005, 0.01, 0.01)
"""Learning rates for a peak of 0.01 after two steps of warm-up."""
B1, B2, EPS, DECAY = 0.8, 0.9, 1e-6, 0.1


def adamw(p, grads, decay):
    m = v = np.zeros_like(p)
    for t, (g, rate) in enumerate(zip(grads, RATES, strict=True), start=1):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        p = p - rate * (m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS) + decay * p)
    return p


def lamb(p, grads, decay):
    m = v = np.zeros_like(p)
    for t, (g, rate) in enumerate(zip(grads, RATES, strict=True), start=1):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        r = m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS) + decay * p
        p = p - rate * np.linalg.norm(p) / np.linalg.norm(r) * r
    return p


def lion(p, grads, decay):
    m = np.zeros_like(p)
    for g, rate in zip(grads, RATES, strict=True):
        p = p - rate * (np.sign(B1 * m + (1 - B1) * g) + decay * p)
        m = B2 * m + (1 - B2) * g
    return p


def sgd(p, grads, decay):
    m = np.zeros_like(p)
    for g, rate in zip(grads, RATES, strict=True):
        m = B1 * m + g + decay * p
        p = p - rate * m
    return p


def adafactor(p, grads, decay):
    """Shazeer and Stern (2018), algorithms 4 and 5; factored where both sides are at least 128."""
    row = col = v = 0.0
    for t, (g, rate) in enumerate(zip(grads, RATES, strict=True), start=1):
        beta, square = 1 - t**-0.8, g**2 + 1e-30
        if p.ndim == 2 and min(p.shape) >= 128:
            row, col = beta * row + (1 - beta) * square.mean(1), beta * col + (1 - beta) * square.mean(0)
            second = np.outer(row, col) / row.mean()
        else:
            second = v = beta * v + (1 - beta) * square
        u = g / np.sqrt(second)
        u = u / max(1.0, np.sqrt((u**2).mean()))
        p = p - rate * max(1e-3, np.sqrt((p**2).mean())) * u - rate * decay * p
    return p


def schedule_free(p, grads, decay):
    """Defazio et al. (2024), algorithm 1 with AdamW: returns y, at which gradients are taken, and x, to evaluate."""
    y, z, x, v, total = p, p, p, np.zeros_like(p), 0.0
    for t, (g, rate) in enumerate(zip(grads, RATES, strict=True), start=1):
        v = B2 * v + (1 - B2) * g**2
        z = z - rate * (g / (np.sqrt(v / (1 - B2**t)) + EPS) + decay * y)
        weight = rate**2
        total += weight
        x = x + weight / total * (z - x)
        y = (1 - B1) * z + B1 * x
    return y, x


def orthogonal(matrix):
    """Five Newton-Schulz steps (Jordan, 2024)."""
    x = matrix / np.linalg.norm(matrix)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.T if transposed else x


def muon(p, grads, decay):
    """Jordan (2024), scaled to AdamW's updates ("Muon is Scalable", 2025)."""
    m = np.zeros_like(p)
    for g, rate in zip(grads, RATES, strict=True):
        m = 0.95 * m + g
        p = p - rate * (0.2 * np.sqrt(max(p.shape)) * orthogonal(g + 0.95 * m) + decay * p)
    return p
