"""`scripts/configs.py`: lists the configs that come with the package."""

import ast
from collections.abc import Sequence

from tformer_jax.cli.common import new_parser
from tformer_jax.cli.config_file import shipped_configs


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the name of each config and the first line of its docstring."""
    description = "Lists the configs that come with the package: train one with --config NAME[:VARIANT]."
    new_parser("configs", description).parse_args(argv)
    for name, path in shipped_configs().items():
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        print(f"{name:<22}{docstring.splitlines()[0]}")
