"""Renders a report as one HTML file that needs no network."""

import base64
import datetime
import functools
import gzip
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from tformer_jax.report import charts, matrices, sections
from tformer_jax.report.comparison import compare_runs
from tformer_jax.report.corpus import corpus_tables
from tformer_jax.report.run import RunFiles

SCRIPTS = {
    "report": ("page.js", "report.js"),
    "attention": ("page.js", "heat.js", "attention.js"),
    "explain": ("page.js", "heat.js", "explain.js"),
}
"""Scripts of each page, in order."""


def render_report(runs: Sequence[RunFiles], *, refresh: int | None = None) -> str:
    """Returns the report of one or several runs; the first is the baseline of the comparisons.

    Args:
        refresh: seconds after which a browser reloads the file while a run is in progress; None: never.
    """
    drawn = charts.all_charts(runs)
    files = sections.downloads(runs)
    compared = [compare_runs(runs[0], other) for other in runs[1:]]
    return render_page(
        "report",
        {"charts": [chart.data() for chart in drawn], "runs": [run.name for run in runs]},
        title=", ".join(run.name for run in runs),
        refresh=refresh if any(run.running for run in runs) else None,
        runs=runs,
        charts=drawn,
        facts=[sections.facts(run) for run in runs],
        metrics=sections.metric_rows(runs),
        matrices=[matrices.of_run(run) for run in runs],
        signatures=sections.signatures(runs),
        outputs=[sections.shown_outputs(run) for run in runs],
        comparisons=[(comparison, matrices.of_comparison(comparison)) for comparison in compared],
        tables=[corpus_tables(run) for run in runs],
        settings=sections.settings(runs),
        environment=sections.environment(runs),
        parameters=sections.parameters(runs),
        files=[(number, label, name, packed(text.encode())) for number, label, name, text in files],
    )


def render_page(template: str, data: Any, *, refresh: int | None = None, **values: Any) -> str:
    """Renders the page `template` with its script and plotly.js.

    Args:
        data: data for the script, ready for JSON.
        refresh: seconds after which a browser reloads the file; None: never.
        values: variables of the template; `title` is the page's title.
    """
    page = _environment().get_template(f"{template}.html.jinja")
    return page.render(
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d at %H:%M UTC"),
        refresh=refresh,
        style=_asset("report.css"),
        script="".join(map(_asset, SCRIPTS[template])),
        plotly=_plotly(),
        data=_json(data),
        **values,
    )


@functools.cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tformer_jax.report", "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "title_of": charts.title_of,
        "metric": sections.format_metric,
        "interval": sections.format_interval,
        "difference": sections.format_difference,
        "p_value": sections.format_p_value,
        "shortened": sections.shorten_text,
        "breakable": _breakable,
        "compact": sections.format_count,
        "duration": sections.format_duration,
    }
    return environment


def _breakable(name: str) -> Any:
    """Returns a name, such as `model.vocab_size`, as HTML that may break after its punctuation."""
    from markupsafe import Markup

    return Markup("<wbr>").join(re.split(r"(?<=[./_])", name))


def _asset(name: str) -> str:
    return (resources.files("tformer_jax.report") / "assets" / name).read_text(encoding="utf-8")


@functools.cache
def _plotly() -> str:
    """Returns plotly.js of the Python package plotly, packed."""
    from plotly.offline import get_plotlyjs

    return packed(get_plotlyjs().encode())


def packed(content: bytes) -> str:
    """Returns bytes compressed with gzip, in base64, which a page's script unpacks."""
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()


def _json(value: Any) -> str:
    """Returns JSON that can stand in a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
