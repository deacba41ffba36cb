"""Names of arrays in checkpoints of wrapped models, of base models alone, of early versions and with copies."""

import re
from collections.abc import Collection

from tformer_jax.interop.architecture import Architecture
from tformer_jax.interop.files import StoredArrays

WRAPPERS = ("base_model.model.", "_orig_mod.", "module.")
"""Name prefixes that PEFT, torch.compile and DistributedDataParallel give to all arrays."""

LANGUAGE_MODEL = re.compile(r"^(model\.)?language_model\.")
"""Name prefix of a language model beside a model of images."""


def standard_names(arrays: StoredArrays, architecture: Architecture) -> StoredArrays:
    """Renames gamma and beta of early checkpoints, and adds the prefix that checkpoints of a base model omit.

    Removes the prefixes of wrappers and of a language model beside a model of images.
    """
    wrapped = _wrapper_length(arrays)
    names = {name: LANGUAGE_MODEL.sub(r"\1", name[wrapped:]) for name in arrays}
    for early, modern in (("gamma", "weight"), ("beta", "bias")):
        names = {old: re.sub(rf"LayerNorm\.{early}$", f"LayerNorm.{modern}", new) for old, new in names.items()}
    return with_prefix(arrays.renamed(names), architecture)


def with_prefix(arrays: StoredArrays, architecture: Architecture) -> StoredArrays:
    """Adds the prefix that the names of a base model's arrays lack."""
    if not is_base_model(arrays, architecture):
        return arrays
    heads, prefix = architecture.heads, architecture.prefix
    return arrays.renamed({name: name if name.startswith(heads) else prefix + name for name in arrays})


def is_base_model(names: Collection[str], architecture: Architecture) -> bool:
    """Returns whether a checkpoint is of a base model alone, by the names of its arrays."""
    wrapped = _wrapper_length(names)
    below = (LANGUAGE_MODEL.sub(r"\1", name[wrapped:]) for name in names)
    return not any(name.startswith(architecture.prefix) for name in below)


def _wrapper_length(names: Collection[str]) -> int:
    """Returns the length of the prefixes of wrappers that all names share."""
    length = 0
    while shared := [prefix for prefix in WRAPPERS if names and all(n.startswith(prefix, length) for n in names)]:
        length += len(shared[0])
    return length


def rename_copies(arrays: StoredArrays, architecture: Architecture, tied: bool) -> StoredArrays:
    """Renames copies whose original is absent; a `tied` head is a copy of the embedding."""
    head = {architecture.head: architecture.shared} if tied and architecture.shared else {}
    names = {name: name for name in arrays}
    for copy, original in {**architecture.copies, **head}.items():
        if copy in arrays and original not in names.values():
            names[copy] = original
    return arrays.renamed(names)
