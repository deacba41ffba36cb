"""Measures a translator in float32, bfloat16 products and int8, here and in CTranslate2: size, tokens/s and BLEU.

python scripts/train.py --config configs/translate_multi30k.py:baseline --config.model.norm_placement=post \\
  --config.model.position=sinusoidal_halves --data DIR --run runs/translate_multi30k_marian
python -m tests.programs.int8 runs/translate_multi30k_marian --data DIR --record tests/programs/int8.json

These two settings make the model a Marian, which CTranslate2 has. All systems translate the test split, from texts to
texts, with the same beams, length penalty and stopping rule, in alternation after a first pass; times are medians of
the passes. Sizes are those of the files with the parameters.
"""

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import sacrebleu

import tformer_jax as tj
from tests import commands
from tformer_jax.cli import export_hf
from tformer_jax.data.corpora import load_corpus
from tformer_jax.lab.benchmarks.turns import time_second_call
from tformer_jax.runs import provenance

ALPHA = 0.6
"""Length penalty: a score is divided by the length to this power."""
PEER = "CTranslate2"
Translate = Callable[[list[str]], list[str]]


def load_systems(run: Path, folder: Path, beams: int) -> dict[str, tuple[Translate, int]]:
    """Returns the systems by name: what translates, and the bytes of its parameters."""
    made: dict[str, tuple[Translate, int]] = {"float32": (translator(run, beams), folder_bytes(run / "weights"))}
    made["float32, bfloat16 products"] = with_bfloat16_products(translator(run, beams)), made["float32"][1]
    for name in ("int8_weights", "int8"):
        export_hf.main(["--run", str(run), str(folder / name), "--format", "run", "--quantization", name])
        made[name] = translator(folder / name, beams), folder_bytes(folder / name / "weights")
    for name in ("float32", "int8"):
        place = folder / f"ctranslate2_{name}"
        export_hf.main(["--run", str(run), str(place), "--format", "ctranslate2", "--quantization", name])
        made[f"{PEER}, {name}"] = peer(place, beams, tj.load(run).config), (place / "model.bin").stat().st_size
    return made


def translator(path: Path, beams: int) -> Translate:
    """Returns what translates with a run."""
    run = tj.load(path)
    search = {"strategy": "beam", "beams": beams, "length_alpha": ALPHA, "early_stopping": "first", "unknown": "omit"}
    return lambda texts: run.translate(texts, **search)


def with_bfloat16_products(translate: Translate) -> Translate:
    """Returns what translates with `JAX_DEFAULT_MATMUL_PRECISION=bfloat16`."""

    def call(texts: list[str]) -> list[str]:
        with jax.default_matmul_precision("bfloat16"):
            return translate(texts)

    return call


def peer(folder: Path, beams: int, cfg: Any) -> Translate:
    """Returns what translates with CTranslate2, with the faster of two uses of the cores.

    All cores share each batch, or each has batches of its own, of as many rows in all. The first call compares them.
    """
    import ctranslate2
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    cores = len(os.sched_getaffinity(0))
    never = [[name] for name in ("<pad>", "<s>")]
    longest = cfg.decode.max_new_tokens or cfg.model.max_length
    search = {"beam_size": beams, "length_penalty": ALPHA, "suppress_sequences": never, "max_decoding_length": longest}
    uses = [
        functools.partial(
            ctranslate2.Translator(str(folder), inter_threads=parts, intra_threads=cores // parts).translate_batch,
            max_batch_size=-(-cfg.eval.batch_size // parts),
            **search,
        )
        for parts in sorted({1, cores})
    ]

    def translate(texts: list[str]) -> list[str]:
        rows = [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(texts)["input_ids"]]
        if len(uses) > 1:
            uses[:] = [min(uses, key=lambda use: time_second_call(functools.partial(use, rows))())]
        outputs = [tokenizer.convert_tokens_to_ids(result.hypotheses[0]) for result in uses[0](rows)]
        return tokenizer.batch_decode(outputs, skip_special_tokens=True)

    return translate


def folder_bytes(folder: Path) -> int:
    """Returns the total size of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(run: Path, data: Path | None, *, examples: int, rounds: int, beams: int) -> dict[str, Any]:
    """Returns the size, the tokens per second and the BLEU of each system."""
    loaded = tj.load(run)
    test = load_corpus(loaded.config, data).test
    limit = loaded.config.model.max_length - loaded.tokenizers.source.special.added_to_side
    chosen = [test[index] for index in range(min(examples, len(test)))]
    pairs = [pair for pair in chosen if len(loaded.tokenizers.source.encode(pair["source"])) <= limit]
    sources, references = ([pair[side] for pair in pairs] for side in ("source", "target"))
    encode = loaded.tokenizers.target.encode_batch
    with tempfile.TemporaryDirectory() as folder:
        systems = load_systems(run, Path(folder), beams)
        outputs = {name: translate(sources) for name, (translate, _) in systems.items()}
        times: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(rounds):
            for name, (translate, _) in systems.items():
                start = time.perf_counter()
                translate(sources)
                times[name].append(time.perf_counter() - start)
    bleu, results = sacrebleu.BLEU(), {}
    for name, (_, size) in systems.items():
        tokens = sum(len(ids) + 1 for ids in encode(outputs[name]))
        results[name] = {
            "bytes": size,
            "tokens_per_second": tokens / statistics.median(times[name]),
            "bleu": bleu.corpus_score(outputs[name], [references]).score,
            "outputs_as_float32": sum(map(str.__eq__, outputs[name], outputs["float32"])) / len(sources),
        }
    left_out = len(chosen) - len(pairs)  # longer than the model
    settings = {"examples": len(sources), "left_out": left_out, "rounds": rounds, "beams": beams, "length_alpha": ALPHA}
    return {"settings": settings, "signature": str(bleu.get_signature()), "systems": results}


def main() -> None:
    """Prints and records the figures of each system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--examples", type=int, default=1000, help="number of test examples")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--record", type=Path)
    options, revision = parser.parse_args(), provenance.collect()["git_revision"]
    sizes = {"examples": options.examples, "rounds": options.rounds, "beams": options.beams}
    results = measure(options.run, options.data, **sizes)
    for name, row in results["systems"].items():
        figures = f"{row['bytes'] / 2**20:.1f} MiB, {row['tokens_per_second']:,.0f} tokens/s, BLEU {row['bleu']:.2f}"
        print(f"{name}: {figures}, {row['outputs_as_float32']:.0%} of the outputs as float32")
    if options.record:
        about = {"git_revision": revision, "run": commands.describe_run(options.run)}
        commands.write_record(options.record, "tests.programs.int8", **about, **results)


if __name__ == "__main__":
    main()
