"""Initializes a run with the matching parameters of another run, for fine-tuning."""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from tformer_jax import axes, config
from tformer_jax.base.errors import UserError, list_names
from tformer_jax.base.numbers import counted
from tformer_jax.base.paths import as_path, resolved
from tformer_jax.config import ModelConfig, TrainConfig, flat
from tformer_jax.data.tokenizers import Tokenizers, same_tokens
from tformer_jax.models import conversions, registry
from tformer_jax.parallel.multihost import SINGLE, ProcessGroup
from tformer_jax.runs import run_folder, weights
from tformer_jax.runs.shared_rows import Labels, SharedRows, comparable, shared_rows, side_of
from tformer_jax.runs.trained import load_trained
from tformer_jax.train import lora
from tformer_jax.train.state import on_devices

FREE_SETTINGS = (
    *("family", "vocab_size", "source_vocab_size", "num_classes", "max_length", "encoder_layers", "decoder_layers"),
    *("tie_embeddings", "token_types", "output_bias", "pooling", "pooler*", "prefix_lm"),
    *("head_transform", "transform_*"),
    *("scan_layers", "remat", "*dtype", "attention_backend", "attention_projections", "*dropout"),
    "quantization",
    *("initializer", "init_std", "embedding_std", "scale_residual_init"),
    *("moe.expert_capacity", "moe.balance_loss", "moe.router_z_loss"),
)
"""Globs of the model settings that leave the meaning of loaded parameters unchanged."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Names of the loaded parameters, and of the parameters that were not loaded."""

    loaded: tuple[str, ...]
    other_shape: tuple[str, ...]
    """Present with another shape, as `NAME (16, 8), not (32, 8)`: newly initialized."""
    missing: tuple[str, ...]
    """Only in the new model: newly initialized."""
    unused: tuple[str, ...]
    """Only in the other run."""
    rows: tuple[str, ...] = ()
    """Loaded by row, as `NAME: 7,990 of 8,000 rows kept, 10 new`: rows of tokens or classes that both runs know."""

    @property
    def new(self) -> list[str]:
        """Names of the parameters that are newly initialized."""
        partly = (text.partition(":")[0] for text in self.rows if not text.endswith(" 0 new"))
        return [*(text.partition(" ")[0] for text in self.other_shape), *self.missing, *partly]

    def __str__(self) -> str:
        parts = [f"{counted(len(self.loaded), 'parameter')} loaded"]
        for title, names in (
            ("loaded by row", self.rows),
            ("of another shape, newly initialized", self.other_shape),
            ("missing in that run, newly initialized", self.missing),
            ("not used", self.unused),
        ):
            if names:
                parts.append(f"{len(names)} {title}: {list_names(names, 4)}")
        return "; ".join(parts)


def initial_params(model: nn.Module, seed: int, mesh: Mesh, names: Sequence[str]) -> dict[str, jax.Array]:
    """Creates some of the parameters with which a run of `seed` starts, and no others.

    Args:
        names: with unrolled layers.
    """
    unrolled = registry.build(dataclasses.replace(model.cfg, scan_layers=False))
    leaves = flatten_dict(registry.sharded_shapes(unrolled, mesh), sep="/")

    def init() -> dict[str, jax.Array]:
        params = nn.unbox(registry.init(model, jax.random.key(seed)))
        every = flatten_dict(conversions.convert_layers(params, model.cfg, scan_layers=False), sep="/")
        return {name: every[name] for name in names}

    return on_devices(init, {name: leaves[name] for name in names}, mesh) if names else {}


