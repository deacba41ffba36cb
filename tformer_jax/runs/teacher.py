"""The teacher of a run: another run whose distributions it learns, in memory or stored; it is in no checkpoint."""

import hashlib
import json
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from tformer_jax import config
from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import as_path, resolved
from tformer_jax.config import Config, TrainConfig
from tformer_jax.data.tokenizers import Tokenizers, same_tokens
from tformer_jax.models import registry
from tformer_jax.models.losses import Teacher
from tformer_jax.parallel import rules
from tformer_jax.parallel.multihost import ProcessGroup
from tformer_jax.runs import run_folder, start_from, weights
from tformer_jax.runs.trained import load_trained


def check(cfg: Config, tokenizers: Tokenizers, mesh: Mesh) -> None:
    """Checks that the run of `train.teacher` can teach a run, without loading its parameters.

    Raises:
        UserError: it is not the folder of a trained run, has no weights or damaged ones, another vocabulary, family
            or attention to prompts, is too short, or does not fit the mesh.
    """
    assert cfg.train.teacher is not None
    train, run = cfg.train, as_path(cfg.train.teacher)
    if start_from.has_distributions(train):  # the batches have been compared with them
        if train.teacher_step is not None:
            raise train.error("teacher_step", "is of a run, and train.teacher has stored distributions: leave it out")
        return
    start_from.check_weights(train, "teacher", run)
    theirs, others = config.load(run / "config.json"), Tokenizers.load(run / "tokenizers")
    sides = ("source", "target") if cfg.model.model_class.reads_source else ("target",)
    if any(not same_tokens(*(getattr(each, side) for each in (tokenizers, others))) for side in sides):
        raise train.error(
            "teacher",
            f"has another vocabulary: set data.tokenizer='file' and data.tokenizer_file={str(resolved(run))!r}",
        )
    for name in ("family", "source_vocab_size", "vocab_size", "prefix_lm"):
        own, other = getattr(cfg.model, name), getattr(theirs.model, name)
        if own != other:
            raise train.error("teacher", f"has model.{name}={other!r}, and this run {own!r}: they must be equal")
    if theirs.model.max_length < cfg.data.longest:
        raise train.error(
            "teacher", f"has model.max_length={theirs.model.max_length}, and the rows have {cfg.data.longest} tokens"
        )
    try:
        rules.check_sharding(theirs.model, cfg.parallel, mesh.shape)
    except UserError as error:
        raise train.error("teacher", f"does not fit the mesh of this run ({error})") from error


def abstract(train: TrainConfig, mesh: Mesh) -> Teacher | None:
    """Returns the teacher with the shapes, dtypes and shardings of its parameters on a mesh; None without one."""
    if train.teacher is None:
        return None
    if start_from.has_distributions(train):
        raise train.error("teacher", "has stored distributions: name the run of the teacher")
    model = registry.build(config.load(as_path(train.teacher) / "config.json").model)
    return Teacher(model, registry.sharded_shapes(model, mesh), train.teacher_weight, train.teacher_temperature)


def load(train: TrainConfig, mesh: Mesh, group: ProcessGroup) -> Teacher:
    """Loads the teacher, sharded like any model on this mesh."""
    assert train.teacher is not None
    if start_from.has_distributions(train):
        return Teacher(None, (), train.teacher_weight, train.teacher_temperature)
    trained = load_trained(as_path(train.teacher), mesh, group, step=train.teacher_step)
    return Teacher(trained.model, trained.params, train.teacher_weight, train.teacher_temperature)


def facts(cfg: Config) -> dict[str, Any]:
    """Returns what a run records of its teacher: its folder, its weights and their checksum."""
    assert cfg.train.teacher is not None
    run = as_path(cfg.train.teacher)
    if start_from.has_distributions(cfg.train):
        from tformer_jax.data import distributions

        stored = distributions.read_facts(run)
        digest = hashlib.blake2b(json.dumps(stored).encode(), digest_size=16).hexdigest()
        return {**stored["teacher"], "stored": str(run), "top": stored["top"], "mass": stored["mass"], "digest": digest}
    chosen = run_folder.weights_of(run, cfg.train.teacher_step)
    folder = run / weights.FOLDER
    if chosen["kind"] == "checkpoint":
        folder = run_folder.checkpoints(run) / str(chosen["steps"][0])
    digest = hashlib.blake2b(json.dumps(weights.checksums(folder)).encode(), digest_size=16).hexdigest()
    return {"run": str(run), "weights": chosen, "digest": digest}


def record(cfg: Config, folder: Path) -> None:
    """Writes `teacher.json` to a run folder, or compares the teacher of a resumed run with it.

    Raises:
        UserError: the weights of the teacher have changed.
    """
    own, path = facts(cfg), folder / run_folder.TEACHER
    before = run_folder.read_json(path) if path.exists() else own
    if before["digest"] != own["digest"]:
        raise cfg.train.error("teacher", f"its weights have changed since {folder} started; restore them")
    run_folder.write_json(path, own)
