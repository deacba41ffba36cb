"""Outputs in another language than the target's, identified by lingua."""

import collections
import functools
import statistics
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

from tformer_jax.base import checks
from tformer_jax.config.metrics import Metric, References
from tformer_jax.data.languages import read_language


class LanguageIdentifier:
    """Identifies texts as one of several languages, without the network.

    Scripts and regions do not count: `zh_Hans` and `zh_Hant` are one language.

    Raises:
        UserError: lingua is not installed.
    """

    def __init__(self, languages: Iterable[str]):
        checks.require("off_target", ("lingua",), "languages")
        import lingua

        spoken = {language_code(language.iso_code_639_1.name): language for language in lingua.Language.all()}
        codes = dict.fromkeys(map(language_code, languages))
        self._codes = {spoken[code]: code for code in codes if code in spoken}
        self.unknown = ", ".join(code for code in codes if code not in spoken)
        """Languages that lingua does not know."""
        version, names = metadata.version("lingua-language-detector"), ",".join(self._codes.values())
        self.signature = f"lingua:{version}|languages:{names}"
        """What determines the results."""
        if len(self._codes) > 1:
            self._detector = lingua.LanguageDetectorBuilder.from_languages(*self._codes).build()

    def knows(self, language: str) -> bool:
        """Returns whether texts can be identified as `language`, and as another one."""
        return language_code(language) in self._codes.values() and len(self._codes) > 1

    def identify(self, texts: Sequence[str]) -> list[str | None]:
        """Returns the language code of each text; None for a text without words."""
        languages = self._detector.detect_languages_in_parallel_of(list(texts))
        return [None if language is None else self._codes[language] for language in languages]


_identifier_of = functools.cache(LanguageIdentifier)


def language_code(name: str) -> str:
    """Returns the code of a language without script and region."""
    language = read_language(name)
    return language.code if language else name


class OffTarget(Metric):
    """The percentage of outputs that are identified as another language than the target's."""

    lower_is_better, by_language = True, True
    bounds = (0.0, 100.0)

    def __init__(self, evaluation: Any, language: str, languages: Sequence[str] = ()):
        super().__init__(evaluation, language, languages)
        self._identifier = _identifier_of(tuple(languages))
        self.signature = self._identifier.signature

    @property
    def applies(self) -> bool:
        return self._identifier.knows(self.language)

    def score_texts(self, sources: Sequence[str], outputs: Sequence[str], references: References) -> Sequence[float]:
        expected = (None, language_code(self.language))
        return [100.0 * (language not in expected) for language in self._identifier.identify(outputs)]

    def remarks(self, references: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        """Returns sentences about the languages that are left out, and about the errors of the identification."""
        unknown, by_language = self._identifier.unknown, collections.defaultdict(list)
        wrong: list[float] = []
        for language, text in references:
            by_language[language].append(text)
        for language, texts in by_language.items():
            metric = OffTarget(self.evaluation, language, self.languages)
            wrong += metric.score_texts((), texts, ()) if metric.applies else ()
        sentences = [f"off_target leaves out languages that lingua does not know: {unknown}"] if unknown else []
        if wrong:
            sentences.append(f"of the references themselves, {statistics.fmean(wrong):.3g} % are off-target for lingua")
        return tuple(sentences)
