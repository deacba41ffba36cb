"""Elementwise activation functions of the FFN, for arrays of any shape."""

import functools
import math

import jax
import jax.numpy as jnp

relu = jax.nn.relu
gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)
"""Tanh approximation of GELU, as in GPT-2."""
silu = jax.nn.silu
"""`x sigmoid(x)`, also called Swish."""


sigmoid = jax.nn.sigmoid
"""The gate of GLU."""


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """Computes `x Phi(x)` ("Gaussian Error Linear Units", 2016) in float32.

    Uses erf: `jax.nn.gelu` uses erfc, which is several times slower on a CPU and stores more for the backward pass.
    """
    return (x * _normal_cdf(x)).astype(x.dtype)


@gelu.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Computes the derivative `Phi(x) + x phi(x)`, the only array stored for the backward pass."""
    (x,), (dx,) = primals, tangents
    x32, cdf = x.astype(jnp.float32), _normal_cdf(x)
    slope = cdf + x32 * jnp.exp(-0.5 * x32 * x32) / math.sqrt(2 * math.pi)
    return (x32 * cdf).astype(x.dtype), dx * slope.astype(x.dtype)


def _normal_cdf(x: jax.Array) -> jax.Array:
    """Computes the standard normal CDF Phi in float32."""
    return 0.5 * (1 + jax.lax.erf(x.astype(jnp.float32) / math.sqrt(2)))


def relu_squared(x: jax.Array) -> jax.Array:
    """Computes `max(x, 0)^2` ("Primer", 2021)."""
    return jnp.square(jax.nn.relu(x))


def gelu_sigmoid(x: jax.Array) -> jax.Array:
    """Computes `x sigmoid(1.702 x)`, an approximation of GELU (GPT-1, CLIP, the gate of gpt-oss)."""
    return x * jax.nn.sigmoid(1.702 * x)
