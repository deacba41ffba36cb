"""Names of metrics: `chrf`, or `chrf:en-de` and `chrf:to-en` for a direction of translation or a group of them."""

PER_TOKEN = ("loss", "perplexity", "token_accuracy")
"""Metrics of predicted tokens."""
FURTHER = ("chrf++", "ter", "spbleu", "off_target")
"""Metrics of translations that `eval.metrics` adds."""
GENERATED = ("bleu", "chrf", "exact_match", *FURTHER)
"""Metrics of generated texts, compared with references."""
LOWER_IS_BETTER = ("loss", "perplexity", "ter", "off_target", "unknown_outputs")


def base_metric(name: str) -> str:
    """Returns the name of a metric without its direction or group."""
    return name.partition(":")[0]


def group_of_metric(name: str) -> str:
    """Returns the direction or group of a metric; "" if it is the one of all directions."""
    return name.partition(":")[2]


def lower_is_better(name: str) -> bool:
    """Returns whether lower values of a metric are better."""
    return base_metric(name) in LOWER_IS_BETTER
