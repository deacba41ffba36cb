"""What `scripts/export_hf.py` does after its flags are read."""

import argparse
import json
import sys

import tformer_jax as tj
from tformer_jax.cli.checkpoints import IMPORTED
from tformer_jax.config import ConfigError
from tformer_jax.data.tokenizers.exported import save_tokenizers
from tformer_jax.interop import generation, hf
from tformer_jax.train import run_folder


def save_run(options: argparse.Namespace) -> None:
    """Saves the model, the tokenizer and the decoding settings of the run `options.run` in `options.folder`.

    Raises:
        ConfigError: no architecture, or not `options.model_type`, computes the same as the model.
    """
    run = tj.load(options.run, mesh=options.mesh)
    family = run.config.model.family
    model_type = _save(options, run)
    why_not = save_tokenizers(options.folder, run.tokenizers, model_type, pair=family == "seq2seq")
    special = run.tokenizers.target.special
    fields = hf.token_ids(special, run.config.model)
    unwritten: list[str] = []
    if family in ("seq2seq", "decoder_lm"):
        settings, unwritten = generation.generation_fields(run.config.decode)
        suppressed = {"bad_words_ids": [[token] for token in special.suppressed]} if special.suppressed else {}
        fields |= settings | suppressed
    (options.folder / "generation_config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    print(f"{options.folder}: {hf.architecture_of(model_type, family).name}")
    if why_not:
        print(f"without a tokenizer: {why_not}", file=sys.stderr)
    if unwritten:
        print(f"not written: {', '.join(unwritten)}", file=sys.stderr)


def _save(options: argparse.Namespace, run: tj.Run) -> str:
    """Writes the model as the given or original `model_type`, or as the first one that holds it; returns that one.

    Raises:
        ConfigError: no architecture holds the model exactly.
    """
    imported = options.run / IMPORTED
    given = options.model_type
    if given is None and imported.exists():
        kind = run_folder.read_json(imported).get("model_type")
        given = kind if kind in hf.ARCHITECTURES else None
    theirs = hf.token_ids(run.tokenizers.target.special, run.config.model)
    if run.labels is not None:
        theirs["id2label"] = {str(index): label for index, label in enumerate(run.labels)}
    problems = set()
    for model_type in [given] if given else hf.ARCHITECTURES:
        try:
            hf.save(options.folder, model_type, run.config.model, run.params, **theirs)
            return model_type
        except ConfigError as error:
            if given:
                raise
            problems.add(str(error).partition(": ")[2])
    reason = problems.pop() if len(problems) == 1 else "name one with --model-type to see what it lacks"
    raise ConfigError(f"none of the architectures {', '.join(hf.ARCHITECTURES)} represents this model: {reason}")