def load_matching(
    initial: Callable[[Sequence[str]], Mapping[str, jax.Array]],
    model: ModelConfig,
    run: Path,
    mesh: Mesh,
    group: ProcessGroup = SINGLE,
    *,
    labels: Labels = None,
    step: int | None = None,
    tokenizers: Tokenizers | None = None,
) -> tuple[Any, Report]:
    """Returns parameters in the layout of `model`: loaded where `run` has the same name and shape, new elsewhere.

    Layers correspond by number, scanned or not; the report uses the names of unrolled layers. If the vocabularies or
    classes differ, embeddings and heads are loaded row by row, for the tokens or classes that both runs have; the other
    rows are new.

    Args:
        initial: returns newly initialized parameters by their names with unrolled layers (`initial_params`);
            called for the parameters that are not loaded as a whole.
        mesh: mesh that holds the parameters.
        group: all processes of the mesh.
        labels: the classes of `model`.
        step: step of the checkpoint to load, as for `load_trained`.
        tokenizers: tokenizers of `model`; None: parameters along the vocabulary correspond by id.

    Raises:
        UserError: `run` holds no trained model, or no parameter matches.
    """
    trained = load_trained(run, mesh, group, step=step)
    every = flatten_dict(conversions.in_layout_of(model, trained.cfg.model, trained.params), sep="/")
    rows = _shared_rows(model, _shapes(every), run, tokenizers, labels)
    known = _without_other_head(every, labels, run)
    unrolled = dataclasses.replace(model, scan_layers=False)
    leaves = flatten_dict(registry.sharded_shapes(registry.build(unrolled), mesh), sep="/")
    report = _compare(_shapes(leaves), _shapes(known), run, rows)
    params = dict(initial([name for name in leaves if name not in report.loaded]))
    for name in report.loaded:
        params[name] = jax.device_put(known[name].astype(leaves[name].dtype), leaves[name].sharding)
    for name, shared in rows.items():
        params[name] = shared.placed(params[name], every[name])
    stacked = conversions.convert_layers(unflatten_dict(params, sep="/"), unrolled, scan_layers=model.scan_layers)
    where = jax.tree.map(lambda leaf: leaf.sharding, registry.sharded_shapes(registry.build(model), mesh))
    return jax.device_put(stacked, where), report


def check(train: TrainConfig, model: ModelConfig, tokenizers: Tokenizers, run: Path, *, labels: Labels = None) -> None:
    """Checks that the parameters of `run` fit a new run, without loading them.

    Raises:
        UserError: `run` is not the folder of a trained run, has no weights or damaged ones, no parameter matches, or
            LoRA would freeze parameters that are newly initialized or of other tokens.
    """
    check_weights(train, "start_from", run)
    check_tokenizers(train, model, tokenizers, run)
    boxed, every = registry.shapes(registry.build(model)), _shapes_in_layout_of(model, run)
    rows = _shared_rows(model, every, run, tokenizers, labels)
    report = _compare(_unrolled_shapes(model, boxed), _without_other_head(every, labels, run), run, rows)
    if train.lora_rank:
        trainable = _unrolled_shapes(model, lora.trainable_shapes(train, boxed))
        frozen = [name for name in report.new if name not in trainable]
        if frozen:
            names = list_names([*map(repr, frozen)], 4)
            remedy = "; set model.scan_layers=False to name single layers" if model.scan_layers else ""
            raise train.error(
                "lora_whole",
                f"must include {names}: not found in {run} with the same shape, and LoRA would keep their random values"
                + remedy,
            )


def check_run(cfg: config.Config) -> None:
    """Raises `UserError` if `train.start_from` or `train.teacher` does not name the folder of a trained run."""
    for setting in ("start_from", "teacher"):
        run = getattr(cfg.train, setting)
        if run is not None and not (setting == "teacher" and has_distributions(cfg.train)):
            _check_run(cfg.train, setting, as_path(run))


def has_distributions(train: TrainConfig) -> bool:
    """Returns whether `train.teacher` names a folder of stored distributions."""
    if train.teacher is None:
        return False
    from tformer_jax.data.distributions import is_stored

    return is_stored(train.teacher)


def _check_run(train: TrainConfig, setting: str, run: Path) -> None:
    if not (run / "config.json").exists() or not run_folder.holds_weights(run):
        raise train.error(setting, "is not the folder of a trained run")


def check_weights(train: TrainConfig, setting: str, run: Path) -> None:
    """Checks that the run of `train.SETTING` has weights, and a checkpoint of `train.SETTING_step` if that is set.

    Args:
        setting: "start_from" or "teacher".

    Raises:
        UserError: `run` is not the folder of a trained run, has no weights or damaged ones.
    """
    _check_run(train, setting, run)
    if weights.are_quantized(run):
        raise train.error(setting, "has kernels of int8: name the run from which it was exported")
    latest, step = run_folder.latest_step(run), getattr(train, f"{setting}_step")
    if step is not None:
        run_folder.check_step(run, step)
    elif not weights.verify(run, latest) and latest is None:
        raise train.error(setting, "holds no checkpoint: it was stopped before its first one; train it first")


def _without_other_head(known: dict[str, Any], labels: Labels, run: Path) -> dict[str, Any]:
    """Returns the parameters of `run`, without the head if its classes are not `labels`."""
    if run_folder.load_labels(run) == labels:
        return known
    return {name: value for name, value in known.items() if not name.startswith("head/")}


def _shared_rows(
    model: ModelConfig, theirs: Mapping[str, tuple[int, ...]], run: Path, tokenizers: Tokenizers | None, labels: Labels
) -> dict[str, SharedRows]:
    if tokenizers is None:
        return {}
    return shared_rows(model, theirs, tokenizers, _tokenizer_loader(run), (labels, run_folder.load_labels(run)))


