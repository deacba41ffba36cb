"""Builds everything that a run needs from its config, so that user errors are found before the first step."""

import contextlib
import dataclasses
import functools
import json
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh

from tformer_jax import config
from tformer_jax.base import checks
from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import as_path, is_remote, resolved
from tformer_jax.config import Config
from tformer_jax.config.metrics import group_of_metric
from tformer_jax.config.task import task_of
from tformer_jax.data.corpora import Corpus, load_corpus
from tformer_jax.data.features import long_texts_reported
from tformer_jax.data.pipeline import check_predictable, train_batches, without_refused
from tformer_jax.data.prefetch import Prefetched
from tformer_jax.data.rows import Shards
from tformer_jax.data.summary import SplitSummary, summarize
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers, same_tokens
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.models import registry
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import data_parallelism, make_mesh
from tformer_jax.parallel.multihost import SINGLE, ProcessGroup
from tformer_jax.parallel.placement import own_shards
from tformer_jax.runs import metrics, provenance, run_folder
from tformer_jax.runs.guards import FolderLock
from tformer_jax.train import optimizers, schedules

CHECKED = 10_000
"""Maximum number of examples per split, unless generated, in the checksum that identifies a corpus."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The components of a run."""

    cfg: Config
    folder: Path
    mesh: Mesh
    corpus: Corpus
    tokenizers: Tokenizers
    model: nn.Module
    batches: Prefetched
    """Training batches, endless, from the first one; they have only the rows that this process's devices hold."""
    shards: Shards
    """The shards of a global batch, and which of them this process holds."""
    lock: FolderLock | None
    """Keeps other runs from writing to `folder`; None for a bucket, and in other processes than process 0."""
    group: ProcessGroup
    """All processes of the run."""
    start_from: Path | None = None
    """Run folder that provides the initial parameters; None: newly initialized ones."""
    summary: Mapping[str, SplitSummary] = dataclasses.field(default_factory=dict)
    """Statistics of each split; only in process 0."""
    finished: dict[str, Any] | None = None
    """Result of a resumed run that has finished with the same settings, else None."""
    optimizer: optax.GradientTransformation | None = None
    """An optimizer that was given in Python; replaces the optimizer of `cfg.optim`."""

    def close(self) -> None:
        """Stops the loader and releases the lock."""
        self.batches.close()
        if self.lock is not None:
            self.lock.release()


