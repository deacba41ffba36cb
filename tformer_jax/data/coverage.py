"""How well vocabularies cover each language of a corpus."""

import dataclasses
import itertools
from collections.abc import Iterator

from tformer_jax.config.directions import Direction
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.corpora.corpus import spread
from tformer_jax.data.rows import id_reader
from tformer_jax.data.tokenizers import Tokenizers

READ = 300
"""Maximum number of examples of a direction whose tokens are counted, evenly spread."""


@dataclasses.dataclass
class LanguageSummary:
    """The training texts in one language, as sources and as targets; all but `texts` are of those that were read."""

    texts: int = 0
    read: int = 0
    characters: int = 0
    tokens: int = 0
    tokens_per_character: float = 0.0
    unknown: int = 0
    """Number of unknown tokens."""


def summarize_languages(corpus: Corpus, tokenizers: Tokenizers) -> dict[str, LanguageSummary]:
    """Summarizes the training texts of each language; {} if examples have no directions."""
    summaries: dict[str, LanguageSummary] = {}
    sizes = corpus.directions or {}
    reader = id_reader(corpus.train, tokenizers, corpus.labels)
    for first, (direction, size) in zip(itertools.accumulate(sizes.values(), initial=0), sizes.items(), strict=False):
        chosen = [first + index for index in spread(size, READ)]
        block, examples = reader.read(chosen), [corpus.train[index] for index in chosen]
        for key, language in zip(("source", "target"), Direction.parse(direction), strict=True):
            special = (tokenizers.source if key == "source" else tokenizers.target).special
            summary = summaries.setdefault(language, LanguageSummary())
            summary.texts += size
            summary.read += len(chosen)
            summary.characters += sum(len(example[key]) for example in examples)
            summary.tokens += len(block[key].ids)
            summary.unknown += special.count_unknown(block[key].ids.tolist())
    for summary in summaries.values():
        summary.tokens_per_character = summary.tokens / max(summary.characters, 1)
    return dict(sorted(summaries.items()))


def language_lines(summaries: dict[str, LanguageSummary]) -> Iterator[str]:
    """Yields a table of the languages."""
    if summaries:
        yield f"  {'language':8}{'texts':>12}{'tokens/text':>13}{'tokens/character':>18}{'unknown':>10}"
    for language, summary in summaries.items():
        yield (
            f"  {language:8}{summary.texts:12,}{summary.tokens / max(summary.read, 1):13.1f}"
            f"{summary.tokens_per_character:18.2f}{100 * summary.unknown / max(summary.tokens, 1):8.2g} %"
        )
