"""Reports the hardware, the placement of a config on it, and problems: python scripts/doctor.py --config FILE"""

from tformer_jax.cli.common import run_main
from tformer_jax.cli.doctor import main

if __name__ == "__main__":
    run_main(main)
