"""Reports of runs as self-contained HTML, comparisons of two runs, and pages of attention.

Only `attention` and `explain` import JAX; the other modules read plain files.
"""

from tformer_jax.base import packages


def check_pages_installed(what: str) -> None:
    """Raises `UserError`, which begins with `what`, if a package for pages is not installed."""
    packages.require(what, ("jinja2", "plotly"), "report")
