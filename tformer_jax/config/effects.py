"""Warnings about combinations of settings: some have no effect, others an unwanted one."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tformer_jax.config.training import WITH_AN_END

if TYPE_CHECKING:
    from tformer_jax.config.schema import Config


def without_effect(cfg: "Config") -> list[str]:
    """Returns one sentence for each setting that has no effect, or an unwanted one, with the other settings."""
    return [*_data(cfg), *_generation(cfg), *_model(cfg), *_schedule(cfg)]


def _data(cfg: "Config") -> Iterator[str]:
    if cfg.model.family == "seq2seq" and not cfg.data.objective:
        yield from _languages(cfg)
        return
    if cfg.data.long_pairs != "drop":
        yield f"data.long_pairs={cfg.data.long_pairs!r} has no effect without translation"
    if not cfg.data.shared_vocab:
        yield "data.shared_vocab=False has no effect without translation"
    unused = ("target_language",) if cfg.data.normalize else ("source_language", "target_language")
    for name in unused:
        if name in cfg.data.changed_settings():
            yield f"data.{name}={getattr(cfg.data, name)!r} has no effect without translation"


def _languages(cfg: "Config") -> Iterator[str]:
    """Says which language is assumed where the data does not name one."""
    unnamed = cfg.data.source in ("tsv", "jsonl", "parquet") and "target_language" not in cfg.data.changed_settings()
    users = ["BLEU"] if cfg.eval.bleu_tokenize is None else []
    users += ["Moses' rules"] if {"moses", "punctuation"} & {*cfg.data.normalize} else []
    if unnamed and users:
        yield (
            f"data.target_language={cfg.data.target_language!r} is the default and decides for "
            f"{' and '.join(users)}: set it to the language of the targets"
        )


def _generation(cfg: "Config") -> Iterator[str]:
    if cfg.model.family in ("seq2seq", "decoder_lm") and not cfg.data.objective:
        return
    trained = f"data.objective={cfg.data.objective!r}" if cfg.data.objective else f"model.family={cfg.model.family!r}"
    for name in cfg.decode.changed_settings():
        yield f"decode.{name}={getattr(cfg.decode, name)!r} has no effect with {trained}"
    if cfg.data.objective and "samples" in cfg.eval.changed_settings():
        yield f"eval.samples={cfg.eval.samples} has no effect with {trained}"


def _model(cfg: "Config") -> Iterator[str]:
    model, moe = cfg.model, cfg.model.moe
    if model.ffn == "moe" and moe.router_normalize and moe.experts_per_token == 1 < moe.num_experts:
        yield (
            "model.moe.router_normalize=True with model.moe.experts_per_token=1 gives each expert a weight of 1, "
            "so that the loss does not train the router; write False"
        )
    if model.scan_layers and max(model.depths) < 2 * model.period:
        yield f"model.scan_layers=True has no effect, because no stack repeats its first {model.period} layers"


def _schedule(cfg: "Config") -> Iterator[str]:
    if cfg.optim.schedule in WITH_AN_END and cfg.optim.warmup_steps >= cfg.train.steps:
        yield (
            f"optim.schedule={cfg.optim.schedule!r} has no effect, because optim.warmup_steps="
            f"{cfg.optim.warmup_steps} is not below train.steps={cfg.train.steps}"
        )
