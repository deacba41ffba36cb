"""`scripts/attention.py`: shows what a trained model attends to, its residual stream, and its predictions by layer."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tformer_jax.base import checks
from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import resolved
from tformer_jax.cli import languages, lines
from tformer_jax.cli.common import add_number, add_path, check_writable, run_parser

NAME = "attention.html"


def main(argv: Sequence[str] | None = None) -> None:
    """Writes a page for one text, or arrays for all texts of a file, and prints the path."""
    options = parser().parse_args(argv)
    check_flags(options)
    for path, flag in ((options.output, "--output"), (options.npz, "--npz")):
        if path is not None:
            check_writable(path, flag)
    from tformer_jax.cli import attention_page

    attention_page.write_outputs(options, page_path(options))


def parser() -> argparse.ArgumentParser:
    result = run_parser(
        "attention",
        "Shows what a model attends to in a text, as one HTML file that needs no network: heat maps by layer and head, "
        "their mean and rollout, what the mask hides, norms of the residual stream, and predictions by layer (logit "
        "lens). A translation model reads source<tab>target; without a target, it translates the source first. A "
        "prefix LM reads prompt<tab>continuation; without a continuation, the text is the prompt.",
    )
    result.add_argument("text", nargs="?", help="the text")
    add_number(result, "--layer", "layer that is shown first (default: the last)", lowest=0, unit="L")
    add_number(result, "--head", "head that is shown first (default: their mean)", lowest=0)
    add_path(result, "--output", f"the page (default: {NAME} in the run folder)")
    add_path(result, "--batch", "read texts from the lines of a file; needs --npz")
    add_path(result, "--npz", "write all arrays, such as 0/weights/encoder of the first text")
    add_path(
        result,
        "--links",
        "choose the head whose cross-attention aligns the words of the pairs of --batch best, and record it in "
        "the run; FILE has the links of each pair as fast_align and eflomal write them, 0-0 1-2 (0p1: possible)",
    )
    lines.add_field(result)
    languages.add_languages(result, by_line=False)
    return result


def page_path(options: argparse.Namespace) -> Path:
    """Returns the path of the page."""
    return options.output or options.run / NAME


def check_flags(options: argparse.Namespace) -> None:
    """Raises `UserError` if the flags do not fit each other, or a package is missing."""
    if (options.text is None) == (options.batch is None):
        raise UserError("write one text, or name a file of texts with --batch")
    if options.links is not None and options.batch is None:
        raise UserError("--links needs --batch FILE with source<tab>target in each line")
    if options.batch is None:
        if options.npz is not None and resolved(options.npz) == resolved(page_path(options)):
            raise UserError(f"--npz {options.npz}: is the page's file; name another file for the arrays")
        checks.require_pages("this command")
        return
    if options.npz is None and options.links is None:
        raise UserError("--batch needs --npz FILE, to which the arrays are written, or --links FILE")
    both_exist = options.npz is not None and options.npz.exists() and options.batch.exists()
    if both_exist and options.npz.samefile(options.batch):
        raise UserError(f"{options.npz} is both --batch and --npz: name another file for the arrays")
    for name in ("output", "layer", "head"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is for the page of one text: leave it out with --batch")
