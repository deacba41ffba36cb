#!/usr/bin/env bash
# jax.checkpoint on a CPU, for eight layers in a Python loop: a matrix product, erf, and a product back.
#
# JAX 0.10.2 lowers the recomputation behind barriers, but XLA's compiler for CPUs expands the barriers and then merges
# the recomputed erf with the one of the forward pass. The gradient needs about as much temporary memory as without
# jax.checkpoint, whatever the policy. With the compiler's pass `cse_barrier_expander` off, erf is computed again, and
# the memory is a sixth. Layers in jax.lax.scan are not concerned; JAX 0.11.2 (Python 3.12) needs no option.
#
# Exits with 1 if something else is seen. Seen on 2 CPU cores, MiB of temporary memory and number of erf:
#   jax 0.10.2
#   plain 145.0 8
#   jax.checkpoint 137.0 8
#   jax.checkpoint without cse_barrier_expander 26.0 16
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
cat > "$folder/run.py" <<'PYTHON'
import jax
import jax.numpy as jnp

print("jax", jax.__version__)
kernels = [(jnp.ones((128, 1024)), jnp.ones((1024, 128)))] * 8
inputs = jnp.ones((2048, 128))


def layer(x, kernel):
    return jax.lax.erf(x @ kernel[0]) @ kernel[1]


def measure(name, function, **options):
    def loss(kernels):
        x = inputs
        for kernel in kernels:
            x = function(x, kernel)
        return (x**2).sum()

    compiled = jax.jit(jax.grad(loss), compiler_options=options).lower(kernels).compile()
    size = compiled.memory_analysis().temp_size_in_bytes / 2**20
    print(name, round(size, 1), count := compiled.as_text().count(" erf("))
    return size, count


plain, first = measure("plain", layer)
kept, second = measure("jax.checkpoint", jax.checkpoint(layer))
name = "jax.checkpoint without cse_barrier_expander"
freed, third = measure(name, jax.checkpoint(layer), xla_disable_hlo_passes="cse_barrier_expander")
assert (first, second, third) == (8, 8, 16)
assert kept > 0.9 * plain and freed < plain / 4
PYTHON
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/run.py"
