"""Reads and writes the decoding settings of a checkpoint: `generation_config.json`, or the fields of `config.json`."""

from pathlib import Path

from tformer_jax.base.errors import UserError
from tformer_jax.base.json_files import read_json
from tformer_jax.config import DecodeConfig, ModelConfig
from tformer_jax.interop.architecture import Settings
from tformer_jax.special_tokens import SpecialTokens

NEUTRAL: Settings = {
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "typical_p": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "begin_suppress_tokens": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": None,
    "penalty_alpha": None,
    "remove_invalid_values": False,
    "sequence_bias": None,
    "top_h": None,
    "token_healing": False,
    "dola_layers": None,
    "force_words_ids": None,
    "constraints": None,
    "watermarking_config": None,
    "max_time": None,
}
"""Settings that this package does not have, and their neutral values."""
READ = frozenset(
    (
        *("max_new_tokens", "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "stop_strings"),
        *("num_beams", "length_penalty", "early_stopping", "renormalize_logits"),
        *("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "suppress_tokens"),
    )
)
"""Settings that are read, here or with the tokenizer, besides `SAMPLING` and `LENGTHS`."""
IRRELEVANT = frozenset(
    (
        *(f"{name}_token_id" for name in ("pad", "bos", "eos", "decoder_start")),
        *("transformers_version", "_from_model_config", "use_cache", "cache_implementation", "cache_config"),
        *("max_cache_len", "compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size"),
        *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
        *("num_return_sequences", "low_memory", "return_legacy_cache"),
        *("is_assistant", "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight"),
        *("assistant_lookbehind", "target_lookbehind", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "use_mtp"),
    )
)
"""Fields of `generation_config.json` that do not change the best output: token ids (read from tokenizers), caches, the
form of results, and speculative decoding."""
SAMPLING: Settings = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None}
"""Settings of sampling, and their defaults in transformers, where beam search may sample; here it does not."""

LENGTHS: Settings = {"min_length": 0, "max_length": 20}
"""Lengths that include the prompt, and their defaults in transformers; our limits exclude the prompt, except the
model's maximum length."""
STOPPING = {True: "first", False: "heuristic", "never": "never"}
"""Our `early_stopping` by theirs."""


def read_decoding(folder: Path, config: Settings, cfg: ModelConfig) -> tuple[DecodeConfig, list[str]]:
    """Returns the decoding settings of a checkpoint, and the settings that are not applied, as `name=value`.

    Raises:
        UserError: `generation_config.json` is damaged, or a value is out of range.
    """
    try:
        return _read_settings(folder, config, cfg)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{folder}: a decoding setting has the wrong type or value: {error}") from error


def forced_first(folder: Path, config: Settings) -> int:
    """Returns the id of the token with which outputs of a checkpoint start; -1: the model chooses it."""
    given = (read_json(folder / "generation_config.json", {}) or config).get("forced_bos_token_id")
    return given if isinstance(given, int) else -1


def _read_settings(folder: Path, config: Settings, cfg: ModelConfig) -> tuple[DecodeConfig, list[str]]:
    own = read_json(folder / "generation_config.json", {})
    given = {k: v for k, v in (own or config).items() if v is not None}
    unapplied = _differing_settings(given, NEUTRAL)
    if not cfg.model_class.reads_source:  # transformers forces it after a prompt of one token alone
        unapplied += _differing_settings(given, {"forced_bos_token_id": None})
    given, unforced = _without_unforced_end(given, config, cfg)
    unapplied += unforced
    sequences = [words for words in given.get("bad_words_ids", ()) if len(words) > 1]
    if sequences:
        unapplied.append(f"bad_words_ids={sequences!r}")
    if cfg.model_class.continues:
        lengths = {name: v for name, v in LENGTHS.items() if not given.get(name.replace("length", "new_tokens"))}
        if given.get("max_length", 0) >= cfg.max_length:
            lengths.pop("max_length", None)
        unapplied += _differing_settings(given, lengths)
    shortest, longest = _new_token_limits(given, cfg)
    stop = given.get("stop_strings", ())
    settings: Settings = {
        "min_new_tokens": shortest,
        "max_new_tokens": longest,
        "repetition_penalty": float(given.get("repetition_penalty", 1.0)),
        "no_repeat_ngram": given.get("no_repeat_ngram_size", 0),
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
    }
    chosen, left = _strategy_settings(given)
    unapplied += left
    unknown = own.keys() - READ - IRRELEVANT - NEUTRAL.keys() - SAMPLING.keys() - LENGTHS.keys()
    unapplied += [f"{name}={own[name]!r}" for name in sorted(unknown) if own[name] not in (None, False)]
    return DecodeConfig(**settings, **chosen), unapplied


def _without_unforced_end(given: Settings, config: Settings, cfg: ModelConfig) -> tuple[Settings, list[str]]:
    """Removes a `forced_eos_token_id` that is not applied; returns it as `name=value`, if there is one.

    It does not end outputs, or leaves no token before it. Without `eos_token_id`, it is taken for the token that ends
    them.
    """
    ends, forced = (
        {*value} if isinstance(value, list) else {value}
        for value in (given.get("eos_token_id", config.get("eos_token_id")), given.get("forced_eos_token_id"))
    )
    is_end = forced <= {None, *ends} or ends == {None}
    if forced == {None} or (is_end and _longest(given, cfg) > 1):
        return given, []
    name = "forced_eos_token_id"
    return {key: value for key, value in given.items() if key != name}, [f"{name}={given[name]!r}"]


def _strategy_settings(given: Settings) -> tuple[Settings, list[str]]:
    """Returns the settings of the decoding strategy, and the given settings that are not applied, as `name=value`."""
    sampling = _differing_settings(given, SAMPLING)
    if given.get("num_beams", 1) > 1:
        penalty = {"length_penalty": given.get("length_penalty", 1.0)}
        refused = penalty if penalty["length_penalty"] < 0 else {}
        left = [f"{name}={value!r}" for name, value in refused.items()]
        if "forced_eos_token_id" in given:  # here the last token of such outputs has no score, and no beam waits for it
            left.append(f"forced_eos_token_id={given['forced_eos_token_id']!r} (only outputs at the limit may differ)")
        return _beam_settings(given | dict.fromkeys(refused, 0.0)), left + (sampling if given.get("do_sample") else [])
    if not given.get("do_sample"):
        return {}, []
    if given.get("temperature") == 0:  # which transformers refuses; greedy decoding is its limit
        return {}, sampling
    return _sampling_settings(given), []


def _differing_settings(given: Settings, defaults: Settings) -> list[str]:
    """Returns the settings that differ from the defaults, as `name=value`."""
    return [f"{name}={given[name]!r}" for name, value in defaults.items() if given.get(name, value) != value]


def _new_token_limits(given: Settings, cfg: ModelConfig) -> tuple[int, int | None]:
    """Returns the minimum and maximum number of new tokens; their `_length` counts the decoder's inputs as well.

    The maximum is None where only the model limits outputs.
    """
    longest = _longest(given, cfg) - ("forced_eos_token_id" in given)  # their last token is always EOS
    least = given.get("min_length", 0) - 1 if cfg.model_class.reads_source else 0
    shortest = given.get("min_new_tokens") or least
    return min(max(shortest, 0), longest), longest if longest < cfg.max_length else None


def _longest(given: Settings, cfg: ModelConfig) -> int:
    """Returns the maximum number of new tokens, with a last one that is forced."""
    room = cfg.max_length
    most = given.get("max_length", room + 1) - 1 if cfg.model_class.reads_source else room
    return max(min(given.get("max_new_tokens") or most, room), 1)


def _beam_settings(given: Settings) -> Settings:
    return {
        "strategy": "beam",
        "beams": given["num_beams"],
        "length_alpha": float(given.get("length_penalty", 1.0)),
        "early_stopping": STOPPING.get(given.get("early_stopping", False), "never"),
        "renormalize": bool(given.get("renormalize_logits", False)),
    }


def _sampling_settings(given: Settings) -> Settings:
    """Returns the settings of sampling; transformers samples from the 50 most probable tokens by default."""
    return {
        "strategy": "sample",
        "temperature": float(given.get("temperature", 1.0)),
        "top_k": given.get("top_k", 50) or None,
        "top_p": float(given.get("top_p", 1.0)),
        "min_p": float(given.get("min_p", 0.0)),
    }


def suppressed_fields(special: SpecialTokens, tokens: int, V: int) -> Settings:
    """Returns the fields about tokens that are never generated, given the sizes of the tokenizer and the model."""
    words = [[token] for token in special.suppressed if token < tokens]
    padding = [token for token in range(tokens, V) if token not in special.eos]
    return ({"bad_words_ids": words} if words else {}) | ({"suppress_tokens": padding} if padding else {})


WORKFLOW = ("candidates", "glossary", "split_sentences", "context", "markup", "casing")
"""Settings of what surrounds the decoding of a text, which only this package has."""


def generation_fields(cfg: DecodeConfig, model: ModelConfig) -> tuple[Settings, list[str]]:
    """Returns the fields of `generation_config.json`, and the settings that it cannot hold, as `decode.name=value`.

    If only the model limits outputs, writes transformers' `max_length`, which counts the decoder's inputs and the last
    output token.
    """
    longest = cfg.max_new_tokens
    fits = longest is not None and longest < model.max_length
    most = model.max_length + int(model.model_class.reads_source)
    fields: Settings = {
        "do_sample": cfg.strategy == "sample",
        "num_beams": cfg.width,
        "min_new_tokens": cfg.min_new_tokens,
        **({"max_new_tokens": longest} if fits else {"max_length": most}),
        "repetition_penalty": cfg.repetition_penalty,
        "no_repeat_ngram_size": cfg.no_repeat_ngram,
    }
    if cfg.stop:
        fields["stop_strings"] = list(cfg.stop)
    lacking = ["forbidden", "prefix", "unknown", "detokenize", *WORKFLOW]
    if cfg.strategy == "beam":
        early = next(theirs for theirs, ours in STOPPING.items() if ours == cfg.early_stopping)
        fields |= {"length_penalty": cfg.length_alpha, "early_stopping": early}
        fields |= {"renormalize_logits": True} if cfg.renormalize else {}
        lacking.insert(0, "length_penalty")
    if cfg.strategy == "sample":
        top_p = 1.0 if cfg.top_p is None else cfg.top_p
        fields |= {"temperature": cfg.temperature, "top_k": cfg.top_k or 0, "top_p": top_p, "min_p": cfg.min_p}
    values = {name: getattr(cfg, name) for name in lacking}
    return fields, [f"decode.{k}={v!r}" for k, v in values.items() if v != getattr(DecodeConfig, k)]
