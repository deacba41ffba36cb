"""Runs every example of the READMEs in order in a copy of the checkout, with small models and generated corpora."""

import gzip
import importlib.util
import itertools
import os
import random
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.helpers import build
from tformer_jax import presets
from tformer_jax.interop import hf

ROOT = Path(__file__).resolve().parents[1]
SHORT = "--config.train.steps=2 --config.model.dim=16 --config.model.num_heads=4 --config.model.ffn_dim=16 "
SHORT += "--config.eval.examples=2 --config.eval.samples=1 --config.decode.max_new_tokens=4"
AVERAGED = "--config.train.checkpoint_every=1 --config.train.average=2"
RUNS = {
    "runs/translate_cldr_en_de": "configs/translate_cldr.py",
    "runs/translate_multi30k": "configs/translate_multi30k.py",
    "runs/classify_rt_polarity": "configs/classify_rt_polarity.py",
    "runs/lm_tiny_shakespeare_cpu": "configs/lm_tiny_shakespeare.py",
    "runs/pretrain_stdlib_masked_tokens": "configs/pretrain_stdlib.py",
    "runs/NAME": "configs/translate_multi30k.py",
    "runs/many": "many.py",
}
"""The runs that the examples use, and their configs."""
MANY = ROOT / "configs" / "README.md"
"""Its first config in Python is `many.py`."""
TEST_SETS = {
    "texts.tsv": "red dog\tfr\tun\n",
    "news.tsv": "source_language\ttarget_language\tsource\ttarget\nen\tde\tred dog\troter Hund\n",
    "wmt.jsonl": '{"src": "red dog", "ref_a": "a", "ref_b": "b", "sl": "en", "tl": "de", "doc": "1"}\n',
}
"""Files that the examples of `runs/many` read."""
STAND_INS = {" DIR": " corpora", "configs/x.py": "configs/translate_cldr.py", "node1:9876": "localhost:29876"}
"""Values for the placeholders of the examples."""
SMALLER = {
    "train.py": f"{SHORT} --overwrite",
    "train.py --config configs/translate_multi30k.py:bidirectional": AVERAGED,
    "sweep.py": SHORT,
    "benchmark.py train --record": "--case lm_small --rounds 1 --steps 1",
    "benchmark.py train --operations": "--steps 1",
    "benchmark.py decode": "--lines 0 --rounds 1 --layers 1 --dim 16 --heads 2 --ffn-dim 16 --vocab 64 --length 4",
    "benchmark.py paged": "--rows 16 --length 512 --layers 1 --dim 64 --steps 1 --rounds 1",
    "benchmark.py growth": "--only experts --steps 1",
    "benchmark.py attention": "--length 64",
    "benchmark.py data": "--seconds 0.1",
}
"""Flags that shorten a command, by its prefix."""
ELSEWHERE = (
    "pip install",
    "pytest",
    "export ",
    "curl ",
    "python scripts/serve.py",
    "python scripts/pipeline.py",
    "python -m venv",
    "python3 -m venv",
)
"""Commands that install or test, as continuous integration does, serve, as `test_the_server_answers_the_example`, or
run others, as `tests/cli/test_pipeline.py` does."""
OF_PACKAGES = {
    "flatbuffers": ("python scripts/export_steps.py",),
    "libtpu": ("python scripts/describe.py --preset gpt2 --topology",),
    "sacremoses": tuple(
        f"python scripts/train.py --config configs/translate_multi30k.py:{variant}"
        for variant in ("both_directions", "bidirectional")
    ),
}
"""Beginnings of commands that need a package."""


def commands(text: str) -> list[str]:
    """Returns the shell commands of all bash and console blocks."""
    actual = []
    for kind, block in re.findall(r"```(bash|console)\n(.*?)```", text, flags=re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        lines = [line for line in lines if not line.startswith("#")]
        actual += [line.removeprefix("$ ") for line in lines if kind == "bash" or line.startswith("$ ")]
    return [part.strip() for line in actual for part in line.split(" && ")]


def smaller(command: str) -> str:
    """Returns the command with shortening flags, and with its placeholders filled in."""
    for name, stand_in in STAND_INS.items():
        command = command.replace(name, stand_in)
    command = command.partition("  #")[0]
    for beginning, flags in SMALLER.items():
        if f"scripts/{beginning}" in command:
            command += f" {flags}"
    return command


def all_commands() -> list[str]:
    texts = (path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("**/README.md")))
    actual = (command for text in texts for command in commands(text))
    return [command for command in dict.fromkeys(actual) if not command.startswith(ELSEWHERE)]


def example_commands() -> list[str]:
    missing = [starts for package, starts in OF_PACKAGES.items() if importlib.util.find_spec(package) is None]
    return [command for command in all_commands() if not command.startswith(tuple(itertools.chain(*missing)))]


