"""Settings that were changed and have no effect."""

from tformer_jax.config.convert import flat
from tformer_jax.config.schema import SAMPLING, SEARCH, Config

USED_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("data.bucket_lengths", "data.batch_tokens", "data.batch_multiple"), ("data.batching", ("buckets",))
    ),
    **dict.fromkeys(("data.batch_size", "data.window"), ("data.batching", ("windows", "packed"))),
    **dict.fromkeys(("data.source_window", "data.overlong"), ("data.batching", ("packed",))),
    **{f"decode.{name}": ("decode.strategy", ("beam",)) for name in SEARCH},
    **{f"decode.{name}": ("decode.strategy", ("sample",)) for name in SAMPLING},
}
"""The setting on which each of these depends, and its values that use it.

They may be changed with any value of that setting, so that a flag can select another one.
"""


def without_effect(cfg: Config) -> list[str]:
    """Returns one sentence for each setting that differs from its default and has no effect."""
    values, sentences = flat(cfg), []
    for name in filter(USED_BY.__contains__, cfg.changed_settings()):
        switch, users = USED_BY[name]
        if values[switch] not in users:
            sentences.append(f"{name}={values[name]!r} has no effect with {switch}={values[switch]!r}")
    return sentences
