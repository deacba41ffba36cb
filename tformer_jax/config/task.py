"""Finds the task of a config; the tasks are in `tasks/`, and `kinds.TASKS` names them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tformer_jax.config import kinds
from tformer_jax.config.fields import ConfigError

if TYPE_CHECKING:
    from tformer_jax.tasks.task import Task


def tasks_of_family(family: str) -> "list[Task]":
    """Returns the tasks for which a model family is trained, the main one first."""
    return [task for _, task in kinds.loaded(kinds.TASKS) if hasattr(task, "trains") and task.trains(family)]


def find_task(name: str | None, family: str, objective: str | None) -> "Task":
    """Returns the task of a name in `kinds.TASKS`; None: the first one with this family and objective.

    Raises:
        ConfigError: no task has them.
    """
    if name is not None:
        if name not in kinds.TASKS:
            raise ConfigError(f"task={name!r}: is not registered; --import MODULE registers others")
        task = kinds.load(kinds.TASKS, name)
        if isinstance(task, type) or not hasattr(task, "check_declared"):
            made = f"register an instance, as in kinds.TASKS[{name!r}] = OwnTask(), of a class derived from Task"
            raise ConfigError(f"task={name!r}: is registered as {task!r}: {made}")
        task.check_declared(name)
        return task
    tasks = tasks_of_family(family)
    for task in tasks:
        if objective in task.objectives:
            return task
    allowed = tuple(dict.fromkeys(value for task in tasks for value in task.objectives))
    raise ConfigError(f"data.objective={objective!r}: must be one of {allowed} for model.family={family!r}")


def task_of(cfg: Any) -> "Task":
    """Returns the task of a `config.schema.Config`."""
    return find_task(cfg.task, cfg.model.family, cfg.data.objective)


def task_of_settings(settings: Mapping[str, Any]) -> "Task":
    """Returns the task of settings, which are given by their full names.

    Settings of earlier versions have no `task`; `model.family` and `data.objective` then select the task.

    Raises:
        ConfigError: the settings name another task, or modules that cannot be imported.
    """
    kinds.import_modules(settings.get("imports", ()))
    return find_task(settings.get("task"), settings["model.family"], settings["data.objective"])
