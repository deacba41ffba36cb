"""Reports the hardware, the placement of a config on it, and problems: python scripts/doctor.py --config FILE"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.lab.commands.doctor import main

    run_main(main)
