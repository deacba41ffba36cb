"""Chooses among the outputs of n-best lists: python scripts/rerank.py nbest.jsonl"""

if __name__ == "__main__":
    from tformer_jax.cli import interrupt

    interrupt.install_handler()
    from tformer_jax.cli.common import run_main
    from tformer_jax.cli.rerank import main

    run_main(main)
