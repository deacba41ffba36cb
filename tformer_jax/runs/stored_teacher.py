"""Stores the distributions of a teacher that is too large to be in memory beside its students."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tformer_jax.base.paths import as_path
from tformer_jax.config import Config
from tformer_jax.data import distributions
from tformer_jax.data.columns import TokenIds
from tformer_jax.data.corpora import load_corpus
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.inference.scores import top_rows
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.parallel.multihost import SINGLE
from tformer_jax.runs import start_from, teacher
from tformer_jax.runs.experiment import with_data_sizes
from tformer_jax.runs.trained import load_trained


def remove(folder: Path) -> None:
    """Removes stored distributions from a folder."""
    for name in distributions.FILES:
        (folder / name).unlink(missing_ok=True)


def store(
    cfg: Config, root: Path | None, folder: Path, top: int, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Writes the distributions of the run of `train.teacher` for the prepared training examples of a config.

    Args:
        cfg: the config of the students.
        root: the data folder.
        top: number of most probable tokens of each label; at most all are stored.
        progress: called with the number of examples, and how many of them are complete since the last call.

    Returns:
        The contents of `distributions.json`.

    Raises:
        UserError: the data is not prepared, the run cannot teach a run of this config, or the folder holds something
            else.
    """
    if start_from.has_distributions(cfg.train):
        raise cfg.train.error("teacher", "has stored distributions: name the run of the teacher")
    corpus = load_corpus(cfg, root)
    if corpus.tokenizers is None:
        raise cfg.data.error("source", "must be 'prepared', the data beside which distributions are stored")
    tokenizers = Tokenizers.load(corpus.tokenizers)
    cfg, mesh = with_data_sizes(cfg, tokenizers, corpus.labels), make_mesh(cfg.parallel)
    teacher.check(cfg, tokenizers, mesh)
    facts: dict[str, Any] = {"top": min(top, cfg.model.vocab_size or top), "teacher": teacher.facts(cfg)}
    facts["data"] = distributions.facts_of_data(cfg, corpus, tokenizers)
    trained = load_trained(as_path(facts["teacher"]["run"]), mesh, SINGLE, step=cfg.train.teacher_step)

    def compute(rows: Sequence[TokenIds]) -> Iterator[distributions.Top]:
        lists = [{key: ids.tolist() for key, ids in row.items()} for row in rows]
        return top_rows(trained.model, trained.params, lists, cfg.eval.batch_size, facts["top"])

    return distributions.write(
        folder, facts, cfg, corpus, tokenizers, compute, lambda count: progress(len(corpus.train), count)
    )
