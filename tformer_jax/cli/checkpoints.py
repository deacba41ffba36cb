"""What `scripts/import_hf.py` and `scripts/export_hf.py` do after their flags are read."""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

import tformer_jax as tj
from tformer_jax.config import Config, ConfigError, DataConfig, ModelConfig, read_mesh
from tformer_jax.data.tokenizers import Tokenizers, load_checkpoint_tokenizers
from tformer_jax.data.tokenizers.exported import save_tokenizers
from tformer_jax.interop import files, generation, hf
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.train import run_folder, weights

IMPORTED = "imported.json"
PARAM_DTYPES = ("float32", "bfloat16")


def make_run(folder: Path, run: Path, mesh: str | None = None) -> None:
    """Makes a run folder of the checkpoint in `folder`, replacing an earlier run.

    Args:
        mesh: devices that hold the parameters meanwhile, as for `tj.load`; None: the first device.

    Raises:
        ConfigError: the checkpoint is damaged, or this package cannot represent it.
    """
    theirs = files.read_config(folder)
    cfg, params, headless = _model(folder, theirs, None if mesh is None else make_mesh(read_mesh(mesh)))
    tokenizers = _tokenizers(folder, cfg)
    decode, unapplied = generation.decoding(folder, theirs, cfg)
    labels = None if headless or cfg.family != "classifier" else hf.labels(theirs)
    run_folder.create(run, Config(name=run.name, model=cfg, data=_data(run, cfg), decode=decode), tokenizers, labels)
    checksums = {path.name: _checksum(path) for path in sorted(folder.iterdir()) if path.is_file()}
    facts = {"model_type": theirs["model_type"], "folder": str(folder.resolve()), "sha256": checksums}
    run_folder.write_json(run / IMPORTED, facts)
    weights.save(run, params, "imported", [], 0)
    print(f"{run}: {theirs['model_type']}, {cfg.family}, vocabulary of {cfg.vocab_size:,}")
    if headless:
        print("no classification head: a random one of two classes, to be trained", file=sys.stderr)
    if unapplied:
        print(f"not applied: {', '.join(unapplied)}", file=sys.stderr)


def save_run(options: argparse.Namespace) -> None:
    """Saves the model and the tokenizer of the run `options.run` in `options.folder`.

    Raises:
        ConfigError: no architecture, or not `options.model_type`, computes the same as the model.
    """
    run = tj.load(options.run, mesh=options.mesh)
    family = run.config.model.family
    model_type = _save(options, run)
    why_not = save_tokenizers(options.folder, run.tokenizers, model_type, pair=family == "seq2seq")
    ids = hf.token_ids(run.tokenizers.target.special, family)
    (options.folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    print(f"{options.folder}: {hf.ARCHITECTURES[model_type].name}")
    if why_not:
        print(f"without a tokenizer: {why_not}", file=sys.stderr)


def _model(folder: Path, theirs: dict[str, Any], mesh: Mesh | None) -> tuple[ModelConfig, Any, bool]:
    """Returns the config, the parameters, and whether the classification head is a new one."""
    dtype = theirs.get("dtype") or theirs.get("torch_dtype")
    settings: dict[str, Any] = {"mesh": mesh, "param_dtype": dtype if dtype in PARAM_DTYPES else "float32"}
    try:
        return *hf.load(folder, **settings), False
    except hf.NoHeadError:
        return *hf.load(folder, **settings, num_classes=2), True


def _tokenizers(folder: Path, cfg: ModelConfig) -> Tokenizers:
    tokenizers = load_checkpoint_tokenizers(folder)
    if tokenizers.target.vocab_size > cfg.known("vocab_size"):
        raise ConfigError(
            f"{folder}: its tokenizer has {tokenizers.target.vocab_size} tokens, and its model only {cfg.vocab_size}"
        )
    return tokenizers


def _data(run: Path, cfg: ModelConfig) -> DataConfig:
    """Returns data settings that fit the model, for fine-tuning on `train.jsonl` with the tokenizers of the run."""
    length = min(64, cfg.max_length)
    return DataConfig(
        source="jsonl",
        train=("train.jsonl",),
        tokenizer="file",
        tokenizer_file=str(run.resolve()),
        batching="packed" if cfg.family == "decoder_lm" else "buckets",
        bucket_lengths=(length,),
        window=length,
    )


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _save(options: argparse.Namespace, run: tj.Run) -> str:
    """Writes the model as the given or original `model_type`, or as the first one that holds it; returns that one.

    Raises:
        ConfigError: no architecture holds the model exactly.
    """
    imported = options.run / IMPORTED
    given = options.model_type
    if given is None and imported.exists():
        given = json.loads(imported.read_text(encoding="utf-8"))["model_type"]
    theirs = hf.token_ids(run.tokenizers.target.special, run.config.model.family)
    if run.labels is not None:
        theirs["id2label"] = {str(index): label for index, label in enumerate(run.labels)}
    for model_type in [given] if given else hf.ARCHITECTURES:
        try:
            hf.save(options.folder, model_type, run.config.model, run.params, **theirs)
            return model_type
        except ConfigError:
            if given:
                raise
    raise ConfigError(
        f"none of the architectures {', '.join(hf.ARCHITECTURES)} holds this model exactly: name one with --model-type "
        "to see what it lacks"
    )