def made_corpora(folder: Path) -> None:
    """Writes files in the layout of the corpora that the configs read."""
    rng = random.Random(0)
    words = ["man", "woman", "dog", "rides", "runs", "red", "blue", "house", "film", "dull"]

    def line() -> str:
        return " ".join(rng.choices(words, k=rng.randint(4, 9)))

    for name in ("train", "val", "test_2016_flickr"):
        for language in ("en", "de"):
            path = folder / "multi30k" / f"{name}.{language}.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress("".join(f"{line()}\n" for _ in range(400)).encode()))
    for name in ("train", "dev"):
        path = folder / "rt_polarity" / f"{name}.tsv"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{n % 2}\t{line()}\n" for n in range(300)))
    for split, pair in itertools.product(("train", "dev", "test"), ("en-de", "en-fr", "en-pt_BR")):
        for language in pair.split("-"):
            path = folder / "mine" / f"{split}.{pair}.{language}.gz"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(gzip.compress("".join(f"{line()}\n" for _ in range(100)).encode()))
    (folder / "tiny_shakespeare").mkdir()
    (folder / "tiny_shakespeare" / "input.txt").write_text("ROMEO:\n" + "\n".join(line() for _ in range(4000)))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A folder with scripts, configs, corpora and the runs that the examples use."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("scripts", "configs", "tests", "tformer_jax"):
        (folder / name).symlink_to(ROOT / name)
    made_corpora(folder / "corpora")
    blocks = re.findall(r"```python\n(.*?)```", MANY.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "many.py").write_text(next(block for block in blocks if "get_config" in block))
    for name, text in TEST_SETS.items():
        (folder / name).write_text(text)
    for run, config in RUNS.items():
        shell(folder, f"python scripts/train.py --config {config} --run {run} {SHORT}")
    sizes = {"dim": 8, "num_heads": 2, "ffn_dim": 8, "encoder_layers": 1, "max_length": 32}
    cfg = presets.build("bert_base", **sizes, vocab_size=6, num_classes=2)
    hf.save(folder / "checkpoints" / "bert", "bert", cfg, build(cfg)[1])
    (folder / "checkpoints" / "bert" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\nfilm\n")
    return folder


def shell(folder: Path, command: str) -> str:
    """Returns the output of a command that must succeed."""
    devices = os.environ["XLA_FLAGS"] if "mesh" in command or "parallel" in command else ""  # eight of them, or one
    environment = {**os.environ, "XLA_FLAGS": devices, "PYTHONPATH": str(ROOT), "TFORMER_DATA": str(folder / "corpora")}
    command = re.sub(r"\bpython\b", shlex.quote(sys.executable), command)
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_the_blocks_are_found():
    actual = all_commands()
    shown = set(re.findall(r"scripts/(\w+)\.py", " ".join(actual)))
    assert shown == {path.stem for path in (ROOT / "scripts").glob("*.py")} - {"serve", "xla_flags", "pipeline"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", example_commands())
def test_an_example(checkout, command):
    if "--process 0" in command:
        first = smaller(command)
        together = f"{first} & {first.replace('--process 0', '--process 1')}; mine=$?; wait $! && exit $mine"
        assert shell(checkout, together)
    elif actual := re.search(r"--output (\S+)|^cp \S+ (\S+)", smaller(command)):
        shell(checkout, smaller(command))
        assert (checkout / (actual[1] or actual[2])).stat().st_size
    else:
        assert shell(checkout, smaller(command))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("run", "path", "answer"),
    [
        ("translate_cldr_en_de", "/translate", '{"translations":[['),
        ("lm_tiny_shakespeare_cpu", "/v1/completions", "data: "),
    ],
)
def test_the_server_answers_the_example(checkout, run, path, answer):
    text = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    (call,) = (shlex.split(actual) for actual in commands(text) if actual.startswith("curl") and path in actual)
    arguments = ["scripts/serve.py", "--run", f"runs/{run}", "--port", "0"]
    with subprocess.Popen([sys.executable, *arguments], cwd=checkout, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = next(re.search(r":(\d+)", line)[1] for line in server.stdout if "http://" in line)
            sent = urllib.request.Request(
                f"http://127.0.0.1:{port}{path}", call[-1].encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(sent) as response:
                assert response.read().decode().startswith(answer)
        finally:
            server.terminate()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_python_api(checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    scope: dict = {}
    exec(python_block("Python API"), scope)
    assert len(scope["run"].translate(["a", "b"])) == 2


@pytest.mark.slow
def test_hugging_face_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = presets.build("gpt2", dim=8, num_heads=2, ffn_dim=8, decoder_layers=1, vocab_size=11, max_length=8)
    hf.save(Path("gpt2"), "gpt2", cfg, build(cfg)[1])
    scope: dict = {}
    exec(python_block("Hugging Face checkpoints"), scope)
    assert scope["logits"].shape == (1, 3, 11)
    assert (tmp_path / "copy" / "model.safetensors").exists()


def python_block(heading: str) -> str:
    """Returns the first Python block below a heading of tformer_jax/README.md."""
    text = (ROOT / "tformer_jax" / "README.md").read_text(encoding="utf-8")
    return text.partition(f"## {heading}\n")[2].partition("```python\n")[2].partition("```")[0]
