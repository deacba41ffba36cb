"""Characters of texts: white space, invisible characters, and frequent ones."""

import collections
import functools
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

Ranges = Sequence[tuple[int, int]]

SPACES: Ranges = (
    *((0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
"""White space, ends of lines and separators: the characters for which `str.isspace` is true."""
REMOVED: Ranges = (
    *((0x00, 0x08), (0x0E, 0x1B), (0x7F, 0x84), (0x86, 0x9F), (0xAD, 0xAD), (0x034F, 0x034F), (0x061C, 0x061C)),
    *((0x200B, 0x200B), (0x200E, 0x200F), (0x202A, 0x202E), (0x2060, 0x2064), (0x2066, 0x206F), (0xFEFF, 0xFEFF)),
    *((0xFFF9, 0xFFFB), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A)),
)
"""Control characters, soft hyphens, zero-width spaces, byte order marks, bidirectional and other format characters."""
JOINERS: Ranges = ((0x180E, 0x180E), (0x200C, 0x200D))
"""Zero-width joiners and non-joiners, and Mongolian's vowel separator."""
JOINED: Ranges = (
    *((0x0600, 0x0DFF), (0x0F00, 0x109F), (0x1780, 0x180D), (0x180F, 0x18AF), (0x1A20, 0x1AAF), (0x1B00, 0x1C4F)),
    *((0xA800, 0xABFF), (0xFB50, 0xFDFF), (0xFE70, 0xFEFC), (0x10A00, 0x11FFF), (0x1E900, 0x1E95F)),
    *((0x2190, 0x2BFF), (0x3030, 0x303D), (0x3297, 0x3299), (0x1F000, 0x1FAFF)),
)
"""Scripts whose spelling needs joiners (Arabic, Syriac, N'Ko, scripts of India and Southeast Asia), symbols, emoji."""
EMOJI_STYLE: Ranges = ((0xFE0F, 0xFE0F),)
VIRAMAS: Ranges = tuple(
    (code, code)
    for code in (
        *(0x094D, 0x09CD, 0x0A4D, 0x0ACD, 0x0B4D, 0x0BCD, 0x0C4D, 0x0CCD, 0x0D4D, 0x0DCA, 0x0F84, 0x1039, 0x103A),
        *(0x17D2, 0x1A60, 0x1B44, 0x1BAA, 0x1BAB, 0xA806, 0xA8C4, 0xA953, 0xA9C0, 0xAAF6, 0xABED),
    )
)
"""Signs after which a joiner may end a word."""
TAGS: Ranges = ((0xE0000, 0xE007F),)
FLAG: Ranges = ((0x1F3F4, 0x1F3F4),)
"""The emoji that tags follow, as in the flag of Scotland."""
FILLERS = "\u115f\u1160\u2800\u3164\uffa0"
"""Letters and symbols without a shape."""
UNSPACED = (
    "\u0e00-\u0fff\u1000-\u11ff\u1780-\u17ff\u3005-\u3007\u3040-\u31ff\u3400-\u9fff\uac00-\ud7ff\uf900-\ufaff"
    "\uff66-\uffdc\U00020000-\U0003ffff"
)
"""Scripts that put no spaces around words, or, as in Korean, join particles to them."""
SIGNS = (
    "\u0300-\u036f\u0483-\u0487\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u064b-\u065f\u0670"
    "\u06d6-\u06dc\u06df-\u06e8\u06ea-\u06ed\u0711-\u07f3\u07fd\u0816-\u082d\u0859-\u085b\u0898-\u08e1\u08e3-\u0963"
    "\u0981-\u09e3\u09fe-\u0a75\u0a81-\u0ae3\u0afa-\u0b63\u0b82-\u0bd7\u0c00-\u0c63\u0c81-\u0c83\u0cbc-\u0d4d"
    "\u0d57-\u0d63\u0d81-\u0df3\u0e31-\u0e3a\u0e47-\u0e4e\u0eb1-\u0ebc\u0ec8-\u0ece\u0f71-\u0f84\u102b-\u103e"
    "\u135d-\u135f\u1712-\u1734\u1752-\u1773\u17b4-\u17d3\u180b-\u193b\u1a17-\u1a1b\u1a55-\u1a7f\u1ab0-\u1abd"
    "\u1abf-\u1b44\u1b6b-\u1b73\u1b80-\u1bf3\u1c24-\u1c37\u1cd0-\u1cd2\u1cd4-\u1dff\u200c\u200d\u2cef-\u2cf1"
    "\u2d7f-\u2dff\u302a-\u302f\ua66f\ua674-\ua67d\ua69e-\ua6f1\ua802-\ua827\ua82c\ua880-\ua8c5\ua8e0-\ua8f1"
    "\ua8ff-\ua92d\ua947-\ua953\ua980-\ua9c0\ua9e5-\uaa4d\uaa7b-\uaac1\uaaeb-\uaaef\uaaf5\uaaf6\uabe3-\uabea\uabec"
    "\uabed\ufb1e\ufe20-\ufe2f\U00010376-\U0001037a\U00010a01-\U00010a3f\U00010ae5\U00010ae6\U00010d24-\U00010d27"
    "\U00010eab\U00010eac\U00010efd-\U00010eff\U00010f46-\U00010f50\U00010f82-\U00010f85\U00011000-\U00011046"
    "\U00011070-\U000110ba\U000110c2\U00011100-\U00011134\U00011145-\U00011173\U00011180-\U000111c0"
    "\U000111c9-\U000111cc\U000111ce\U000111cf\U0001122c-\U00011237\U0001123e-\U00011241\U000112df-\U00011374"
    "\U00011435-\U00011446\U0001145e-\U000114c3\U000115af-\U000115c0\U000115dc-\U00011640\U000116ab-\U000116b7"
    "\U0001171d-\U0001172b\U0001182c-\U0001183a\U00011930-\U00011943\U000119d1-\U000119e0\U000119e4-\U00011a3e"
    "\U00011a47-\U00011a99\U00011c2f-\U00011c3f\U00011c92-\U00011cb6\U00011d31-\U00011d97\U00011ef3-\U00011ef6"
    "\U00011f00-\U00011f42\U00013440-\U00013455\U00016af0-\U00016af4\U00016b30-\U00016b36\U00016f4f-\U00016f92"
    "\U00016fe4-\U00016ff1\U0001bc9d\U0001bc9e\U0001e000-\U0001e02a\U0001e08f\U0001e130-\U0001e136"
    "\U0001e2ae-\U0001e2ef\U0001e4ec-\U0001e4ef\U0001e8d0-\U0001e94a"
)
r"""Combining marks, such as vowel signs, and joiners, with letters between them; the regular expression `\w` has only
letters."""
LETTER = rf"(?:(?![{UNSPACED}])[\w{SIGNS}])"
"""Letters, digits, underscores and combining marks of other scripts: a word there begins and ends where none of these
is adjacent."""
CACHED_PATTERNS = 4096
INVISIBLE = {"Cc", "Cf", "Mc", "Me", "Mn", "Zl", "Zp", "Zs"}
"""Unicode categories of control and format characters, combining marks and separators."""


@functools.lru_cache(CACHED_PATTERNS)
def whole_words(phrases: tuple[str, ...]) -> re.Pattern[str]:
    """Returns the pattern of any of the phrases as whole words, longer ones first."""

    def whole(phrase: str) -> str:
        before = f"(?<!{LETTER})" if re.match(LETTER, phrase) else ""
        after = f"(?!{LETTER})" if re.match(LETTER, phrase[-1]) else ""
        return before + re.escape(phrase) + after

    return re.compile("|".join(whole(phrase) for phrase in sorted(phrases, key=len, reverse=True)))


def rules(escape: Callable[[int], str]) -> list[tuple[str, str]]:
    """Returns the regular expressions and replacements that, in order, clean a text up to spaces at its ends.

    Args:
        escape: writes a code point within brackets in the syntax of the library that compiles the expressions.
    """

    def letters(*groups: Ranges) -> str:
        return "".join(f"{escape(first)}-{escape(last)}" for group in groups for first, last in group)

    joiner = f"[{letters(JOINERS)}]"
    return [
        (f"[{letters(REMOVED)}]+", ""),
        (f"(?<![{letters(FLAG, TAGS)}])[{letters(TAGS)}]+", ""),
        (f"(?<![{letters(JOINED, EMOJI_STYLE)}]){joiner}+", ""),
        (f"(?<![{letters(VIRAMAS)}]){joiner}(?![{letters(JOINED)}])", ""),
        (f"[{letters(SPACES)}]+", " "),
    ]


_RULES = [(re.compile(pattern), replacement) for pattern, replacement in rules("\\U{:08x}".format)]
GRAPHEME_JOINER = "\u034f"
"""The only character but the space that the rules change and `str.isprintable` accepts."""


def clean_whitespace(text: str) -> str:
    """Returns a text as one line of words with single spaces between them.

    White space of any kind and length becomes a space, none at the ends. Control characters, soft hyphens, zero-width
    spaces and bidirectional marks are removed, and so are joiners (U+200C, U+200D) except where spelling needs them
    (Unicode Standard Annex 31, section 2.3, simplified) and within emoji. The result is its own result.
    """
    if text.isprintable() and GRAPHEME_JOINER not in text and "  " not in text and text == text.strip(" "):
        return text  # most texts, in a tenth of the time
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text.strip(" ")


def is_blank(text: str) -> bool:
    """Returns whether a text has no visible character: only white space, control and format characters, and marks."""
    if text[:1].isascii() and text[:1].isalnum():  # most texts, in a tenth of the time
        return False
    return all(unicodedata.category(c) in INVISIBLE or c in FILLERS for c in text)


def frequent_characters(texts: Iterable[str], coverage: float) -> list[str]:
    """Returns the fewest characters that make up a fraction of the characters of texts, by code point.

    Of equally frequent characters, the one with the smaller code point comes first.
    """
    counts = collections.Counter(itertools.chain.from_iterable(texts))
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    covered = itertools.accumulate(counts[character] for character in ranked)
    enough = sum(1 for count in covered if count < coverage * counts.total()) + 1
    return sorted(ranked[:enough])
