"""Which settings two runs share if their held-out metrics can be compared.

Functions take and return settings by their full names, such as `data.train`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tformer_jax.config import kinds
from tformer_jax.config.metrics import PER_TOKEN, base_metric
from tformer_jax.config.task import task_of_settings

Settings = Mapping[str, Any]

METRIC = ("model.family", "data.objective", "train.metric")
CORPUS = ("data.source", "data.dataset", "data.fields", "data.source_language", "data.target_language")
DIRECTIONS = ("data.directions", "data.both_directions", "data.zero_shot", "data.language_fields")
"""Also of the corpus; runs of earlier versions do not have them."""
HELD_OUT = ("data.languages", "data.validation", "data.test", "data.heldout_examples", "eval.examples")


def difference(a: Settings, b: Settings) -> str | None:
    """Returns why values of `train.metric` cannot be compared between two configs; None if they can."""
    rules = [
        (lambda settings: _named(settings, METRIC), "differs"),
        (held_out_examples, "differs, and with it the held-out examples"),
    ]
    metric = base_metric(a["train.metric"])
    if metric in kinds.METRICS:
        rules.append((references, f"differs, and with it what train.metric={a['train.metric']!r} compares with"))
    if task_of_settings(a).references != "labels" and metric in PER_TOKEN:
        per_token = f"differs, and with it the labels that train.metric={a['train.metric']!r} is averaged over"
        rules += [(target_tokens, per_token), (labels, per_token)]
    for settings_of, consequence in rules:
        mine, theirs = settings_of(a), settings_of(b)
        for name in mine:
            if mine[name] != theirs.get(name):
                return f"{name} {consequence}"
    return None


def held_out_examples(settings: Settings) -> dict[str, Any]:
    """Returns the settings that determine the held-out examples."""
    split = () if settings["data.validation"] else ("data.train", "data.validation_fraction")
    return _named(settings, (*CORPUS, *HELD_OUT, *split)) | {name: settings.get(name) or None for name in DIRECTIONS}


def references(settings: Settings) -> dict[str, Any]:
    """Returns the settings that determine the references of generated texts, and their tokens in BLEU."""
    normalized = ("data.normalize", "decode.detokenize") if settings["eval.references"] == "normalized" else ()
    names = ("eval.references", "eval.bleu_tokenize", "eval.spbleu_model", *normalized)
    return _named(settings, names) | {"eval.command": settings.get("eval.command")}


def target_tokens(settings: Settings) -> dict[str, Any]:
    """Returns what determines the tokens of targets, except the seed, which selects examples of generated corpora.

    It includes the training examples if the tokenizer is trained, or comes with prepared data.
    """
    kind = settings["data.target_tokenizer"] or settings["data.tokenizer"]
    names = ["data.clean_whitespace", "data.normalize", "data.target_language", "data.split_digits"]
    names += ["data.symbols", "data.placeholders", "data.character_coverage", "data.byte_fallback"]
    if kind == "file":
        names.append("data.tokenizer_file")
    elif kind != "bytes":
        names += ["data.vocab_size", "data.shared_vocab", "data.tokenizer_examples", "data.tokenizer_temperature"]
    if settings["data.source"] == "prepared" or kind not in ("bytes", "file"):
        names += [*CORPUS, "data.train"]
    return {"the kind of the target tokenizer": kind} | _named(settings, names)


def labels(settings: Settings) -> dict[str, Any]:
    """Returns what determines which of the held-out examples' target tokens are labels."""
    if settings["data.objective"]:
        noise = (name for name in settings if name.startswith("data.noise."))
        return _named(settings, ("data.objective", "data.window", *noise))
    window = ("data.window",) if settings["model.prefix_lm"] else ()
    return _named(settings, (*task_of_settings(settings).label_settings, *window))


def _named(settings: Settings, names: Sequence[str]) -> dict[str, Any]:
    return {name: settings[name] for name in names}
