"""Non-linearities of the FFN, elementwise: any shape, unchanged."""

import functools

import jax

relu = jax.nn.relu
gelu = functools.partial(jax.nn.gelu, approximate=False)
"""`x Phi(x)` ("Gaussian Error Linear Units", 2016)."""
gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)
"""GELU's approximation by tanh, as GPT-2 has it."""
silu = jax.nn.silu
"""`x sigmoid(x)`, also called Swish."""
sigmoid = jax.nn.sigmoid
"""The gate of GLU."""


def relu_squared(x: jax.Array) -> jax.Array:
    """`max(x, 0)^2` ("Primer", 2021)."""
    return jax.numpy.square(jax.nn.relu(x))
