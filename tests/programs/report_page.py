"""Reads reports as a user would, in a headless Chromium, at desktop and phone width, in light and dark.

python -m tests.programs.report_page --record tests/programs/report.json

Requires `pip install playwright` and a Chromium: Debian's (apt install chromium), or the one named by --chromium.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests import commands
from tests.report.checks import (
    ATTENTION,
    CHECKS,
    EXPLAIN,
    HEADS,
    QUICK,
    STEPS,
    WATCHED,
    WIDTHS,
    every_chart_is_drawn_when_it_is_seen,
)
from tests.report.folders import cut, lock, write_run
from tformer_jax.inference.watch import Watched
from tformer_jax.lab.commands import explain
from tformer_jax.report import attention, html
from tformer_jax.report.run import load_all

MEGABYTES, SECONDS = 6, 2
"""Largest file, and longest time until its text is painted; charts follow."""
CHECKS_OF = {"long": CHECKS, "watched": WATCHED, "attention": ATTENTION, "explain": EXPLAIN}
"""Checks of each page; `QUICK` for others."""


def main() -> None:
    """Prints and records the checks; exits with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="default: the one on the PATH")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--screenshots", type=Path, metavar="DIR", help="where screenshots of the reports go")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        reports = write_reports(Path(folder))
        actual: dict[str, Any] = {
            name: check(name, path, browser, options.screenshots) for name, path in reports.items()
        }
        actual["opening"] = opening(reports["long"], browser)
        if options.record:
            commands.write_record(options.record, "tests.programs.report_page", chromium=browser.version, **actual)
        browser.close()
    print(json.dumps(actual["opening"], indent=2))
    raise SystemExit(any(result not in ("passed", True) for result in _results(actual)))


def write_reports(folder: Path) -> dict[str, Path]:
    """Writes the reports that are read, and returns their paths by name."""
    events = [
        (3000, "spike", "loss 5.1000 is far above the 2.1000 of the preceding steps"),
        (4200, "stopped", "by a signal"),
    ]
    events += [(4200, "resume", "1 x cpu"), (6000, "skipped", "skipped, because its loss is not finite")]
    lost = range(6000, 6400)
    runs = {
        "long": [write_run(folder / "run", steps=STEPS, examples=500, evaluations=10, events=events, lost=lost)],
        "killed": [write_run(folder / "killed", tested=False)],
        "failed": [
            write_run(folder / "failed", tested=False, lost=range(30, 41), events=[(40, "failed", "not finite")])
        ],
        "running": [write_run(folder / "running", tested=False, steps=20, extra={"learning_rate": 2e-5})],
        "several": [
            write_run(folder / "translation"),
            write_run(folder / "wider", level=0.15),
            write_run(folder / "labels", family="classifier"),
            write_run(
                folder / "text", family="decoder_lm", extra={"grad_norm/decoder/layers_0": 2.0, "auxiliary_loss": 0.0}
            ),
        ],
    }
    directions = ("en-de", "de-en", "en-fr", "fr-en", "de-fr")
    names = (("many", 0.0), ("more", 0.15))
    runs["directions"] = [write_run(folder / name, level=level, directions=directions) for name, level in names]
    cut(runs["killed"][0] / "metrics.jsonl")
    with lock(runs["running"][0]):
        for name, folders in runs.items():
            (folder / f"{name}.html").write_text(html.render_report(load_all(folders)), encoding="utf-8")
        (folder / "watched.html").write_text(
            html.render_report(load_all(runs["running"]), refresh=10), encoding="utf-8"
        )
    (folder / "attention.html").write_text(attention_page(), encoding="utf-8")
    explain.main(["--output", str(folder / "explain.html")])
    return {name: folder / f"{name}.html" for name in (*runs, "watched", "attention", "explain")}


