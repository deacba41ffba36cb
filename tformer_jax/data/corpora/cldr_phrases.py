"""Phrases that CLDR locales share: dates, times, numbers, currencies, units and names, drawn at random."""

import datetime
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import babel
from babel import dates, lists, localedata, numbers, units

Format = Callable[[babel.Locale, Any], str]
Draw = Callable[[random.Random], Any]

Length = Literal["long", "short"]
LENGTHS: tuple[Length, ...] = ("long", "short")

FIRST_DAY = datetime.date(1950, 1, 1)
DAYS = 36_500
SECONDS = (1, 60, 3600, 86_400, 604_800, 2_629_800, 31_557_600)
"""Of a second, a minute, an hour, a day, a week, a month and a year."""
CURRENCIES = (
    *("USD", "EUR", "GBP", "JPY", "CNY", "INR", "CHF", "CAD", "AUD", "SEK", "NOK", "DKK"),
    *("PLN", "CZK", "HUF", "TRY", "BRL", "MXN", "KRW", "ZAR", "RUB", "UAH", "ILS", "THB"),
)
UNITS = (
    *("length-kilometer", "length-meter", "length-centimeter", "length-millimeter", "length-mile", "length-foot"),
    *("length-inch", "mass-kilogram", "mass-gram", "mass-tonne", "mass-pound", "mass-ounce"),
    *("volume-liter", "volume-milliliter", "volume-cubic-meter", "area-square-meter", "area-square-kilometer"),
    *("area-hectare", "speed-kilometer-per-hour", "speed-meter-per-second", "temperature-celsius"),
    *("temperature-fahrenheit", "duration-second", "duration-minute", "duration-hour", "duration-day"),
    *("duration-week", "duration-month", "duration-year", "energy-kilowatt-hour", "energy-kilojoule"),
    *("power-watt", "power-kilowatt", "digital-byte", "digital-kilobyte", "digital-megabyte", "digital-gigabyte"),
    *("digital-terabyte", "frequency-hertz", "electric-volt"),
)
TRIALS = 150
"""Number of values on which a kind of phrase is compared with the kinds before it."""


class Phrase(Sequence[str]):
    """The texts of one phrase, indexed by locale and rendered on access."""

    def __init__(self, locales: Sequence[babel.Locale], render: Format, value: Any):
        self._locales, self._render, self._value = locales, render, value

    def __len__(self) -> int:
        return len(self._locales)

    def __getitem__(self, place):
        return self._render(self._locales[place], self._value)


class PhraseBook:
    """Kinds of phrases with unique translations: no text of the first locale has two translations into another.

    Babel renders each phrase in every locale. A kind is left out if an earlier kind translates one of its texts
    differently: `May 3, 2026` may be both a long and a medium date.
    """

    def __init__(self, locales: Sequence[str], admitted: Sequence[Sequence[int]] | None = None):
        """Tests every kind, or uses the kinds that `admitted` of an equal book lists."""
        self.locales = [babel.Locale.parse(name) for name in locales]
        families = (self._dates, self._times, self._relative, self._numbers, self._money, self._measures, self._names)
        kinds = [family() for family in families]
        taken: dict[str, tuple[str, ...]] = {}
        self.admitted = admitted or [
            [number for number, kind in enumerate(family) if self._admit(taken, *kind)] for family in kinds
        ]
        """The indices of the kinds in use, by family."""
        admitted_families = [[family[i] for i in numbers] for family, numbers in zip(kinds, self.admitted, strict=True)]
        self._families = list(filter(None, admitted_families))

    def phrase(self, draw: random.Random) -> "Phrase":
        """Draws one phrase in every locale."""
        value, render = draw.choice(draw.choice(self._families))
        return Phrase(self.locales, render, value(draw))

    def _admit(self, taken: dict[str, tuple[str, ...]], value: Draw, render: Format) -> bool:
        """Returns whether a kind contradicts no kind before it; if so, adds its texts to `taken`."""
        draw = random.Random(0)
        texts = [tuple(Phrase(self.locales, render, value(draw))) for _ in range(TRIALS)]
        if any(taken.get(text[0], text) != text for text in texts):
            return False
        taken.update((text[0], text) for text in texts)
        return True

    def _dates(self) -> list[tuple[Draw, Format]]:
        styles = [
            lambda locale, day, s=s: dates.format_date(day, s, locale) for s in ("full", "long", "short", "medium")
        ]
        skeletons = [
            lambda locale, day, s=s: dates.format_skeleton(_match("datetime_skeletons", s, locale), day, locale=locale)
            for s in ("MMMMd", "yMMMM", "MMMMEEEEd", "yMd", "yMMMEd")
        ]
        intervals = [
            lambda locale, pair, s=s: dates.format_interval(
                pair[0], pair[1], _match("interval_formats", s, locale), locale=locale
            )
            for s in ("yMMMMd", "MMMMd", "yMMMM")
        ]
        return [(_day, render) for render in styles + skeletons] + [(_days, render) for render in intervals]

    def _times(self) -> list[tuple[Draw, Format]]:
        clock = [lambda locale, time, s=s: dates.format_time(time, s, locale=locale) for s in ("short", "medium")]
        moment = [lambda locale, time, s=s: dates.format_datetime(time, s, locale=locale) for s in ("short", "medium")]
        return [(_moment, render) for render in clock + moment]

    def _relative(self) -> list[tuple[Draw, Format]]:
        return [
            (_delta, lambda locale, delta: dates.format_timedelta(delta, add_direction=True, locale=locale)),
            (_delta, lambda locale, delta: dates.format_timedelta(abs(delta), locale=locale)),
        ]

    def _numbers(self) -> list[tuple[Draw, Format]]:
        return [
            (_amount, lambda locale, n: numbers.format_decimal(n, locale=locale)),
            (_amount, lambda locale, n: numbers.format_percent(n / 10_000, "#,##0.##%", locale=locale)),
            (_big, _compact),
        ]

    def _money(self) -> list[tuple[Draw, Format]]:
        def priced(code: str, form: Any) -> tuple[Draw, Format]:
            draw = _price if numbers.get_currency_precision(code) else _whole_price
            return draw, lambda locale, price: numbers.format_currency(price, code, format_type=form, locale=locale)

        return [priced(code, form) for code in CURRENCIES for form in ("standard", "name")]

    def _measures(self) -> list[tuple[Draw, Format]]:
        def measured(unit: str, length: Length) -> Format:
            return lambda locale, n: _measure(locale, n, unit, length)

        kinds = [(unit, measured(unit, length)) for unit in UNITS for length in LENGTHS]
        named = (render for unit, render in kinds if all(unit not in render(locale, 2) for locale in self.locales))
        return [(_quantity, render) for render in named]

    def _names(self) -> list[tuple[Draw, Format]]:
        territories = self._common("territories", lambda code: len(code) == 2 and code.isalpha())
        languages = self._common("languages", lambda code: len(code) == 2)
        named = [name for name in map(babel.Locale.parse, localedata.locale_identifiers()) if name.territory]
        named = [name for name in named if not name.variant and all(name.get_display_name(to) for to in self.locales)]

        def listed(attribute: str, style: str) -> Format:
            def render(locale, codes):
                names = getattr(locale, attribute)
                return lists.format_list([names[code] for code in codes], style=style, locale=locale)

            return render

        return [
            (_some(territories), listed("territories", "standard")),
            (_some(territories), listed("territories", "or")),
            (_some(languages), listed("languages", "standard")),
            (lambda draw: draw.choice(named), lambda locale, name: name.get_display_name(locale)),
        ]

    def _common(self, attribute: str, wanted: Callable[[str], bool]) -> list[str]:
        """Returns the codes that every locale names, and whose name is unique in the first locale."""
        tables = [getattr(locale, attribute) for locale in self.locales]
        codes = [code for code in sorted(tables[0]) if wanted(code) and all(code in table for table in tables)]
        names = [tables[0][code] for code in codes]
        return [code for code, name in zip(codes, names, strict=True) if names.count(name) == 1]


