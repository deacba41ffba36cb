"""`scripts/translate.py`: translates texts with a trained model."""

from collections.abc import Sequence

from tformer_jax.cli import generation, languages


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one or several translations of each text, in order; a blank text gives blank lines."""
    parser = generation.make_parser("translate", "Translates texts with a trained model.", "--n-best")
    languages.add_languages(parser)
    generation.run_command(parser.parse_args(argv), "translate", lambda _, output: output.text)
