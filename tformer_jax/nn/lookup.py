"""Rows of a table by index, with a gradient that is summed in float32."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def lookup(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns rows of a table; their gradients are summed in float32.

    [V, D], int [...] -> [..., D]; NaN for indices outside 0, ..., V - 1. The sum is rounded once to the table's dtype:
    a sum of ones in bfloat16 would stop at 256.
    """
    return jnp.asarray(table).at[indices].get(mode="fill", wrap_negative_indices=False)


def _forward(table: jax.Array, indices: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return lookup(table, indices), (table, indices)


def _backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    table, indices = saved
    sums = jnp.zeros(table.shape, jnp.float32).at[indices]
    return sums.add(gradient.astype(jnp.float32), mode="drop", wrap_negative_indices=False).astype(table.dtype), None


lookup.defvjp(_forward, _backward)
