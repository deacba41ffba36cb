"""Training: schedules, optimizers, LoRA, the train step and the loop.

Called as a function, `tformer_jax.train(cfg, data)` is `tformer_jax.notebook.training.train`, whose arguments
`help(tformer_jax.notebook.training.train)` explains.
"""

import sys

from tformer_jax import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
