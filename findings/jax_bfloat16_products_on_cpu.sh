#!/usr/bin/env bash
# Products of bfloat16 matrices with results of float32 in JAX on an x86 CPU: x [rows, I], y [rows, O], w [I, O].
#
# JAX 0.10.2 multiplies x w in bfloat16, which a CPU with AVX512-BF16 or AMX does 2 to 5 times as fast as in float32. It
# converts the factors of x^T y, the gradient of w, to float32, and also those of (a contiguous copy of x^T) y. If the
# copy goes through a shape with a leading axis of 1, they stay bfloat16. That program fails when it runs if it
# transposes the product, unless a barrier separates the two. XLA's OperandUpcaster decides by the layouts of factors
# before layout assignment, and TransposeFolding changes the product after it (xla/service/cpu/cpu_compiler.cc).
#
# Exits with 1 if something else is seen. Seen on 2 CPU cores, the product and whether its factors are converted:
#   jax 0.10.2
#   x w False
#   x^T y True
#   copy of x^T, y True
#   copy with a leading axis, y False
#   UNIMPLEMENTED: Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
cat > "$folder/run.py" <<'PYTHON'
import jax
import jax.numpy as jnp

print("jax", jax.__version__)
x, y, w = (jnp.ones(shape, jnp.bfloat16) for shape in ((64, 16), (64, 32), (16, 32)))
barrier = jax.lax.optimization_barrier


def multiply(left, right, axis=1):
    return jax.lax.dot_general(left, right, (((axis,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def with_leading_axis(x, y):
    return multiply(barrier(x.T[None])[0], y)


def converts(name, function, *arrays):
    program = jax.jit(function).lower(*arrays).compile().as_text()
    print(name, is_converted := " convert(" in program)
    return is_converted


assert not converts("x w", multiply, x, w)
assert converts("x^T y", lambda x, y: multiply(x, y, axis=0), x, y)
assert converts("copy of x^T, y", lambda x, y: multiply(barrier(x.T), y), x, y)
assert not converts("copy with a leading axis, y", with_leading_axis, x, y)
jax.block_until_ready(jax.jit(lambda x, y: jnp.exp(barrier(with_leading_axis(x, y)).T))(x, y))
try:
    jax.block_until_ready(jax.jit(lambda x, y: jnp.exp(with_leading_axis(x, y).T))(x, y))
except jax.errors.JaxRuntimeError as error:
    message = str(error)
print(message)
assert message == "UNIMPLEMENTED: Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32"
PYTHON
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/run.py"
