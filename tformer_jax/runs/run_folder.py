"""A run folder holds everything needed to repeat, continue or use a run.

config.json      the resolved config            metrics.jsonl, tensorboard/   metrics by step
provenance.json  id, versions, hardware         checkpoints/                  state by step
tokenizers/      trained on the training split  weights/, weights.json        the final weights
corpus.json      sizes and checksums of splits  result.json                   the final evaluation
labels.json      names of the classes
start_from.json  parameters of another run      profile/                      traces
imported.json    the files of an imported model damaged/                      checkpoints that cannot be read
events.jsonl     starts, spikes, interruptions  outputs/                      of the last evaluation, by split
model.json       parameters by module, backends report.html                   written if train.report is set
data.json        statistics of the data, and warnings
vocabulary.json  the run whose vocabulary was changed
quantized.json   the run whose kernels are stored as int8
teacher.json     the run that taught this one   alignment.json                the head that aligns words
"""

import contextlib
import dataclasses
import json
import re
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tformer_jax import config
from tformer_jax.base.errors import UserError, list_names
from tformer_jax.base.paths import finite, replacing_folder, write_text
from tformer_jax.config import Config, DecodeConfig, kinds
from tformer_jax.config.convert import flat_values
from tformer_jax.config.decode import AlignmentHead
from tformer_jax.config.metrics import base_metric
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.runs import provenance

CORPUS = "corpus.json"
"""File that identifies the corpus of a run; runs of imported checkpoints and of older versions have none."""
CHOSEN_HEAD, IMPORTED = "alignment.json", "imported.json"
"""File with the cross-attention that aligns words, chosen by given links; file that names an imported checkpoint."""
TEACHER = "teacher.json"
"""File that names the teacher of a run, its weights and their checksum."""
QUANTIZED = "quantized.json"
"""File of a run with kernels of int8 that names the run from which it was exported."""
MIXTURE, TRANSFORMS = "the order of the mixture", "the draws of transforms"
"""Names of facts of corpora that are mixed unequally, and of transformed ones."""
MIXTURE_VERSION, TRANSFORMS_VERSION = 2, 1
"""Their present values."""
OPTIMIZER = "the digest of the optimizer"
"""Name of a fact of runs with an optimizer of Python."""
EARLIER = {
    MIXTURE: ("mixes data.weights in another order", "bc1b2c8"),
    TRANSFORMS: ("draws BPE-dropout in another way", "f3bf8a7"),
}
"""What runs without a fact do otherwise, and the last revision that does it."""

FILES = (
    *("config.json", "provenance.json", "corpus.json", "labels.json", "start_from.json", "imported.json"),
    *("events.jsonl", "model.json", "data.json", "metrics.jsonl", "weights.json", "result.json"),
    *("vocabulary.json", TEACHER, CHOSEN_HEAD, QUANTIZED),
)
FOLDERS = ("tokenizers", "tensorboard", "checkpoints", "weights", "outputs")
"""The files and folders of a run that no other output may replace."""


def owner(path: Path) -> Path | None:
    """Returns the run folder that `path` belongs to, as one of its `FILES` or within one of its `FOLDERS`, or None."""
    folders = [folder.parent for folder in path.parents if folder.name in FOLDERS]
    folders += [path.parent] if path.name in FILES else []
    needed = ("config.json", "provenance.json")
    return next((folder for folder in folders if all((folder / name).exists() for name in needed)), None)


def checkpoints(run: Path) -> Path:
    """Returns the checkpoint folder of a run."""
    return run / "checkpoints"


def weights_json(run: Path) -> Path:
    """Returns the path of `weights.json`: how the final weights were made, and after which step."""
    return run / "weights.json"


def events(run: Path) -> Path:
    """Returns the path of the events of a run."""
    return run / "events.jsonl"


def holds_run(run: Path) -> bool:
    """Returns whether `run` is a run folder.

    Raises:
        UserError: it exists, is not empty and is not a run folder.
    """
    if (run / "config.json").exists():
        return True
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise UserError(f"{run} is not a run folder (it has no config.json); choose another run folder")
    return False


def holds_weights(run: Path) -> bool:
    """Returns whether a run has checkpoints or final weights; it may have been copied without its checkpoints."""
    return checkpoints(run).is_dir() or weights_json(run).exists()


def holds_checkpoint(run: Path) -> bool:
    """Returns whether a run has a complete checkpoint; a checkpoint in progress has a name that is no number."""
    return latest_step(run) is not None


def latest_step(run: Path) -> int | None:
    """Returns the step of the newest complete checkpoint of a run, or None."""
    return latest_in(checkpoints(run))


def latest_in(folder: Path) -> int | None:
    """Returns the step of the newest complete checkpoint in a folder of checkpoints, or None."""
    return max(steps_in(folder), default=None)