def _tokenizer_loader(run: Path) -> Callable[[], Tokenizers]:
    """Returns a function that loads the tokenizers of a run once."""
    return functools.cache(lambda: Tokenizers.load(run / "tokenizers"))


def _shapes_in_layout_of(model: ModelConfig, run: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of `run`, by the names that they have in the layout of `model`."""
    other = config.load(run / "config.json").model
    convert = functools.partial(conversions.in_layout_of, model, other)
    return _shapes(flatten_dict(jax.eval_shape(convert, nn.unbox(registry.shapes(registry.build(other)))), sep="/"))


def _unrolled_shapes(model: ModelConfig, boxed: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of parameters by name, with unrolled layers."""
    convert = functools.partial(conversions.convert_layers, cfg=model, scan_layers=False)
    return _shapes(flatten_dict(jax.eval_shape(convert, nn.unbox(boxed)), sep="/"))


def _shapes(leaves: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in leaves.items()}


def _compare(
    mine: Mapping[str, tuple[int, ...]],
    theirs: Mapping[str, tuple[int, ...]],
    run: Path,
    rows: Mapping[str, SharedRows],
) -> Report:
    """Compares the parameter shapes of a new run (`mine`) with the shapes in `run` (`theirs`).

    Raises:
        UserError: none matches.
    """
    theirs = {name: shape for name, shape in theirs.items() if name not in rows}
    shared = [name for name in mine if name in theirs]
    report = Report(
        loaded=tuple(name for name in shared if mine[name] == theirs[name]),
        other_shape=tuple(f"{name} {theirs[name]}, not {mine[name]}" for name in shared if mine[name] != theirs[name]),
        missing=tuple(name for name in mine if name not in theirs and name not in rows),
        unused=tuple(sorted(theirs.keys() - mine.keys())),
        rows=tuple(f"{name}: {shared_with}" for name, shared_with in rows.items()),
    )
    if not report.loaded:
        raise UserError(f"train.start_from={str(run)!r}: no parameter matches this model ({report})")
    return report


def find_mismatches(train: TrainConfig, model: ModelConfig, tokenizers: Tokenizers, run: Path) -> list[str]:
    """Returns warnings about loaded parameters that this model uses differently than `run` did.

    Raises:
        UserError: LoRA freezes one of them.
    """
    old, new = flat(config.load(run / "config.json").model), flat(model)
    changed = [
        f"model.{name} ({old[name]!r} there, {new[name]!r} here)"
        for name in new
        if new[name] != old[name] and not any(fnmatch.fnmatch(name, glob) for glob in FREE_SETTINGS)
    ]
    problems = [check_tokenizers(train, model, tokenizers, run)]
    if changed:
        problems.append(f"the loaded parameters were trained with other settings: {', '.join(changed)}")
    return [problem for problem in problems if problem]


def check_tokenizers(train: TrainConfig, model: ModelConfig, tokenizers: Tokenizers, run: Path) -> str | None:
    """Returns a warning if `run` has embeddings or output heads of tokens that `tokenizers` do not have.

    Raises:
        UserError: LoRA freezes one of them.
    """
    names = _of_other_tokens(model, tokenizers, run)
    if not names:
        return None
    frozen = [name for name in names if not any(fnmatch.fnmatch(name, glob) for glob in train.lora_whole)]
    other = "for another vocabulary than this run's"
    remedy = f"set data.tokenizer='file' and data.tokenizer_file={str(resolved(run))!r}"
    if train.lora_rank and frozen:
        raise train.error("start_from", f"{frozen[0]} is {other}, and train.lora_rank freezes it: {remedy}")
    return f"{', '.join(names)} of {run} {'is' if len(names) == 1 else 'are'} {other}: {remedy}"


def _of_other_tokens(model: ModelConfig, tokenizers: Tokenizers, run: Path) -> list[str]:
    """Returns the names of the parameters along the vocabulary that `run` has for tokens that this run does not know.

    If the vocabularies cannot be compared, all their tokens count as unknown.
    """
    theirs, others = _shapes_in_layout_of(model, run), _tokenizer_loader(run)
    rows = shared_rows(model, theirs, tokenizers, others)

    def is_other(name: str) -> bool:
        if name in rows:
            return rows[name].dropped > 0
        return not same_tokens(*(getattr(each, side_of(name)) for each in (tokenizers, others())))

    return sorted(
        name for name, (_, _, kind) in comparable(model, theirs).items() if kind == axes.VOCAB and is_other(name)
    )
