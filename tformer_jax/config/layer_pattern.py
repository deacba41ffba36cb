"""Checks of `model.layer_pattern`; `cfg` is a `ModelConfig`."""

from typing import Any

from tformer_jax.config import kinds


def check_layer_pattern(cfg: Any) -> None:
    """Raises `ConfigError` for layers that do not fit the other settings, or settings that no layer uses."""
    if not cfg.layer_pattern:
        raise cfg.error("layer_pattern", "must name at least one layer, such as ('full',)")
    for layer in {*cfg.layer_pattern} & {*kinds.ATTENTIONS}:
        if not kinds.is_recurrent(layer):
            raise cfg.error("layer_pattern", f"{layer!r} is no recurrence; write 'full', and model.attention={layer!r}")
    if cfg.attention not in cfg.attentions:
        raise cfg.error(
            "layer_pattern",
            f"no layer uses model.attention={cfg.attention!r}; set model.attention={cfg.attentions[0]!r}",
        )
    deepest = max(cfg.depths)
    if deepest and (unused := {*cfg.layer_pattern[deepest:]} - {*cfg.layer_pattern[:deepest]}):
        raise cfg.error("layer_pattern", f"no stack reaches {min(unused)!r} in {deepest} layers; shorten the pattern")
    if "window" in cfg.layer_pattern and cfg.window is None:
        raise cfg.error("window", "must be a number of tokens where model.layer_pattern has 'window' layers")
    if cfg.window is not None and "window" not in cfg.layer_pattern:
        raise cfg.error("window", "no layer uses it; write 'window' in model.layer_pattern")
    at_scores = getattr(kinds.load(kinds.POSITIONS, cfg.position), "at_scores", False)
    if "nope" in cfg.layer_pattern and not at_scores:
        raise cfg.error(
            "layer_pattern", f"'nope' has no effect with model.position={cfg.position!r}; write 'full' there"
        )
    if "nope" in cfg.layer_pattern and not {"full", "window"} & {*cfg.layer_pattern}:
        raise cfg.error(
            "layer_pattern",
            f"no layer uses model.position={cfg.position!r}; write model.position='none', and 'full' here",
        )
