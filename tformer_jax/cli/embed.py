"""`scripts/embed.py`: embeds texts with a trained model."""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tformer_jax.base.errors import RunError, UserError
from tformer_jax.base.paths import replacing
from tformer_jax.cli import lines, outputs
from tformer_jax.cli.common import check_writable, load_run
from tformer_jax.cli.inputs import Line, Source
from tformer_jax.config.kinds import EMBEDDING_POOLINGS

NAMES = ("embedding",)
"""Field that is added to a record."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the embedding of each text as numbers separated by spaces, in order, or writes them to --output."""
    options = parser().parse_args(argv)
    as_array = options.output is not None and options.output.suffix == ".npy"
    if options.output is not None and options.output.name.endswith((".npy.gz", ".npz")):
        raise UserError(f"{options.output}: arrays are not compressed: write .npy")
    if as_array and outputs.is_stream(options.output):
        raise UserError(f"{options.output} is not a regular file, and .npy output needs one: choose another --output")
    if as_array and (options.resume or options.on_long_line == "skip"):
        raise UserError(
            f"{options.output} is written when all texts are embedded, with one row per text: omit --resume and "
            "--on-long-line skip"
        )
    source = lines.open_source(options)
    if as_array:
        check_writable(options.output, "--output")
    run = load_run(options, needs_head=False)
    names = ("pooling", "normalize", "prompt")
    embedder = run.embedder(**{name: getattr(options, name) for name in names})
    for name in names:
        setattr(options, name, getattr(embedder, name))
    stream = functools.partial(embedder.stream, run.params)
    work = lines.Work(options, stream, plain, added, NAMES, settings=names)
    if as_array:
        write_array(source, work)
    else:
        lines.process_lines(source, work)


def plain(_: Line, embedding: np.ndarray) -> list[str]:
    """Returns the plain output: numbers with the precision of float32, separated by spaces."""
    return [" ".join(f"{value:.9g}" for value in embedding)]


def added(_: Line, embedding: np.ndarray) -> dict[str, Any]:
    """Returns the field to add to a record."""
    return {NAMES[0]: embedding.tolist()}


def write_array(source: Source, work: lines.Work[np.ndarray]) -> None:
    """Writes all embeddings to a .npy file, float32 [texts, D], atomically, and how they were made.

    Raises:
        UserError: as in `lines.process_lines`; nothing is written.
        RunError: the file cannot be written.
    """
    path = work.options.output.resolve()
    long = lines.LongLines(source, work.long_texts)
    rows = []
    for index, (_, embedding) in enumerate(lines.pair_results(source, work)):
        long.action(index)
        rows.append(embedding)
    if not rows:
        raise UserError("there is no text to embed")
    try:
        with replacing(path) as partial, partial.open("wb") as file:
            np.save(file, np.stack(rows))
    except OSError as error:
        raise RunError(f"{work.options.output} cannot be written: {error.strerror}") from error
    facts = {**lines.settings_facts(work), "input": source.identity()}
    outputs.write_facts(outputs.provenance_path(path), facts)
    long.report()


def parser() -> argparse.ArgumentParser:
    result = lines.make_parser(
        "embed",
        "Embeds texts: pools the last hidden states of a language model, or of the encoder of a classifier, a masked "
        "language model or a translator. An --output that ends in .npy is a float32 array with one row per text.",
    )
    lines.add_field(result)
    add_pooling(result)
    result.add_argument(
        "--prompt", metavar="NAME", help="prompt of embed.prompts to put before each text (default: embed.prompt)"
    )
    return result


def add_pooling(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for how an embedding is computed from the states of its tokens."""
    parser.add_argument(
        "--pooling",
        choices=EMBEDDING_POOLINGS,
        help="embeddings: the mean over all tokens, the first or the last token, ... (default: embed.pooling)",
    )
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="scale embeddings to length 1 (default: embed.normalize)",
    )
