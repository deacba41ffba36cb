"""Units of bytes, numbers of few digits, and numbers with their noun."""

import math
from typing import Any

KIB, MIB, GIB = 2**10, 2**20, 2**30


def significant(values: Any, digits: int) -> Any:
    """Returns a number, or a list of numbers, rounded to significant digits for JSON.

    Whole numbers below 2^53 are exact; None and non-finite numbers become None.
    """
    if isinstance(values, list):
        return [significant(value, digits) for value in values]
    if values is None or not math.isfinite(values):
        return None
    if float(values).is_integer() and abs(values) < 2**53:
        return int(values)
    return float(f"{values:.{digits}g}")


def two_digits(value: float) -> str:
    """Returns a number for messages, with two significant digits, or rounded to a whole number."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """Returns a number with its noun, such as `1 example` or `1,200 examples`; the plural has an s by default."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"
