"""Statistics and plots of sweeps, from made-up results."""

import xml.etree.ElementTree as ET

import pytest
from matplotlib.figure import Figure

from tformer_jax.base.errors import UserError
from tformer_jax.report import sweep_plot, sweeps


def result(loss, **facts):
    return {"parameters": 10, "tokens_per_second": 2.0, "validation": {"loss": loss}, "test": {"loss": loss}, **facts}


def texts(path):
    return [element.text.strip() for element in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def plotted(results, tmp_path, chosen=None):
    path = tmp_path / "plot.svg"
    sweep_plot.draw_plot({"metric": "loss", "chosen": chosen, **sweeps.make_record(results, "loss")}, path)
    return texts(path)


@pytest.mark.parametrize(
    ("values", "half"),
    [
        ([1.0, 2.0], 12.7062 * 0.5),  # deviation 1 / sqrt(2), over sqrt(2)
        ([1.0, 2.0, 3.0], 4.30265 / 3**0.5),
        ([2.0, 4.0, 4.0, 4.0, 6.0], 2.77645 * 2**0.5 / 5**0.5),
        ([5.0, 5.0], 0.0),
    ],
)
def test_intervals_have_the_quantiles_of_students_table(values, half):
    assert sweeps.interval(values) == pytest.approx(half, rel=1e-5)
    assert sweeps.interval(values[:1]) is None


def test_one_run_has_no_deviation():
    (group,) = sweeps.make_record({("seed=0",): result(1.0)}, "loss")["groups"]
    assert (group["mean"], group["deviation"], group["interval"]) == ({"loss": 1.0}, {"loss": None}, {"loss": None})


@pytest.mark.parametrize(("metric", "best"), [("loss", "b=1"), ("bleu", "b=2")])
def test_the_best_on_validation_is_chosen(metric, best):
    values = {"b=1": 1.0, "b=2": 3.0, "b=3": float("nan"), "b=4": None}
    results = {("a=1", name, "seed=0"): {"validation": {metric: value}} for name, value in values.items()}
    assert sweeps.chosen_combinations(results, "b", metric) == {("a=1", best)}


def test_facts_of_all_runs_are_recorded_once():
    results = {(f"seed={seed}",): result(1.0 + seed, command="x", seed=seed, python="3.12") for seed in range(3)}
    actual = sweeps.make_record(results, "loss")
    assert actual["common"] == {"parameters": 10, "tokens_per_second": 2.0, "python": "3.12"}
    assert [{**actual["common"], **run}["test"]["loss"] for run in actual["runs"]] == [1.0, 2.0, 3.0]
    (group,) = actual["groups"]
    assert (group["seeds"], group["parameters"], group["mean"]) == (3, 10, {"loss": 2.0})
    limited = sweeps.make_record({("a=1",): result(1.0), ("a=2",): result(2.0)}, "loss", only={("a=2",)})
    assert [group["settings"] for group in limited["groups"]] == [("a=2",)] and len(limited["runs"]) == 2


def test_metrics_that_some_runs_lack_have_no_value(tmp_path):
    """Regression test: they ended a sweep with a KeyError, after the training of all runs."""
    whole, part = {"loss": 1.0, "unknown_outputs": 3.0}, {"loss": 2.0}
    tests = {
        ("a=1", "seed=0"): whole,
        ("a=1", "seed=1"): part,
        ("a=2", "seed=0"): {"loss": 3.0, "placeholders_kept": 9.0},
    }
    results = {combination: result(1.0, test=test) for combination, test in tests.items()}
    first, second = sweeps.make_record(results, "loss")["groups"]
    assert first["mean"] == {"loss": 1.5, "unknown_outputs": None}
    assert first["interval"]["unknown_outputs"] is None and second["mean"] == {"loss": 3.0, "placeholders_kept": 9.0}
    record = {"metric": "placeholders_kept", "chosen": None, **sweeps.make_record(results, "placeholders_kept")}
    sweep_plot.draw_plot(record, tmp_path / "plot.svg")
    assert "a" in texts(tmp_path / "plot.svg")
    lacking = {(f"b={value}", "seed=0"): {"validation": test} for value, test in enumerate((part, whole))}
    assert sweeps.chosen_combinations(lacking, "b", "unknown_outputs") == {("b=1",)}


def evaluated(tokens, losses, speed):
    curve = {"tokens": tokens, "loss": losses}
    return result(losses[-1]) | {"tokens_per_second": speed, "curves": {"validation": curve}}


def test_an_equal_time_is_that_of_the_fastest_group():
    """At 10 tokens/s, 100 tokens take 10 s, in which the slower group reads 50 tokens; the two seeds have one speed."""
    fast = evaluated([50, 100], [3.0, 2.0], 10.0)
    slow = [
        evaluated([40, 80, 100], losses, speed) for losses, speed in (([4.0, 2.0, 0.0], 4.0), ([8.0, 4.0, 0.0], 6.0))
    ]
    actual = sweeps.make_record({("a=1",): fast, ("a=2", "seed=0"): slow[0], ("a=2", "seed=1"): slow[1]}, "loss")
    assert actual["equal_seconds"] == 10.0
    first, second = (group["at_equal_seconds"] for group in actual["groups"])
    assert first == {"mean": 2.0, "interval": None}
    assert second["mean"] == pytest.approx((3.5 + 7.0) / 2)


@pytest.mark.parametrize("other", [result(1.0), evaluated([99], [1.0], 1.0), evaluated([1, 9], [None, 1.0], 1.0)])
def test_without_a_curve_that_covers_it_no_equal_time_is_compared(other):
    actual = sweeps.make_record({("a=1",): evaluated([5, 10], [2.0, 1.0], 1.0), ("a=2",): other}, "loss")
    assert actual["equal_seconds"] is None
    assert not any("at_equal_seconds" in group for group in actual["groups"])


def test_variants_are_drawn_one_below_another(tmp_path):
    results = {
        (f"variant={name}", f"optim.learning_rate={rate}", f"seed={seed}"): result(1.5 + seed)
        for name, rate in (("2017", "1e-3"), ("rope", "3e-3"))
        for seed in range(2)
    }
    actual = plotted(results, tmp_path, chosen="optim.learning_rate")
    assert actual.index("2017") < actual.index("rope") and "Loss (nats per label)" in actual
    assert not any("learning_rate" in text for text in actual)


def test_a_numeric_setting_is_the_axis_of_a_line_per_width_in_a_panel_per_parameterization(tmp_path):
    results = {
        (f"variant={kind}", f"variant={width}", f"optim.learning_rate={rate}"): result(float(rate) * width)
        for kind in ("standard", "mup")
        for width in (64, 128)
        for rate in ("1e-3", "1e-2")
    }
    actual = plotted(results, tmp_path)
    for text, count in {"standard": 1, "mup": 1, "64": 2, "128": 2, "optim.learning_rate": 2}.items():
        assert actual.count(text) == count, text


def test_values_of_other_settings_are_named(tmp_path):
    results = {(f"model.dim={dim}", f"train.steps={steps}"): result(1.0) for dim in (8, 16) for steps in (1, 2)}
    assert {"dim 8", "dim 16", "train.steps"} <= set(plotted(results, tmp_path))


def test_plots_have_a_known_format(tmp_path, monkeypatch):
    sweep_plot.check_plot(tmp_path / "a.svg")
    with pytest.raises(UserError, match=r"--plot a.txt: the name must end in .svg, .png or .pdf"):
        sweep_plot.check_plot(tmp_path.__class__("a.txt"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'--plot needs matplotlib: pip install -e "\.\[report\]"'):
        sweep_plot.check_plot(tmp_path / "a.svg")


@pytest.mark.parametrize("draw", ["lines", "rows"])
def test_a_single_seed_has_no_bar(draw):
    """Regression test: a bar of no length told of an exact result."""
    results = {("dim=1", f"seed={seed}"): result(1.0 + seed) for seed in range(2)} | {("dim=2", "seed=0"): result(3.0)}
    groups = sweeps.make_record(results, "loss")["groups"]
    axes = Figure().subplots()
    if draw == "lines":
        sweep_plot._draw_lines(axes, {"": [(1.0, groups[0]), (2.0, groups[1])]}, "loss")
    else:
        sweep_plot._draw_rows(axes, groups, {"dim": ["1", "2"]}, "loss")
    several, single = axes.collections[0].get_segments()
    assert (len(several), len(single)) == (2, 0)  # ends of the bars