def steps_in(folder: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder of checkpoints, in order."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in paths if re.fullmatch(r"[0-9]+", path.name) and path.is_dir())


def check_step(run: Path, step: int) -> None:
    """Raises `UserError` if a run has no complete checkpoint of `step`; the message names the steps that it has."""
    steps = steps_in(checkpoints(run))
    if step not in steps:
        named = f"but of step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}" if steps else "and no other"
        raise UserError(f"{run} has no checkpoint of step {step}, {named}")


@contextlib.contextmanager
def creating(
    run: Path,
    cfg: Config,
    tokenizers: Tokenizers,
    labels: Sequence[str] | None,
    corpus: dict[str, Any] | None = None,
) -> Iterator[Path]:
    """Yields a new run folder, which replaces an earlier run when the block ends, but not if it fails.

    A folder in a bucket is replaced at once, and has its `config.json` last. If `run` is a symbolic link, its target is
    replaced.

    Args:
        corpus: facts that identify the corpus, ready for JSON; None: there is none.

    Raises:
        UserError: the folder cannot be written, or the working directory is in it.
    """
    try:
        with replacing_folder(run) as folder:
            write_json(folder / "provenance.json", {"run_id": uuid.uuid4().hex, **provenance.collect()})
            tokenizers.save(folder / "tokenizers")
            if labels is not None:
                write_json(folder / "labels.json", list(labels))
            if corpus is not None:
                write_json(folder / CORPUS, corpus)
            yield folder
            config.save(cfg, folder / "config.json")
    except OSError as error:
        raise UserError(f"{run} cannot be written ({error.strerror or error}); choose another run folder") from error


def create(run: Path, *contents: Any) -> None:
    """Writes the run folder that `creating` yields, with the same arguments."""
    with creating(run, *contents):
        pass


def check_resumable(run: Path, cfg: Config, corpus: dict[str, Any]) -> Config:
    """Checks that a run can continue with `cfg`, and returns its earlier config; see `adopt`.

    Raises:
        UserError: the corpus changed, or a setting that a resumed run may not change; the run is beyond the new
            end; or it has its final weights but no checkpoint to continue from.
    """
    before = config.load(run / "config.json")
    differences = config.differences(before, cfg)
    unfinished = bool(differences) or not (run / "result.json").exists()
    if unfinished and weights_json(run).exists() and not holds_checkpoint(run):
        raise UserError(
            f"{run} has its final weights but no checkpoint to continue from; start another run from them, with "
            f"train.start_from={str(run)!r} and another run folder"
        )
    refused = [text for text in differences if Config.resume_effect(text.partition(":")[0]) is None]
    if refused:
        shown = list_names(refused, 8, "; ")
        raise UserError(
            f"{run} is a run of another config ({shown}); restore these settings, or start another run from its "
            f"weights, with train.start_from={str(run)!r} and another run folder"
        )
    last = latest_step(run) or 0
    if cfg.train.steps < last and cfg.train.steps != before.train.steps:
        raise cfg.train.error(
            "steps", f"{run} is already at step {last}; write at least {last}, or choose another run folder"
        )
    if mixed := _of_other_scores(run, before, cfg, differences):
        raise UserError(
            f"earlier evaluations of {run} used another setting ({mixed[0]}), so that train.keep_best and "
            "train.patience cannot compare their scores with new ones; restore it, or choose another run folder"
        )
    check_corpus(run, corpus)
    recorded = read_json(run / CORPUS) if (run / CORPUS).exists() else EARLIER
    for fact, (difference, revision) in EARLIER.items():
        if unfinished and fact in corpus and fact not in recorded:
            raise UserError(
                f"{run} is of an earlier version, which {difference}: finish it with revision {revision}, or choose "
                "another run folder"
            )
    return before


def resumable_settings(cfg: Config) -> dict[str, Any]:
    """Returns the settings that a resumed run may change, by full name, and JAX's matmul precision, as in JSON."""
    settings = {name: value for name, value in config.flat(cfg).items() if Config.resume_effect(name)}
    return json.loads(json.dumps(settings | {provenance.MATMUL_PRECISION: provenance.matmul_precision()}))


def changed_settings(before: Mapping[str, Any], cfg: Config) -> list[str]:
    """Returns the settings that differ from earlier `resumable_settings`, as `optim.clip_norm: 1.0 -> 0.5`."""
    now = resumable_settings(cfg)
    return [f"{name}: {before[name]!r} -> {now[name]!r}" for name in now if before.get(name, now[name]) != now[name]]


def adopt(run: Path, cfg: Config) -> None:
    """Makes `cfg` the config of a run whose checkpoint has been restored; removes its result if a setting changed."""
    if config.differences(config.load(run / "config.json"), cfg):
        (run / "result.json").unlink(missing_ok=True)
        config.save(cfg, run / "config.json")


def check_corpus(run: Path, corpus: dict[str, Any]) -> None:
    """Raises `UserError` if the facts that identify a corpus differ from the recorded facts of a run."""
    if not (run / CORPUS).exists():
        return
    known = read_json(run / CORPUS)
    for name, value in corpus.items():
        if name in known and known[name] != value:
            what = "the optimizer" if name == OPTIMIZER else "the data"
            raise UserError(
                f"{what} of {run} changed ({name} is {value} and was {known[name]}); restore {what}, or choose "
                "another run folder"
            )


def weights_of(run: Path, step: int | None = None) -> dict[str, Any]:
    """Returns the kind of the weights that a run is loaded with, and the steps that they come from.

    Args:
        step: the step of the checkpoint that is loaded; None: the final weights, or the newest checkpoint.
    """
    if step is not None:
        return {"kind": "checkpoint", "steps": [step]}
    latest, path = latest_step(run), weights_json(run)
    facts = read_json(path) if path.exists() else {"at_step": -1}
    if facts["at_step"] < (latest or 0):
        return {"kind": "checkpoint", "steps": [latest]}
    return {"kind": facts["weights"], "steps": facts["steps"]}


def _of_other_scores(run: Path, before: Config, cfg: Config, differences: list[str]) -> list[str]:
    """Returns the differences that change the value of `train.metric`, if a resumed run compares it with earlier ones.

    A finished run may be resumed with more steps later.
    """
    if not (cfg.train.keep_best or cfg.train.patience) or not holds_checkpoint(run):
        return []
    old, new = score_settings(before), score_settings(cfg)
    changed = tuple(f"{name}:" for name in new if old[name] != new[name])
    return [difference for difference in differences if difference.startswith(changed)]


def score_settings(cfg: Config) -> dict[str, Any]:
    """Returns the settings, by full name, that change the value of `train.metric` in a resumed run."""
    settings = config.flat(cfg)
    names = ["eval.examples"]
    if base_metric(cfg.train.metric) in kinds.METRICS:
        names += ["eval.references", "eval.bleu_tokenize", "eval.spbleu_model", "eval.command"]
        names += (name for name in settings if name.startswith("decode."))
    weights = "ema" if cfg.train.weights == "ema" else "last"  # others are not evaluated during training
    return {name: settings[name] for name in names} | {"train.weights": weights}


def score_fingerprint(cfg: Config) -> int:
    """Returns a checksum of the `score_settings` that are not the defaults; scores are comparable if it is equal."""
    defaults = flat_values(Config.defaults())
    chosen = {name: value for name, value in score_settings(cfg).items() if value != defaults[name]}
    return zlib.crc32(json.dumps(chosen).encode())


def result_of(run: Path, cfg: Config) -> dict[str, Any] | None:
    """Returns the result of a run that finished with exactly these settings, else None; also for a damaged file."""
    path = run / "result.json"
    if not path.exists() or config.differences(config.load(run / "config.json"), cfg):
        return None
    try:
        return read_result(run)
    except UserError:
        if not holds_checkpoint(run):
            raise UserError(f"{path} is damaged, and {run} has no checkpoint: restore it from a copy") from None
        return None


def read_result(run: Path) -> dict[str, Any]:
    """Reads the result of a finished run.

    Raises:
        UserError: the file is missing, damaged, or not the result of a run.
    """
    result = read_json(path := run / "result.json")
    if "test" not in result:
        raise UserError(f"{path} is not the result of a run: restore it from a copy, or remove it")
    return result


def run_id(run: Path) -> str:
    """Returns the random identifier that `create` assigned."""
    return read_json(run / "provenance.json")["run_id"]


def write_chosen_head(run: Path, head: AlignmentHead, facts: Mapping[str, Any]) -> Path:
    """Records the cross-attention that aligns words, with how it was chosen, and returns the path of the record."""
    write_json(path := run / CHOSEN_HEAD, {**head._asdict(), **facts})
    return path


def with_chosen_head(run: Path, cfg: Config) -> Config:
    """Returns a config with the recorded choice of the cross-attention that aligns words, unless it names one."""
    path, default = run / CHOSEN_HEAD, DecodeConfig().aligning
    if cfg.decode.aligning != default or not path.exists():
        return cfg
    chosen = read_json(path)
    settings = {f"alignment_{name}": chosen.get(name, value) for name, value in default._asdict().items()}
    return dataclasses.replace(cfg, decode=dataclasses.replace(cfg.decode, **settings))


def load_labels(run: Path) -> tuple[str, ...] | None:
    """Returns the class names of a classifier in the order of its logits; None for other models."""
    path = run / "labels.json"
    return tuple(read_json(path, list)) if path.exists() else None


def write_outputs(run: Path, split: str, evaluation: Mapping[str, Any]) -> None:
    """Writes the outputs and losses of an evaluation, replacing the file of an earlier evaluation."""
    (run / "outputs").mkdir(exist_ok=True)
    write_json(run / "outputs" / f"{split}.json", evaluation)


def read_json(path: Path, kind: type = dict) -> Any:
    """Reads a file that `write_json` wrote: an object (`kind=dict`) or an array (`kind=list`).

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, kind):
            raise ValueError(f"a JSON {type(value).__name__} where a {kind.__name__} is expected")
        return value
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: restore it from a copy") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): restore it from a copy, or remove it") from None


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns the records of `metrics.jsonl` or `events.jsonl`, except damaged ones; [] without the file."""
    try:
        lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    except OSError:
        return []
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON atomically; non-finite numbers become null."""
    write_text(path, json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n")
