"""Formulas as MathML, which browsers draw without a library."""

import re
from html import escape

_SCRIPT = r"(?:\{([^}]*)\}|(\w+))"
_TERM = re.compile(
    rf"([^\W\d_]+|\d+(?:[.,]\d+)*|[^\w\s])(?:_{_SCRIPT})?(?:\^{_SCRIPT})?|(?<=[\w}}])(\s+)(?=[^\W_])|\s+"
)


class Math(str):
    """A piece of MathML."""


def formula(*parts: str) -> Math:
    """Returns a displayed formula; see `row`."""
    return Math(f'<math display="block">{row(*parts)}</math>')


def row(*parts: str) -> Math:
    """Joins pieces of MathML and plain text such as `softmax(q_t k_{s,n}^T)`: names, numbers and operators."""
    pieces = (part if isinstance(part, Math) else "".join(map(_term, _TERM.finditer(part))) for part in parts)
    return Math(f"<mrow>{''.join(pieces)}</mrow>")


def fraction(above: str, below: str) -> Math:
    """Returns `above / below` as a fraction."""
    return Math(f"<mfrac>{row(above)}{row(below)}</mfrac>")


def brackets(*parts: str) -> Math:
    """Encloses pieces in parentheses as high as they are."""
    return Math(f"<mrow><mo>(</mo>{row(*parts)}<mo>)</mo></mrow>")


def root(inside: str) -> Math:
    """Returns a square root."""
    return Math(f"<msqrt>{row(inside)}</msqrt>")


def power(base: str, exponent: str) -> Math:
    """Returns a power whose exponent may be any piece."""
    return Math(f"<msup>{row(base)}{row(exponent)}</msup>")


def total(below: str, summand: str) -> Math:
    """Returns a sum, with its index below the sign."""
    return Math(f"<mrow><munder><mo>∑</mo>{row(below)}</munder>{row(summand)}</mrow>")


def _term(match: re.Match[str]) -> str:
    base, *scripts, space = match.groups()
    if base is None:
        return '<mspace width="0.2em"/>' if space else ""
    below, above = scripts[0] or scripts[1], scripts[2] or scripts[3]
    if below and above:
        return f"<msubsup>{_symbol(base)}{row(below)}{row(above)}</msubsup>"
    if below or above:
        name = "msub" if below else "msup"
        return f"<{name}>{_symbol(base)}{row(below or above)}</{name}>"
    return _symbol(base)


def _symbol(text: str) -> str:
    if text.isalpha() or text[0].isdigit():
        name = "mi" if text.isalpha() else "mn"
        return f"<{name}>{text}</{name}>"
    return f'<mo stretchy="false">{escape({"-": "−"}.get(text, text))}</mo>'
