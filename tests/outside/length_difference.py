from tformer_jax.config import kinds


@kinds.declares(lower_is_better=True)
def length_difference(sources, outputs, references):
    """By how many characters the length of each output differs from the nearest reference's."""
    pairs = zip(outputs, references, strict=True)
    return [min(abs(len(output) - len(text)) for text in each) for output, each in pairs]


kinds.METRICS["length_difference"] = length_difference
