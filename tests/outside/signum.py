import jax.numpy as jnp
import optax

from tformer_jax.config import kinds


@kinds.declares(settings=("beta1",), elementwise=True)
def signum(optim, schedule, mask, shapes):
    """The sign of the momentum ("signSGD", 2018), with decoupled weight decay."""
    return optax.chain(
        optax.trace(optim.beta1),
        optax.stateless_with_tree_map(lambda momentum, _: jnp.sign(momentum)),
        optax.add_decayed_weights(optim.weight_decay, mask),
        optax.scale_by_learning_rate(schedule),
    )


kinds.OPTIMIZERS["signum"] = signum
