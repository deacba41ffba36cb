"""`scripts/xla_flags.py`: prints the XLA flags for a kind of device and a mesh, for an environment variable."""

import argparse
from collections.abc import Sequence

from tformer_jax.cli.common import new_parser
from tformer_jax.parallel.xla_flags import FLAGS, USES, VARIABLES, choose_flags


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the flags on one line; with `--explain`, lists and explains all flags of the device."""
    options = parser().parse_args(argv)
    if options.explain:
        print(f"{VARIABLES[options.device]}:")
        for flag in FLAGS[options.device]:
            print(f"  {flag}\n      {', '.join(flag.uses)}: {flag.meaning}")
    else:
        print(" ".join(map(str, choose_flags(options.device, options.axes))))


def parser() -> argparse.ArgumentParser:
    result = new_parser(
        "xla_flags",
        "Prints the XLA flags that overlap communication with computation.",
        epilog='For example: export XLA_FLAGS="$(python scripts/xla_flags.py gpu fsdp)"; flags for TPUs belong in '
        "LIBTPU_INIT_ARGS.",
    )
    result.add_argument("device", choices=tuple(FLAGS), help="kind of device")
    result.add_argument(
        "axes", nargs="*", type=_axis, metavar="AXIS", help=f"mesh axes larger than 1, of {', '.join(USES[1:])}"
    )
    result.add_argument("--explain", action="store_true", help="list and explain all flags of the device")
    return result


def _axis(text: str) -> str:
    if text not in USES[1:]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh axis; write one or more of {', '.join(USES[1:])}")
    return text
