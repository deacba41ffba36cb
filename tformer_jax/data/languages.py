"""Codes of languages: ISO 639-1 and 639-3 with script and region, as CLDR, FLORES and corpora write them."""

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

import babel
from babel.core import get_global

from tformer_jax.base.errors import list_names

CODE = re.compile(r"([a-z]{2,3})(?:[-_]([a-z]{4}))?(?:[-_]([a-z]{2}|[0-9]{3}))?", re.IGNORECASE)
SCRIPTS = {"latin": "Latn", "iqtelif": "Latn", "cyrillic": "Cyrl", "devanagari": "Deva"}
"""Scripts by the modifiers of locales of gettext, such as `sr@latin`."""
SIDES = {"src", "trg", "tgt"}
"""Names of the sides of corpora; `src` is also a rare code of ISO 639-3."""


class Language(NamedTuple):
    """A language as CLDR names it."""

    code: str
    """ISO 639-1, or ISO 639-3 for languages without such a code; for `cmn`, its macrolanguage `zh`."""
    script: str | None
    """ISO 15924, such as `Hans`: the written one, or the most likely one; None: unknown."""
    region: str | None
    """ISO 3166-1 or UN M49, if it is written."""
    written: str
    """`code` with the script and region that were written, joined by `_`: a CLDR locale."""


@functools.cache
def read_language(name: str) -> Language | None:
    """Reads a code such as `zh`, `zho_Hans`, `pt-BR` or `deu`, or a name of `english_name`; None for anything else.

    A code that CLDR does not name counts only with its script.
    """
    written, _, modifier = name.lower().partition("@")
    if modifier in SCRIPTS:
        name = re.sub("^[a-z]+", rf"\g<0>_{SCRIPTS[modifier]}", written)
    match = None if name.lower() in SIDES else CODE.fullmatch(name)
    if match is None:
        language, _, details = name.lower().removesuffix(")").partition(" (")
        code = _names().get(name.lower()) or _names().get(language)
        parts = [_details().get(part) for part in details.split(", ")] if details else []
        return read_language("_".join((code, *filter(None, parts)))) if code and all(parts) else None
    code, script, region = match[1].lower(), match[2] and match[2].title(), match[3] and match[3].upper()
    alias, *details = get_global("language_aliases").get(code, code).split("_")
    alias = "nb" if alias == "no" else alias  # CLDR's Norwegian is Bokmål
    for part in details:  # of `sh`, `sr_Latn`, and of `prs`, `fa_AF`
        script, region = (script or part, region) if len(part) == 4 else (script, region or part)
    if alias not in babel.Locale("en").languages and script is None:
        return None
    written = "_".join(filter(None, (alias, script, region)))
    return Language(alias, script or _likely_script(alias, region), region, written)


def _likely_script(code: str, region: str | None) -> str | None:
    likely = get_global("likely_subtags")
    parts = (likely.get(f"{code}_{region}") or likely.get(code) or "").split("_")
    return parts[1] if len(parts) > 1 else None


def describe_unknown(codes: Iterable[str]) -> str:
    """Returns a clause about the codes that no standard names; "" if there are none."""
    unknown = [repr(code) for code in codes if read_language(code.partition("@")[0]) is None]
    return f"no standard names the languages {list_names(unknown, 5)}" if unknown else ""


def english_name(code: str) -> str:
    """Returns the English name of a language, such as `Portuguese (Brazil)` for `pt_BR`; the code if CLDR has none."""
    language, english = read_language(code), babel.Locale("en")
    if language is None or language.code not in english.languages:
        return code
    details = [
        english.scripts.get(part) or english.territories.get(part, part) for part in language.written.split("_")[1:]
    ]
    return english.languages[language.code] + (f" ({', '.join(details)})" if details else "")


@functools.cache
def _names() -> dict[str, str]:
    return {name.lower(): code for code, name in babel.Locale("en").languages.items()}


@functools.cache
def _details() -> dict[str, str]:
    english = babel.Locale("en")
    return {name.lower(): code for code, name in (*english.scripts.items(), *english.territories.items())}
