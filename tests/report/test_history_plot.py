"""The curves of one run in a notebook."""

import warnings

import numpy as np

from tformer_jax.report.history_plot import plot_history


def test_titles_have_units_in_parentheses():
    """Regression test: a title was "Gradient norm in before clipping"."""
    history = {"step": np.arange(3), "grad_norm": np.ones(3), "perplexity": np.ones(3), "loss": np.ones(3)}
    axes = plot_history(history, ["grad_norm", "perplexity", "loss"]).figure.axes
    titles = [panel.get_title() for panel in axes]
    assert titles == ["Gradient norm (before clipping)", "Perplexity", "Loss (nats per label)"]


def test_a_metric_without_a_finite_value_is_drawn_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (panel,) = plot_history({"step": np.arange(3), "loss": np.full(3, np.nan)}).figure.axes
    assert not panel.lines
