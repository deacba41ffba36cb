"""`scripts/doctor.py`: reports this machine, the placement of a config on it, and the problems found."""

import argparse
from collections.abc import Sequence

from tformer_jax.base.errors import UserError
from tformer_jax.cli.common import add_data, add_number, new_parser, run_path
from tformer_jax.cli.config_file import read_config


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the report; exits with 1 if there are problems."""
    options, overrides = parser().parse_known_args(argv)
    given = [*overrides, *(f"--{name}" for name in ("devices", "memory") if getattr(options, name))]
    if given and options.config is None:
        raise UserError(f"{given[0]} applies to a config: add --config FILE")
    cfg = read_config(options.config, overrides) if options.config is not None else None
    from tformer_jax.lab.commands import doctor_report

    doctor_report.print_report(cfg, options)


def parser() -> argparse.ArgumentParser:
    """Returns the parser; settings of the config are separate."""
    result = new_parser(
        "doctor",
        "Shows this machine, the placement of a config on it, and problems. Nothing is computed.",
        epilog="Every setting of the config can be changed: --config.parallel.fsdp=4",
    )
    result.add_argument("--config", metavar="FILE[:VARIANT]", help="for example configs/translate_cldr.py")
    result.add_argument("--run", type=run_path, metavar="DIR", help="run folder (default: runs/NAME of the config)")
    add_data(result)
    add_number(result, "--devices", "assume N devices, of all hosts together")
    add_number(result, "--memory", "assume this much memory per device, in GiB", unit="GIB")
    return result