@functools.cache
def _match(kind: str, skeleton: str, locale: babel.Locale) -> str:
    """Returns the skeleton of a locale that Babel would choose for `skeleton`; Babel searches for it in every call."""
    known = getattr(locale, kind)
    return skeleton if skeleton in known else dates.match_skeleton(skeleton, known) or skeleton


def _compact(locale: babel.Locale, n: int) -> str:
    """Formats a number as `1.2 million`; locales without a long form, such as Chinese, have one short form."""
    form: Literal["long", "short"] = "long" if "long" in locale.compact_decimal_formats else "short"
    return numbers.format_compact_decimal(n, format_type=form, locale=locale, fraction_digits=1)


def _measure(locale: babel.Locale, n: float, unit: str, length: Length) -> str:
    """Formats a quantity as `12 kilometers`, or in the short form if Babel renders the long one as the unit's code."""
    text = units.format_unit(n, unit, length=length, locale=locale)
    return units.format_unit(n, unit, length="short", locale=locale) if unit in text else text


def _day(draw: random.Random) -> datetime.date:
    return FIRST_DAY + datetime.timedelta(days=draw.randrange(DAYS))


def _days(draw: random.Random) -> tuple[datetime.date, datetime.date]:
    first = _day(draw)
    return first, first + datetime.timedelta(days=draw.choice((3, 10, 40, 200, 400)) + draw.randrange(20))


def _moment(draw: random.Random) -> datetime.datetime:
    return datetime.datetime.combine(_day(draw), datetime.time()) + datetime.timedelta(seconds=draw.randrange(86_400))


def _delta(draw: random.Random) -> datetime.timedelta:
    seconds = draw.choice(SECONDS)
    return datetime.timedelta(seconds=seconds * draw.randint(1, 30) * draw.choice((-1, 1)))


def _amount(draw: random.Random) -> float:
    return draw.randrange(10 ** draw.randint(1, 6)) + draw.choice((0, draw.randrange(1, 1000) / 1000))


def _big(draw: random.Random) -> int:
    """Draws a number with two significant digits, which no locale's grouping rounds away."""
    return draw.randrange(1, 100) * 10 ** draw.randint(3, 10)


def _whole_price(draw: random.Random) -> int:
    return draw.randrange(10 ** draw.randint(1, 5))


def _price(draw: random.Random) -> float:
    return _whole_price(draw) + draw.choice((0, draw.randrange(1, 100) / 100))


def _quantity(draw: random.Random) -> float:
    return draw.randrange(1, 10 ** draw.randint(1, 3)) + draw.choice((0, 0, draw.randrange(1, 10) / 10))


def _some(codes: Sequence[str]) -> Draw:
    return lambda draw: [draw.choice(codes) for _ in range(draw.randint(1, 3))]
