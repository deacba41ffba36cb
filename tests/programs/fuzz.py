"""Random Unicode texts through every path: equal outputs for a text and its normal form, lines in = lines out.

XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false" \\
    python -m tests.programs.fuzz --texts 100000 --record tests/programs/fuzz.json
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import tokenizers as hf
from pyarrow import parquet

import tformer_jax as tj
from tests import commands
from tests.helpers import build, tiny
from tests.parity.own_runs import MODELS
from tests.programs.fuzz_findings import Findings, as_words, jsonl, read_file, read_lines, write_lines
from tests.random_texts import Texts, one_line, with_surrogate
from tests.serving.live import around
from tformer_jax.base.errors import UserError
from tformer_jax.cli import export_hf, score, translate
from tformer_jax.config import Config, DataConfig, DecodeConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig
from tformer_jax.data import pipeline
from tformer_jax.data.characters import is_blank
from tformer_jax.data.corpora import load_corpus
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers
from tformer_jax.data.tokenizers.exported import export_tokenizers
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.inference.engine import Engine
from tformer_jax.runs import experiment, run_folder, training, weights
from tformer_jax.serving.model import ServedModel
from tformer_jax.special_tokens import PAD, SPECIAL_TOKENS

SYMBOLS = ("th", "the", "3:33", "</b>", "ไทย")
COVERED = {"character_coverage": 0.99, "byte_fallback": True, "symbols": SYMBOLS}
TOKENIZERS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("bytes", "characters", "words", "bpe", "unigram", "wordpiece")},
    **{f"{kind} with symbols": {"symbols": SYMBOLS} for kind in ("bytes", "words", "bpe", "unigram", "wordpiece")},
    **{f"{kind} of characters": COVERED for kind in ("bpe", "unigram")},
}
"""Settings of the tokenizers by name, which begins with the kind."""
LOSSLESS = ("bytes", "bpe", "bytes with symbols", "bpe with symbols", "bpe of characters", "unigram of characters")
LONGEST, NEW = 64, 6
"""Tokens of a row, and of an output."""
ROWS = 120
"""About the number of examples in a batch."""
TRAINING = 2000
"""Number of texts from which tokenizers are trained; the others have unknown characters."""
SHOWN = 5
"""Number of examples of a fault in the record."""
SHARES = {"encode one by one": 20, "encoders": 5, "command": 20, "server": 100, "surrogates": 100}
"""Paths that see only every n-th text, because they are slow."""


@dataclasses.dataclass(frozen=True)
class Fuzz:
    """Texts, a folder to write to, and what is wrong so far."""

    texts: Texts
    folder: Path
    findings: Findings
    seed: int

    def tokenizers(self) -> None:
        """All forms of a text have the same ids, which are in range, here and in the exported tokenizer."""
        for name, settings in TOKENIZERS.items():
            kind, *_ = name.split()
            cfg = DataConfig(source="jsonl", train=("x",), tokenizer=kind, vocab_size=8000, **settings)
            texts = self.texts.raw[:TRAINING]
            if kind == "words":  # a word with the name of a special token has no place in tokenizer.json
                texts = [text for text in texts if not any(name in text for name in SPECIAL_TOKENS)]
            examples = [{"source": text, "target": text} for text in texts]
            tokenizer = train_tokenizers(cfg, examples, None).source
            self._one_tokenizer(name, tokenizer)
            self.findings.saw(f"tokenizer: {name}", len(self.texts))

    def _one_tokenizer(self, kind: str, tokenizer: Tokenizer) -> None:
        findings, texts = self.findings, self.texts
        rows = {name: tokenizer.encode_batch(form) for name, form in texts.forms.items()}
        for form in ("raw", "changed"):
            findings.equal(f"{kind}: ids of {form} texts", texts.forms[form], rows[form], rows["clean"])
        some = texts.raw[:: SHARES["encode one by one"]]
        one_by_one = [tokenizer.encode(text) for text in some]
        findings.equal(f"{kind}: encode_batch", some, rows["raw"][:: SHARES["encode one by one"]], one_by_one)
        for text, ids in zip(texts.clean, rows["clean"], strict=True):
            if not all(0 <= i < tokenizer.vocab_size for i in ids) or (ids and not text):
                findings.fault(f"{kind}: ids", text, ids=ids)
        written = [tokenizer.decode(ids) for ids in rows["clean"]]
        if kind in LOSSLESS:
            findings.equal(f"{kind}: decoded ids", texts.clean, written, texts.clean)
        folder = self.folder / f"tokenizer_{kind}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "marian"}))
        pair = Tokenizers(tokenizer, tokenizer)
        if (problem := export_tokenizers(folder, pair, "marian", pair=True)) is not None:
            findings.fault(f"{kind}: not exported", problem)
            return
        library = hf.Tokenizer.from_file(str(folder / "tokenizer.json"))
        library.encode_special_tokens = True
        for name, form in texts.forms.items():
            theirs = [encoding.ids for encoding in library.encode_batch(form, add_special_tokens=False)]
            findings.equal(f"{kind}: exported ids of {name} texts", form, theirs, rows[name])

    def readers(self) -> None:
        """Each file has as many examples as texts were written to it, and the same texts."""
        raw, lines = self.texts.raw, list(map(one_line, self.texts.raw))
        numbers = [str(number) for number in range(len(raw))]
        write_lines(self.folder / "fuzz.jsonl", jsonl(raw))
        parquet.write_table(pa.table({"source": raw, "target": numbers}), self.folder / "fuzz.parquet")
        write_lines(self.folder / "fuzz.tsv", [f"{text}\t{n}" for text, n in zip(lines, numbers, strict=True)])
        write_lines(self.folder / "fuzz.en", lines)
        write_lines(self.folder / "fuzz.de", numbers)
        files = {"jsonl": raw, "parquet": raw, "tsv": lines, "parallel_lines": lines}
        names = {"parallel_lines": "fuzz.{lang}"}
        for source, expected in files.items():
            cfg = config(DataConfig(source=source, train=(name := names.get(source, f"fuzz.{source}"),)))
            examples = list(read_file(cfg, self.folder, name))
            if source == "parallel_lines":  # as written by other systems, a line may end in \r\n
                expected = [text.removesuffix("\r") for text in expected]
            if source != "tsv" or len(examples) != len(expected):
                self.findings.equal(f"{source}: texts", expected, [each["source"] for each in examples], expected)
            self.findings.equal(f"{source}: lines", expected, [each["target"] for each in examples], numbers)
            self.findings.saw(f"reader: {source}", len(raw))

    def batches(self) -> None:
        """The batches of texts and of their normal forms are equal, and have each example once."""
        batches = {}
        for name, form in (("raw", self.texts.raw), ("clean", self.texts.clean)):
            write_lines(self.folder / f"{name}.jsonl", jsonl(form))
            cfg = config(DataConfig(source="jsonl", train=(f"{name}.jsonl",), validation_fraction=0.01, **BATCHES))
            corpus = load_corpus(cfg, self.folder)
            pair = train_tokenizers(cfg.data, corpus.train, None)
            batches[name] = list(pipeline.evaluation_batches(cfg, corpus.train, pair))
            for batch in batches[name]:
                ids = np.concatenate([batch[key].ravel() for key in ("source", "target_in", "target_out")])
                if not ((ids == PAD) | (ids >= 0) & (ids < pair.source.vocab_size)).all():
                    self.findings.fault("batches: ids", name)
            order = np.sort(np.concatenate([batch["order"] for batch in batches[name]]))
            if order.tolist() != list(range(len(corpus.train))):
                self.findings.fault("batches: examples", name, rows=len(order), examples=len(corpus.train))
            self.findings.saw(f"batches: {name}", len(corpus.train))
        for raw, clean in zip(batches["raw"], batches["clean"], strict=True):
            if any((raw[key] != clean[key]).any() for key in clean):
                self.findings.fault("batches: raw and clean", raw["source"].tolist())

    def train(self) -> Path:
        """Trains a small translator on the texts, for about one epoch."""
        folder = self.folder / "run"
        steps = max(len(self.texts) // ROWS, 30)
        cfg = config(DataConfig(source="jsonl", train=("raw.jsonl",), validation_fraction=0.01, **BATCHES), steps)
        with contextlib.redirect_stdout(io.StringIO()):
            result = training.run(experiment.build(cfg, folder, data_root=self.folder))
        assert result is not None
        lines = list(map(json.loads, read_lines(folder / "metrics.jsonl")))
        if not all(np.isfinite(line["loss"]) for line in lines if "loss" in line):
            self.findings.fault("train: loss", str(lines))
        cfg, corpus = tj.load(folder).config, load_corpus(cfg, self.folder)
        with contextlib.closing(pipeline.train_batches(cfg, corpus, Tokenizers.load(folder / "tokenizers"))) as batches:
            rows = [int((batch["target_in"] != PAD).any(axis=1).sum()) for batch in itertools.islice(batches, steps)]
        self.findings.saw("train (examples of the steps)", sum(rows))
        return folder

    def random_run(self, trained: tj.Run) -> tj.Run:
        """Makes a run with large random parameters, whose outputs are as diverse as its inputs."""
        folder = self.folder / "random"
        run_folder.create(folder, trained.config, trained.tokenizers, None)
        params = jax.tree_util.tree_map_with_path(_diverse, build(trained.config.model)[1])
        weights.save(folder, params, "last", [], 0)
        return tj.load(folder)

    def translations(self, run: tj.Run) -> list[str]:
        """All forms of a text have the same translation; a text without a visible character has an empty one."""
        outputs = {name: run.translate(form) for name, form in self.texts.forms.items()}
        for name in ("raw", "changed"):
            self.findings.equal(f"translate: {name}", self.texts.forms[name], outputs[name], outputs["clean"])
        for text, output in zip(self.texts.raw, outputs["raw"], strict=True):
            if is_blank(text) and output:
                self.findings.fault("translate: invented", text, output=output)
        self.findings.saw("translate", len(self.texts))
        return outputs["raw"]

    def scores(self, run: tj.Run) -> None:
        """All forms of a pair have the same score, of ids in range."""
        forms = {name: list(zip(form, reversed(form), strict=True)) for name, form in self.texts.forms.items()}
        scored = {name: run.score(pairs) for name, pairs in forms.items()}
        for name in ("raw", "changed"):
            self.findings.equal(f"score: {name}", forms[name], scored[name], scored["clean"])
        for pair, each in zip(forms["raw"], scored["raw"], strict=True):
            if not np.isfinite(each.total) or not all(0 <= i < run.tokenizers.target.vocab_size for i in each.tokens):
                self.findings.fault("score: value", pair, score=each)
        self.findings.saw("score", len(self.texts))

    def encoders(self, run: tj.Run) -> None:
        """All forms of a text have the same label and embedding."""
        size = run.tokenizers.target.vocab_size
        cfg = dataclasses.replace(run.config, model=tiny("classifier", vocab_size=size, max_length=LONGEST))
        cfg = dataclasses.replace(cfg, data=DataConfig(source="cldr_language", bucket_lengths=(LONGEST,)))
        model, params = build(cfg.model)
        single = dataclasses.replace(run, config=cfg, model=model, params=params, labels=("x", "y", "z"))
        forms = self.texts.every(SHARES["encoders"]).forms
        labels = {name: single.classify(form) for name, form in forms.items()}
        vectors = {name: single.embed(form) for name, form in forms.items()}
        for name in ("raw", "changed"):
            self.findings.equal(f"classify: {name}", forms[name], labels[name], labels["clean"])
            rows = [row.tobytes() for row in vectors[name]]
            self.findings.equal(f"embed: {name}", forms[name], rows, [x.tobytes() for x in vectors["clean"]])
        if not np.isfinite(vectors["raw"]).all():
            self.findings.fault("embed: not finite", "")
        self.findings.saw("classify and embed", len(forms["raw"]))

    def command(self, run: tj.Run, outputs: Sequence[str]) -> None:
        """Each line of a file has one line of output, in order: what the Python API returns."""
        step = SHARES["command"]
        some = list(map(one_line, self.texts.raw[::step]))
        expected = [" ".join(output.replace("\r", "\n").split("\n")) for output in outputs[::step]]
        flags = ["--run", str(run.path)]
        for name, lines in (("input.txt", some), ("input.jsonl", [json.dumps({"text": text}) for text in some])):
            write_lines(self.folder / name, lines)
            out = self.folder / f"output{Path(name).suffix}"
            translate.main([*flags, "--input", str(self.folder / name), "--output", str(out)])
            written = read_lines(out)
            if out.suffix == ".jsonl":
                records = list(map(json.loads, written))
                self.findings.equal("command: texts of jsonl", some, [each["text"] for each in records], some)
                written = [each["outputs"][0] for each in records]
            blank = sum(bool(output) for text, output in zip(some, written, strict=False) if is_blank(text))
            self.findings.equal(f"command: {name}", some, list(map(as_words, written)), list(map(as_words, expected)))
            if blank:
                self.findings.fault("command: invented", str(blank))
            self.findings.saw("command: translate", len(some))
        write_lines(self.folder / "pairs.txt", [f"{text}\t{text}" for text in some])
        out = self.folder / "scores.txt"
        with contextlib.redirect_stderr(io.StringIO()):
            score.main([*flags, "--input", str(self.folder / "pairs.txt"), "--output", str(out)])
        if len(lines := read_lines(out)) != len(some):
            self.findings.fault("command: lines of scores", f"{len(lines)} for {len(some)}")
        self.findings.saw("command: score", len(some))

    def server(self, run: tj.Run, outputs: Sequence[str]) -> None:
        """The server's translations are those of the Python API."""
        step, parts = SHARES["server"], (run.config, run.model, run.params, run.tokenizers)
        engine = Engine(*parts, max_rows=16, few_shapes=True)
        engine.warm_up(run.config.decode)
        some, expected = self.texts.raw[::step], outputs[::step]
        with around(engine, ServedModel.build(*parts), max_body=10**6, queue=64, timeout=600.0) as service:
            service.client.timeout = 600.0
            for start in range(0, len(some), 50):
                response = service.post("/translate", text=some[start : start + 50])
                if response.status_code != 200:
                    self.findings.fault("server: status", response.text)
                    continue
                written = [row[0]["text"] for row in response.json()["translations"]]
                texts = some[start : start + 50]
                self.findings.equal("server: translations", texts, written, expected[start : start + 50])
            draw = random.Random(self.seed)
            for _ in range(len(self.texts) // SHARES["surrogates"] // 10):
                body = json.dumps({"text": with_surrogate(draw)}).encode()
                response = service.client.post("/translate", content=body, headers={"Content-Type": "application/json"})
                if response.status_code != 400:
                    self.findings.fault("server: surrogate", body, status=response.status_code)
                self.findings.saw("server: lone surrogates", 1)
        self.findings.saw("server", len(some))

    def surrogates(self, run: tj.Run) -> None:
        """A text with a lone surrogate is refused by one clear sentence, wherever it comes from."""
        draw = random.Random(self.seed)
        count = max(len(self.texts) // SHARES["surrogates"], 1)
        for _ in range(count):
            text = with_surrogate(draw)
            for name, use in (("translate", run.translate), ("embed", run.embed), ("score", run.score)):
                example: Any = (text, "a") if name == "score" else text
                self.findings.refused(f"surrogate: {name}", text, lambda use=use, text=example: use([text]), UserError)
            path = self.folder / "surrogate.jsonl"
            path.write_text(json.dumps({"source": text, "target": "a"}) + "\n")
            cfg = config(DataConfig(source="jsonl", train=(path.name,)))
            examples = read_file(cfg, self.folder, path.name)
            self.findings.refused("surrogate: jsonl", text, lambda rows=examples: list(rows), UserError)
            (self.folder / "surrogate.txt").write_bytes(text.encode("utf-8", "surrogatepass"))
            flags = ["--run", str(run.path), "--input", str(self.folder / "surrogate.txt")]
            if draw.random() < 0.02:
                self.findings.saw("command: lone surrogates", 1)
                self.findings.refused("surrogate: command", text, lambda flags=flags: translate.main(flags), UserError)
        self.findings.saw("lone surrogates", count)

    def export(self, run: tj.Run, outputs: Sequence[str]) -> None:
        """transformers reads the same ids from each text by the exported run, and writes the same outputs."""
        from tests.programs import fuzz_export

        folder = self.folder / "exported"
        with contextlib.redirect_stdout(io.StringIO()):
            export_hf.main(["--run", str(run.path), str(folder)])
        fuzz_export.compare(self, run, folder, outputs)


BATCHES: dict[str, Any] = {"vocab_size": 1000, "bucket_lengths": (16, 32, LONGEST), "batch_tokens": 2048}


def config(data: DataConfig, steps: int = 30) -> Config:
    """Returns the config of a small translator, which transformers' Marian can represent."""
    sizes = {"dim": 16, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "ffn_dim": 32}
    return Config(
        name="fuzz",
        model=ModelConfig(family="seq2seq", max_length=LONGEST, dropout=0.0, **sizes, **MODELS["marian"][1]),
        data=data,
        optim=OptimConfig(learning_rate=1e-2, warmup_steps=5),
        train=TrainConfig(steps=steps, log_every=10, eval_every=steps, checkpoint_every=steps),
        decode=DecodeConfig(max_new_tokens=NEW),
        eval=EvalConfig(batch_size=256, examples=50, samples=1),
    )


def _diverse(path: Any, leaf: Any) -> Any:
    """Changes parameters such that outputs depend more on the source: no bias, and strong cross-attention."""
    names = [entry.key for entry in path]
    if "bias" in names[-1]:
        return leaf * 0
    return leaf * 20 if "cross_attention" in names and "value" in names else leaf


def run_all(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Draws texts and sends them through every path; returns what each path saw and what was wrong."""
    findings, seconds = Findings(), {}
    fuzz = Fuzz(Texts.draw(count, seed), folder, findings, seed)

    def timed(name: str, path: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        result = path(*arguments)
        seconds[name] = round(time.perf_counter() - started, 1)
        print(f"{name}: {seconds[name]} s, faults: {sum(map(len, findings.faults.values()))}", flush=True)
        return result

    timed("tokenizers", fuzz.tokenizers)
    timed("readers", fuzz.readers)
    timed("batches", fuzz.batches)
    run = fuzz.random_run(tj.load(timed("train", fuzz.train)))
    outputs = timed("translate", fuzz.translations, run)
    timed("score", fuzz.scores, run)
    timed("encoders", fuzz.encoders, run)
    timed("command", fuzz.command, run, outputs)
    timed("server", fuzz.server, run, outputs)
    timed("surrogates", fuzz.surrogates, run)
    timed("export", fuzz.export, run, outputs)
    changed = sum(raw != clean for raw, clean in zip(fuzz.texts.raw, fuzz.texts.clean, strict=True))
    kinds = {"changed by cleaning": changed, "without a visible character": sum(map(is_blank, fuzz.texts.raw))}
    faults = {what: {"count": len(examples), "first": examples[:SHOWN]} for what, examples in findings.faults.items()}
    return {
        "passed": not faults,
        "texts": count,
        "of_which": kinds,
        "distinct_characters": len(set().union(*fuzz.texts.raw)),
        "distinct_outputs": len(set(outputs)),
        "texts_by_path": findings.texts,
        "faults": faults,
        "seconds": seconds,
    }


def main() -> None:
    """Prints and records the results; exits with 1 if a property does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TFORMER_CACHE_DIR", folder)
        result = run_all(options.texts, options.seed, Path(folder))
    print(json.dumps(result, indent=1))
    if options.record:
        commands.write_record(options.record, "tests.programs.fuzz", seed=options.seed, **result)
    raise SystemExit(0 if result["passed"] else 1)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
