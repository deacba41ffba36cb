"""Token ids and labels with a fixed meaning in all tokenizers, models and losses."""

PAD, BOS, EOS, UNK = range(4)
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")

IGNORED = -1
"""Label of positions excluded from losses and metrics."""