def attention_page() -> str:
    """Renders the attention of a translator whose weights are drawn at random."""
    rng = np.random.default_rng(0)
    source, target = ["A", " red", " house", "</s>"], ["<s>", "Ein", " rotes", " Ha", "us", "<b>"]
    sizes = {"encoder": (4, 4), "decoder": (6, 6), "cross": (6, 4)}
    masks = {kind: np.ones((2, *size), bool) for kind, size in sizes.items()}
    masks["decoder"] &= np.tril(np.ones((6, 6), bool))
    drawn = {kind: rng.random((2, HEADS, *size)) * masks[kind][:, None] for kind, size in sizes.items()}
    weights = {kind: values / values.sum(-1, keepdims=True) for kind, values in drawn.items()}
    norms = {"encoder": rng.random((5, 4)), "decoder": rng.random((7, 6))}
    added = {stack: values[1:] for stack, values in norms.items()}
    predictions = rng.integers(0, 6, (3, 6, 5))
    actual = Watched({}, weights, masks, norms, added, predictions, rng.dirichlet(np.ones(5), (3, 6)))
    tokens = {"encoder": source, "decoder": target}
    return attention.render_attention(
        "translator", {"source": "A red house"}, actual, tokens, target.__getitem__, with_heads=True
    )


def opened(path: Path, browser: Any, size: tuple[int, int], scheme: str) -> tuple[Any, list[str], tuple[float, float]]:
    """Opens a report; returns the page, the list that collects its mistakes and requests, and two times in seconds.

    From the opening until the text is painted, and until the charts in view are drawn.
    """
    width, height = size
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    mistakes: list[str] = []
    page.on("pageerror", lambda error: mistakes.append(str(error)))
    page.on("console", lambda message: mistakes.append(message.text) if message.type in ("error", "warning") else None)
    page.on("request", lambda request: mistakes.append(request.url) if request.url != path.as_uri() else None)
    page.on("dialog", lambda dialog: mistakes.append(dialog.message))
    page.goto(path.as_uri())
    page.locator("html[data-drawn]").wait_for(state="attached", timeout=60_000)
    painted, drawn = (page.evaluate(f"Number(root.dataset.{name}) / 1000") for name in ("painted", "drawn"))
    return page, mistakes, (painted, drawn)


def check(name: str, path: Path, browser: Any, screenshots: Path | None) -> dict[str, dict[str, str]]:
    """Returns the outcome of each check at each width and in each color scheme."""
    actual: dict[str, dict[str, str]] = {}
    for width, size in WIDTHS.items():
        for scheme in ("light", "dark"):
            outcome = actual[f"{width}, {scheme}"] = {}
            for each in CHECKS_OF.get(name, QUICK):
                page, mistakes, _ = opened(path, browser, size, scheme)
                try:
                    each(page)
                    unexpected = [mistake for mistake in mistakes if not mistake.startswith("blob:")]
                    assert not unexpected, unexpected
                    outcome[each.__name__] = "passed"
                except Exception as error:
                    outcome[each.__name__] = f"{type(error).__name__}: {error}"
                print(
                    f"{name}, {width}, {scheme}: {each.__name__.replace('_', ' ')}: {outcome[each.__name__]}",
                    flush=True,
                )
                if screenshots and each is every_chart_is_drawn_when_it_is_seen:
                    page.screenshot(path=screenshots / f"{name}_{width}_{scheme}.png", full_page=True)
                page.close()
    return actual


def opening(path: Path, browser: Any, rounds: int = 5) -> dict[str, Any]:
    """Returns the size of a report and the times until it is painted and drawn, and whether they are small enough."""
    times, computed = [], []
    for _ in range(rounds):
        page, _, seconds = opened(path, browser, WIDTHS["desktop"], "light")
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        times.append(seconds)
        computed.append(metrics["ProcessTime"])
        page.close()
    painted, drawn = zip(*times, strict=True)
    megabytes = path.stat().st_size / 1e6
    return {
        "steps": STEPS,
        "megabytes": round(megabytes, 2),
        "seconds_until_painted": [round(seconds, 2) for seconds in painted],
        "seconds_until_drawn": [round(seconds, 2) for seconds in drawn],
        "cpu_seconds": [round(seconds, 2) for seconds in computed],
        "file_small_enough": megabytes < MEGABYTES,
        "opened_soon_enough": statistics.median(painted) < SECONDS,
    }


def _results(actual: dict[str, Any]) -> list[Any]:
    outcomes = [
        each
        for name, widths in actual.items()
        if name != "opening"
        for checks in widths.values()
        for each in checks.values()
    ]
    return [*outcomes, actual["opening"]["file_small_enough"], actual["opening"]["opened_soon_enough"]]


if __name__ == "__main__":
    main()
