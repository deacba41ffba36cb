"""After which steps the actions of a run are due, and which checkpoints have a score."""

from unittest import mock

import pytest

from tests.runs.conftest import small_config
from tformer_jax.config import TrainConfig
from tformer_jax.runs.evaluations import Evaluations
from tformer_jax.runs.training import Training
from tformer_jax.train.monitor import BestMetric

LOGS, VALIDATES, CALLS, SAVES = 2, 3, 4, 5
"""Places in the list of actions, after the watchdog and the profiler."""


def due_steps(place: int, *, overdue=(), callbacks=(), **train) -> list[int]:
    """Returns the steps of a run of ten after which an action is due."""
    train = {"steps": 10, "log_every": 4, "eval_every": 5, "checkpoint_every": 100, **train}
    run = Training.__new__(Training)
    run.callbacks = callbacks
    run.experiment, run.checkpointer = mock.Mock(cfg=small_config(**train)), mock.Mock()
    run.watchdog, run.checkpointer.overdue = mock.Mock(), overdue.__contains__
    due, _ = run.actions()[place]
    return [step for step in range(1, 11) if due(step)]


@pytest.mark.parametrize(
    ("place", "settings", "steps"),
    [
        (LOGS, {}, [4, 8, 10]),
        (LOGS, {"patience": 1}, [4, 5, 8, 10]),  # any evaluation may be the last one
        (VALIDATES, {}, [5, 10]),
        (VALIDATES, {"eval_every": 4}, [4, 8, 10]),
        (CALLS, {}, []),
        (CALLS, {"callbacks": (print,)}, [4, 5, 8, 10]),
        (SAVES, {}, []),  # the last step is saved after the loop
        (SAVES, {"checkpoint_every": 3}, [3, 6, 9]),
        (SAVES, {"checkpoint_every": 6, "permanent_every": 4}, [4, 6, 8]),
        (SAVES, {"keep_best": 1}, [5, 10]),
        (SAVES, {"overdue": (3, 4)}, [4]),  # asked for with the logs only
    ],
)
def test_actions_are_due(place, settings, steps):
    assert due_steps(place, **settings) == steps


def test_only_a_step_that_was_evaluated_has_a_score():
    evaluations = Evaluations.__new__(Evaluations)
    evaluations.best, evaluations.evaluated_at, evaluations.last = BestMetric(TrainConfig()), 4, {"loss": 2.0}
    assert (evaluations.score(4), evaluations.score(5)) == (-2.0, None)
