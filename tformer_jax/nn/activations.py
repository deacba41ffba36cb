"""Non-linearities of the FFN, elementwise: any shape, unchanged."""

import functools
import math

import jax
import jax.numpy as jnp

relu = jax.nn.relu
gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)
"""GELU's approximation by tanh, as GPT-2 has it."""
silu = jax.nn.silu
"""`x sigmoid(x)`, also called Swish."""
sigmoid = jax.nn.sigmoid
"""The gate of GLU."""


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """`x Phi(x)` ("Gaussian Error Linear Units", 2016), computed in float32.

    By erf: `jax.nn.gelu` takes erfc, which costs several times as much on a CPU, and keeps more for its derivative.
    """
    return (x * _normal_cdf(x)).astype(x.dtype)


@gelu.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The derivative is `Phi(x) + x phi(x)`, one array for the backward pass."""
    (x,), (dx,) = primals, tangents
    x32, cdf = x.astype(jnp.float32), _normal_cdf(x)
    slope = cdf + x32 * jnp.exp(-0.5 * x32 * x32) / math.sqrt(2 * math.pi)
    return (x32 * cdf).astype(x.dtype), dx * slope.astype(x.dtype)


def _normal_cdf(x: jax.Array) -> jax.Array:
    """Phi in float32."""
    return 0.5 * (1 + jax.lax.erf(x.astype(jnp.float32) / math.sqrt(2)))


def relu_squared(x: jax.Array) -> jax.Array:
    """`max(x, 0)^2` ("Primer", 2021)."""
    return jnp.square(jax.nn.relu(x))
