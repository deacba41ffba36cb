"""The token ids that every tokenizer, model and loss of this package agrees on."""

PAD, BOS, EOS, UNK = range(4)
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")

IGNORED = -1
"""The label of a position that no loss and no metric counts."""
