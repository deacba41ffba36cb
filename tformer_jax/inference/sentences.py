"""Sentences of texts."""

from tformer_jax.base.checks import import_extra


def split_sentences(text: str, language: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the sentences of a text, and the white space before, between and after them.

    A text with at most one sentence is returned as it is.

    Args:
        language: code of ISO 639; texts of others than the about 300 of sentencex are split as English.
    """
    segment = import_extra("decode.split_sentences", "sentencex", "sentences").segment
    sentences: list[str] = []
    gaps = [""]
    for part in segment(language, text):
        sentence = part.strip()
        before, _, after = part.partition(sentence) if sentence else (part, "", "")
        gaps[-1] += before
        if sentence:
            sentences.append(sentence)
            gaps.append(after)
    return (tuple(sentences), tuple(gaps)) if len(sentences) > 1 else ((text,), ("", ""))
