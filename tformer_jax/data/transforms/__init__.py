"""Transforms: random changes of training examples; a run without them loads no other module of this package."""

import functools
from typing import TYPE_CHECKING

from tformer_jax.config import Config
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.tokenizers import Tokenizers

if TYPE_CHECKING:
    from tformer_jax.data.transforms.base import Transforms


def build_transforms(cfg: Config, corpus: Corpus, tokenizers: Tokenizers) -> "Transforms | None":
    """Prepares the transforms of a config for a corpus; None if there are none.

    Raises:
        UserError: one does not fit the data, or a file that it names cannot be read.
    """
    if not cfg.data.transforms:
        return None
    from tformer_jax.data.transforms.base import Training, build

    return build(cfg.data.transforms, Training(cfg.data, corpus, tokenizers), cfg.seed)


def build_formats(cfg: Config) -> "Transforms | None":
    """Returns the formats that transforms give to sources of other splits; None if they give none."""
    if not any(transform.is_format for transform in cfg.data.transforms):
        return None
    from tformer_jax.data.transforms.base import Transforms, format_example

    return Transforms(0, ((1.0, functools.partial(format_example, cfg.data.transforms)),), ())