def build(
    cfg: Config,
    folder: Path,
    *,
    data_root: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    group: ProcessGroup = SINGLE,
    given: Corpus | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Experiment:
    """Loads the data, trains the tokenizers and creates the run folder, or reopens an existing run.

    Args:
        data_root: data folder, for sources that read files.
        resume: continue the run in `folder`; start it if there is none.
        overwrite: replace the run in `folder`.
        group: all processes of the run; each builds the same experiment, and process 0 writes.
        given: a corpus that was given in Python; None: load the corpus of `cfg.data`.
        optimizer: as `Experiment.optimizer`.

    Raises:
        UserError: the settings, the data, the devices or the folder are invalid or do not fit each other.
    """
    folder = as_path(folder)
    resume = _continues(cfg, folder, group, resume=resume, overwrite=overwrite)
    mesh = make_mesh(cfg.parallel)
    rules.check(cfg, mesh.shape)
    corpus = group.run(lambda: load_corpus(cfg, data_root) if given is None else given)
    tokenizers = _common_tokenizers(
        group, lambda: find_tokenizers(cfg, corpus, data_root, folder / "tokenizers" if resume else None)
    )
    corpus = group.run(lambda: without_refused(cfg, corpus, tokenizers))
    cfg, facts = with_data_sizes(cfg, tokenizers, corpus.labels), corpus_facts(cfg, corpus)
    if cfg.data.weights and (len({*cfg.data.weights}) > 1 or cfg.data.weight_by == "tokens"):
        facts[run_folder.MIXTURE] = run_folder.MIXTURE_VERSION
    if cfg.data.transforms:
        facts[run_folder.TRANSFORMS] = run_folder.TRANSFORMS_VERSION
    if optimizer is not None:
        shapes = registry.shapes(registry.build(cfg.model))
        facts[run_folder.OPTIMIZER] = optimizers.digest(optimizer, cfg, shapes)
    group.check_equal(config.flat(cfg) | facts)
    finished = group.from_first(lambda: run_folder.result_of(folder, cfg) if resume else None)
    built = assemble(cfg, folder, mesh, corpus, tokenizers, group=group, finished=finished)
    built = dataclasses.replace(built, optimizer=optimizer)
    group.run(lambda: _check_before_writing(built, resume=resume))  # in every process, before process 0 replaces a run
    lock = group.run(lambda: open_folder(built, facts, resume=resume, overwrite=overwrite) if group.first else None)
    group.check_shared(folder)
    return dataclasses.replace(built, lock=lock)


def assemble(
    cfg: Config,
    folder: Path,
    mesh: Mesh,
    corpus: Corpus,
    tokenizers: Tokenizers,
    *,
    group: ProcessGroup = SINGLE,
    finished: dict[str, Any] | None = None,
) -> Experiment:
    """Builds the components of a run from its data; writes nothing.

    Args:
        cfg: with the sizes of `with_data_sizes`.

    Raises:
        UserError: the settings and the data do not fit each other.
    """
    check_predictable(cfg, corpus, tokenizers)
    if group_of_metric(cfg.train.metric):
        from tformer_jax.tasks.evaluators.directions import check_metric

        check_metric(cfg, corpus)
    shards = Shards(data_parallelism(mesh), own_shards(mesh))
    summary = summarize(cfg, corpus, tokenizers) if group.first else {}
    with long_texts_reported("train" in summary and summary["train"].long > 0):
        batches = train_batches(cfg, corpus, tokenizers, shards=shards)
    return Experiment(
        cfg=cfg,
        folder=folder,
        mesh=mesh,
        corpus=corpus,
        tokenizers=tokenizers,
        model=registry.build(cfg.model, train=True),
        batches=batches,
        shards=shards,
        lock=None,
        group=group,
        start_from=as_path(cfg.train.start_from) if cfg.train.start_from else None,
        summary=summary,
        finished=finished,
    )


def open_folder(built: Experiment, facts: dict[str, Any], *, resume: bool, overwrite: bool) -> FolderLock | None:
    """Locks the run folder and creates it, or checks that its run can continue; returns the lock, None for a bucket.

    Args:
        facts: see `corpus_facts`.

    Raises:
        UserError: the folder is in use, cannot be written or holds another run.
    """
    with contextlib.ExitStack() as on_error:
        lock = None if is_remote(built.folder) else FolderLock(built.folder)
        if lock is not None:
            on_error.callback(lock.release)
        if not overwrite and run_folder.holds_run(built.folder) != resume:
            raise UserError(
                f"another process has created or removed {built.folder} since this one started: start this one again"
            )
        _create_or_check(built, facts, resume=resume)
        on_error.pop_all()
    return lock


def _continues(cfg: Config, folder: Path, group: ProcessGroup, *, resume: bool, overwrite: bool) -> bool:
    """Returns whether an existing run is resumed.

    Raises:
        UserError: the flags contradict each other, `folder` holds a run and there is no flag, or the processes have
            other settings or versions.
    """
    if resume and overwrite:
        raise UserError("--resume continues a run and --overwrite replaces it: write one of them")
    flags = {"--run": str(folder), "--resume": resume, "--overwrite": overwrite}
    versions = {f"the version of {name}": version for name, version in provenance.versions().items()}
    precision = {provenance.MATMUL_PRECISION: provenance.matmul_precision()}
    group.check_equal(config.flat(cfg) | flags | versions | precision)
    exists = group.from_first(lambda: run_folder.holds_run(folder))
    if exists and not (resume or overwrite):
        raise UserError(
            f"{folder} already holds a run: add --resume to continue it, --overwrite to replace it, "
            "or choose another run folder"
        )
    return resume and exists


def _check_before_writing(built: Experiment, *, resume: bool) -> None:
    """Checks what needs the data and the model.

    Raises:
        UserError: a glob matches no parameter, the run of `train.start_from` or `train.teacher` does not fit, or would
            be replaced, `decode.prefix` leaves no room for an output, or a package is missing.
    """
    cfg, folder, start_from = built.cfg, built.folder, built.start_from
    if built.optimizer is None:
        optimizers.build(cfg, registry.shapes(built.model))  # raises
    if cfg.train.lora_base is not None:
        checks.require(f"train.lora_base={cfg.train.lora_base!r}", ("qwix",), "quantize")
    if start_from is not None:
        if built.finished is None and not (resume and run_folder.holds_checkpoint(folder)):
            from tformer_jax.runs import start_from as other_run

            other_run.check(cfg.train, cfg.model, built.tokenizers, start_from, labels=built.corpus.labels)
        if not resume and resolved(start_from) == resolved(folder):
            raise cfg.train.error(
                "start_from", "is the run folder, which this run would replace: choose another run folder"
            )
    if cfg.train.teacher is not None and built.finished is None:
        from tformer_jax.runs import teacher

        teacher.check(cfg, built.tokenizers, built.mesh)
    if task_of(cfg).generates:
        _check_prefix(cfg, built.tokenizers.target)
    metrics.check_installed(cfg)
    task_of(cfg).check_installed(cfg)


def _check_prefix(cfg: Config, tokenizer: Tokenizer) -> None:
    """Raises `UserError` if `decode.prefix` leaves no room for an output, or for a prompt."""
    from tformer_jax.inference.constraints import Constraints
    from tformer_jax.inference.forced import first_tokens

    continues = cfg.model.model_class.continues
    Constraints.from_config(cfg.decode, tokenizer)  # raises
    used = len(first_tokens(cfg.decode, tokenizer, continues=continues).ids)
    tags = len(cfg.data.target_tags) if cfg.data.multilingual else 0
    used += tokenizer.special.added_to_text if continues else tags
    if used >= cfg.model.max_length:
        other = "a prompt" if continues else "other tokens"
        raise cfg.decode.error("prefix", f"leaves no token of model.max_length={cfg.model.max_length} for {other}")


def _create_or_check(built: Experiment, facts: dict[str, Any], *, resume: bool) -> None:
    """Creates the run folder, or checks that its run can continue; warns if its learning rate then changes."""
    cfg, folder = built.cfg, built.folder
    if not resume:
        run_folder.create(folder, cfg, built.tokenizers, built.corpus.labels, facts)
    else:
        before = run_folder.check_resumable(folder, cfg, facts)
        if warning := schedules.rate_change(before, cfg, run_folder.latest_step(folder) or 0):
            logging.getLogger(__name__).warning("%s", warning)
    if cfg.train.teacher is not None and built.finished is None:
        from tformer_jax.runs import teacher

        teacher.record(cfg, folder)


def _common_tokenizers(group: ProcessGroup, find: Callable[[], Tokenizers]) -> Tokenizers:
    """Finds the tokenizers in process 0 and broadcasts them to all processes."""
    tokenizers = group.run(lambda: find() if group.first else None)
    described = group.broadcast(lambda: json.dumps(tokenizers.to_json()) if tokenizers else "")
    return tokenizers or Tokenizers.from_json(json.loads(described))


def corpus_facts(cfg: Config, corpus: Corpus) -> dict[str, Any]:
    """Returns facts that identify a corpus: the size of each split, and a checksum of evenly spaced examples.

    At most `CHECKED` examples enter the checksum; of generated data the first and the last, of data given in Python
    all. Files that transforms read have checksums of their own.
    """
    names = dict.fromkeys(name for transform in cfg.data.transforms for name in transform.files)
    files = {name: Path(corpus.root or "") / name for name in names}
    facts: dict[str, Any] = {
        f"the checksum of {name}": zlib.crc32(path.read_bytes()) for name, path in files.items() if path.is_file()
    }
    for name in ("train", "validation", "test"):
        examples = getattr(corpus, name)
        checked = 2 if cfg.data.generated else len(examples) if cfg.data.source == "python" else CHECKED
        chosen = np.linspace(0, len(examples) - 1, min(checked, len(examples))).astype(int)
        texts = (str(examples[int(index)]).encode() for index in chosen)
        facts[f"the number of {name} examples"] = len(examples)
        facts[f"the checksum of the {name} examples"] = functools.reduce(
            lambda crc, text: zlib.crc32(text, crc), texts, 0
        )
    return facts


def find_tokenizers(cfg: Config, corpus: Corpus, data_root: Path | None, of_run: Path | None) -> Tokenizers:
    """Returns the tokenizers of the resumed run or of prepared data, or trains new ones.

    Raises:
        UserError: the tokenizers of the prepared data and the run differ, or cannot be loaded or trained.
    """
    if of_run is None and corpus.tokenizers is None:
        return train_tokenizers(cfg.data, corpus.train, data_root)
    first, *others = (Tokenizers.load(folder) for folder in (of_run, corpus.tokenizers) if folder is not None)
    if any(other.to_json() != first.to_json() for other in others):
        raise UserError(
            f"{corpus.tokenizers} are not the tokenizers that {of_run} was trained with: prepare the data again with "
            f"prepare_data.py --tokenizers {of_run}"
        )
    return first


def with_data_sizes(cfg: Config, tokenizers: Tokenizers, labels: Sequence[str] | None) -> Config:
    """Fills in the sizes that depend on the data: vocabularies and the number of classes.

    Raises:
        UserError: a size in the config is smaller than the data requires, there are more classes than the data has,
            or source and target share embeddings but no vocabulary.
    """
    if cfg.model.ties_inputs and not same_tokens(tokenizers.source, tokenizers.target):
        raise cfg.model.error("tie_embeddings", "needs one vocabulary, but the tokenizers of source and target differ")
    needed: dict[str, Any] = {"vocab_size": tokenizers.target.vocab_size}
    if cfg.model.model_class.reads_source:
        needed["source_vocab_size"] = tokenizers.source.vocab_size
    if labels is not None:
        needed["num_classes"] = len(labels)
    for name, size in needed.items():
        written = getattr(cfg.model, name)
        if written is not None and written < size:
            raise cfg.model.error(name, f"is smaller than the {size} that the data has; leave it out, or write {size}")
        if name == "num_classes" and written not in (None, size):
            raise cfg.model.error(name, f"must be {size}, the number of classes in the data; leave it out")
    sizes = {name: getattr(cfg.model, name) or size for name, size in needed.items()}
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **sizes))
