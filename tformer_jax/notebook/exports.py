"""Exports of runs from Python."""

from pathlib import Path
from typing import Any

from tformer_jax.api import Run
from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import as_path
from tformer_jax.cli import export_hf
from tformer_jax.config.fields import nearest


def export(run: Run | str | Path, folder: str | Path, **options: Any) -> None:
    """Writes a run for Hugging Face, CTranslate2 or PEFT, with its tokenizer, as `export_hf.py` does.

    Args:
        run: a run or its folder, whose files are read.
        folder: a new or empty folder.
        options: flags of the command, such as `model_type="marian"`, `format="ctranslate2"` or `check=False`.

    Raises:
        UserError: an option is unknown, the folder exists, or no architecture computes the same as the model.
    """
    if isinstance(run, Run) and run.ensemble:
        raise UserError("an ensemble cannot be exported: export each of its runs")
    path, step = (run.path, run.step) if isinstance(run, Run) else (as_path(run), None)
    at_step = [] if step is None else ["--step", str(step)]
    settings = export_hf.parser().parse_args(["--run", str(path), *at_step, str(folder)])
    for name, value in options.items():
        if name not in vars(settings):
            raise UserError(f"unknown option {name!r}{nearest(name, vars(settings))}")
        setattr(settings, name, value)
    export_hf.export(settings)
