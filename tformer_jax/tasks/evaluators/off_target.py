"""Outputs in another language than the target's, identified by lingua."""

from collections.abc import Iterable, Sequence
from importlib import metadata

from tformer_jax.base import packages
from tformer_jax.data.languages import read_language


class LanguageIdentifier:
    """Identifies texts as one of several languages, without the network.

    Scripts and regions do not count: `zh_Hans` and `zh_Hant` are one language.

    Raises:
        UserError: lingua is not installed.
    """

    def __init__(self, languages: Iterable[str]):
        packages.require("off_target", ("lingua",), "languages")
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
        found = self._detector.detect_languages_in_parallel_of(list(texts))
        return [None if language is None else self._codes[language] for language in found]


def language_code(name: str) -> str:
    """Returns the code of a language without script and region."""
    language = read_language(name)
    return language.code if language else name


def off_target_percentage(languages: Sequence[str | None], target: str) -> float:
    """Returns the percentage of outputs that are identified as another language than the target's."""
    wrong = sum(language not in (None, language_code(target)) for language in languages)
    return 100 * wrong / len(languages)
