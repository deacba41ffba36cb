"""Directions of translation in reports and comparisons: tests of each one and of their mean, and heat maps."""

import json
import re
from importlib import resources

import numpy as np
import pytest

from tests.report.folders import write_run
from tformer_jax.cli import compare
from tformer_jax.report import matrices
from tformer_jax.report.bootstrap import PERCENT, estimates, ratio
from tformer_jax.report.comparison import compare_runs
from tformer_jax.report.run import load_all
from tformer_jax.tasks.translation import TRANSLATION

DIRECTIONS = ("en-de", "de-en", "en-pt_BR")
variables = re.compile(r"--([\w-]+): #([0-9a-f]{6})").findall


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    names = (("a", 0.0), ("b", 0.15))
    return [write_run(folder / name, level=level, directions=DIRECTIONS, examples=31) for name, level in names]


def test_each_direction_is_tested_alone_and_their_mean_by_the_mean_of_their_resamples(folders):
    systems = [run.outputs["test"] for run in load_all(folders)]
    actual = estimates(systems, TRANSLATION, resamples=100)
    for place, direction in enumerate(DIRECTIONS):
        parts = [system.of_direction(direction) for system in systems]
        assert parts[0].texts == systems[0].texts[place::3]
        assert parts[1].references == systems[0].references[place::3]
        alone = estimates(parts, TRANSLATION, resamples=100)
        for name in ("bleu", "chrf", "exact_match"):
            assert actual[f"{name}:{direction}"] == alone[f"{name}:{direction}"]
        hits = [PERCENT * part.hits for part in parts]
        assert actual[f"exact_match:{direction}"] == ratio(hits, np.ones(len(hits[0])), 100, PERCENT)
    hits = [[100 * system.hits[place::3] for system in systems] for place in range(3)]
    draws = [np.random.default_rng(12345).choice(len(part[0]), size=(100, len(part[0]))) for part in hits]
    means = [
        np.mean([part[number][rows].mean(axis=1) for part, rows in zip(hits, draws, strict=True)], axis=0)
        for number in range(2)
    ]
    scores = [np.mean([part[number].mean() for part in hits]) for number in range(2)]
    for estimate, mean, score in zip(actual["exact_match"], means, scores, strict=True):
        assert (estimate.score, estimate.mean) == pytest.approx((score, mean.mean()))
    gaps, gap = means[1] - means[0], scores[1] - scores[0]
    assert actual["exact_match"][1].p_value == (np.sum(np.abs(gaps - gap) >= abs(gap) - 1e-9) + 1) / 101
    assert actual["chrf"][0].score == pytest.approx(np.mean([actual[f"chrf:{name}"][0].score for name in DIRECTIONS]))


def test_cells_stand_at_their_source_and_target(folders):
    (run, _) = load_all(folders)
    test = json.loads((run.folder / "result.json").read_text())["test"]
    bleu, chrf = matrices.of_run(run)
    assert (bleu.metric, chrf.metric) == ("bleu", "chrf")
    assert (chrf.targets, list(chrf.rows)) == (["en", "de", "pt_BR"], ["en", "de"])
    texts = {source: [cell and cell.text for cell in cells] for source, cells in chrf.rows.items()}
    score = {name: f"{test[f'chrf:{name}']:.2f}" for name in DIRECTIONS}
    assert texts == {"en": [None, score["en-de"], score["en-pt_BR"]], "de": [score["de-en"], None, None]}
    shares = sorted(cell.share for cells in chrf.rows.values() for cell in cells if cell)
    assert (shares[0], shares[-1]) == (0, 1)


def test_differences_are_colored_by_what_is_better(folders):
    actual = compare_runs(*load_all(folders), resamples=100)
    for matrix in matrices.of_comparison(actual):
        for direction in DIRECTIONS:
            source, target = direction.split("-")
            cell = matrix.rows[source][matrix.targets.index(target)]
            a, b = actual.metrics[f"{matrix.metric}:{direction}"]
            assert cell.text == f"{b.score - a.score:+.2f}".replace("-", "−")
            assert (cell.share > 0) == (b.score > a.score)
            assert cell.marked == (b.p_value < 0.05)
            assert f"p = {b.p_value:.3f}" in cell.hint
    actual.metrics.update({f"ter:{name}": actual.metrics[f"chrf:{name}"] for name in DIRECTIONS})
    shares = {matrix.metric: matrix.rows["de"][0].share for matrix in matrices.of_comparison(actual)}
    assert shares["ter"] == -shares["chrf"]


@pytest.mark.long
def test_pages_and_tables_show_directions(folders, tmp_path, capsys):
    page = tmp_path / "both.html"
    compare.main([*map(str, folders), "--resamples", "100", "--report", str(page)])
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line.split() for line in lines if line.startswith("en-pt_BR"))
    tests = [json.loads((folder / "result.json").read_text())["test"] for folder in folders]
    shown = [f"{test[f'{name}:en-pt_BR']:.2f}" for name in ("chrf", "bleu") for test in tests]
    assert [*row[1:3], *row[5:7]] == shown
    text = page.read_text()
    assert text.count('<table class="matrix">') == 2 * 2 + 2
    assert "chrF, en-de" not in text  # the table of metrics has means only
    assert "validation_chrf:en-de" not in text


def test_numbers_are_readable_on_every_color_of_a_cell():
    """The contrast of WCAG 2, at least 4.5, in light and dark, for mixtures of up to 45 % of a color."""
    css = (resources.files("tformer_jax.report") / "assets" / "report.css").read_text()
    light, dark = re.search(r":root \{(.*?)\}", css, re.S)[1], re.search(r'="dark"\] \{(.*?)\}', css, re.S)[1]
    assert css.count("calc(var(--share) * 45%), var(--hover))") == 2
    for theme in (light, dark):
        colors = {
            name: np.array([int(code[at : at + 2], 16) for at in (0, 2, 4)]) / 255 for name, code in variables(theme)
        }
        for accent in ("accent", "run-1"):
            for share_of_color in np.linspace(0, 0.45, 10):
                behind = share_of_color * colors[accent] + (1 - share_of_color) * colors["hover"]
                high, low = sorted((luminance(behind), luminance(colors["text"])), reverse=True)
                assert (high + 0.05) / (low + 0.05) >= 4.5


def luminance(color: np.ndarray) -> float:
    linear = np.where(color <= 0.04045, color / 12.92, ((color + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])
