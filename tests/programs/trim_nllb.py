"""Trims an NLLB with 256,000 tokens to those of three languages by one command, and compares outputs, sizes and steps.

python -m tests.programs.trim_nllb --record tests/programs/trim_nllb.json

The checkpoint is NLLB's in config, tokenizer and vocabulary, with few small layers and random weights. The tokenizer is
trained on the English, German and French of the folder `multi30k` below TFORMER_DATA, and on made-up words in other
scripts, whose embeddings are small: outputs then have tokens of the three languages, as those of a trained model would.
"""

import argparse
import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import tformer_jax as tj
from tests import commands
from tests.programs.pretrained import command
from tformer_jax.lab.benchmarks.growth import measure_case
from tformer_jax.lab.benchmarks.train_cases import Case
from tformer_jax.runs import provenance

VOCABULARY = 256_000
LANGUAGES = {"eng_Latn": "en", "deu_Latn": "de", "fra_Latn": "fr"}
TAGS = (*LANGUAGES, "ell_Grek", "rus_Cyrl", "hye_Armn")
SCRIPTS = ("αβγδεζηθικλμνξοπρστυφχψω", "абвгдежзийклмнопрстуфхцчшщыэюя", "աբգդեզէըթժիլխծկհձղճմյնշոչպջռսվտրցփքօֆ")
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
LINES = 7000
"""Number of sentences of each language whose tokens are kept."""
SENTENCES, NEW = 500, 12
ROWS, LENGTH, STEPS = 16, 16, 5
"""Size of the batches of a measured step, and number of steps."""
WIDTH = 128
RUNS = Path("runs")


def texts_of(language: str) -> list[str]:
    """Returns the first sentences of Multi30k's training split."""
    path = Path(os.environ["TFORMER_DATA"], "multi30k", f"train.{language}.gz")
    return gzip.decompress(path.read_bytes()).decode().splitlines()[:LINES]


def other_words(count: int) -> list[str]:
    """Returns made-up words of other scripts."""
    rng = np.random.default_rng(0)
    return ["".join(rng.choice(list(SCRIPTS[n % 3]), rng.integers(3, 9))) for n in range(count)]


def make_checkpoint(folder: Path) -> None:
    """Writes an NLLB of `VOCABULARY` tokens."""
    import tokenizers
    import torch
    import transformers

    library = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    size = VOCABULARY - len(TAGS) - 1  # <mask>
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
    words = other_words(280_000)
    own = [text for language in LANGUAGES.values() for text in texts_of(language)]
    library.train_from_iterator([*own, *own, *words, *words], trainer)
    model = json.loads(library.to_str())["model"]
    made = transformers.NllbTokenizer(
        vocab=model["vocab"], merges=list(map(tuple, model["merges"])), additional_special_tokens=list(TAGS)
    )
    made.save_pretrained(folder)
    config = transformers.M2M100Config(
        vocab_size=len(made),
        d_model=WIDTH,
        **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 4 * WIDTH for side in ("encoder", "decoder")},
        activation_function="relu",
        max_position_embeddings=128,
        scale_embedding=True,
        decoder_start_token_id=2,
    )
    torch.manual_seed(0)
    theirs = transformers.M2M100ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.1)
            if "encoder_attn.out_proj.weight" in name:
                parameter *= 4  # outputs depend on the source
        used = sorted({i for row in made(own)["input_ids"] for i in row})
        torch.nn.init.normal_(theirs.model.shared.weight, std=0.01)
        torch.nn.init.normal_(remaining := torch.empty(len(used), WIDTH))
        theirs.model.shared.weight[used] = remaining
        theirs.model.decoder.layer_norm.weight *= -1  # or the most probable token is the one that is read
    theirs.save_pretrained(folder)


def outputs(run: Path) -> list[str]:
    """Returns what `scripts/translate.py` writes for English sentences, in German and in French."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "en.txt")
        given.write_text("".join(f"{text}\n" for text in texts_of("en")[: SENTENCES // 2]), encoding="utf-8")
        for to in ("deu_Latn", "fra_Latn"):
            output = Path(folder, f"{to}.txt")
            flags = ("--from", "eng_Latn", "--to", to, "--max-new-tokens", str(NEW))
            command("translate", "--run", str(run), "--input", str(given), "--output", str(output), *flags)
            lines += output.read_text(encoding="utf-8").split("\n")[:-1]
    return lines


def facts(run: Path) -> dict[str, Any]:
    """Returns sizes of a run, and the median time of a train step with AdamW."""
    cfg = tj.load(run).config
    step = measure_case(Case("trim", cfg, ROWS, LENGTH), STEPS)
    size = sum(path.stat().st_size for path in (run / "weights").rglob("*") if path.is_file())
    return {
        "tokens": cfg.model.vocab_size,
        "weights_bytes": size,
        "step_milliseconds": round(step["milliseconds"], 1),
        "step_peak_bytes": step["peak_bytes"],
    }


def main() -> None:
    """Prints and records the comparison; exits with 1 if outputs differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    options, revision = parser.parse_args(), provenance.collect()["git_revision"]
    whole, trimmed = RUNS / "nllb_made_up", RUNS / "nllb_made_up_en_de_fr"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "checkpoint").mkdir()
        make_checkpoint(folder / "checkpoint")
        command("import_hf", str(folder / "checkpoint"), "--run", str(whole), "--overwrite")
        files = [folder / f"{language}.txt" for language in LANGUAGES.values()]
        for file in files:
            file.write_text("".join(f"{text}\n" for text in texts_of(file.stem)), encoding="utf-8")
        flags = ("--texts", *map(str, files), "--output", str(trimmed), "--overwrite")
        command("vocabulary", "trim", str(whole), *flags)
    before, after = outputs(whole), outputs(trimmed)
    actual = {
        "sentences": len(before),
        "equal_outputs": sum(map(str.__eq__, before, after)),
        "different_sentences_written": len({*before}),
        "batch": [ROWS, LENGTH],
        "before": facts(whole),
        "after": facts(trimmed),
    }
    print(json.dumps(actual, indent=2))
    if options.record:
        commands.write_record(options.record, "tests.programs.trim_nllb", git_revision=revision, **actual)
    raise SystemExit(before != after)


if __name__ == "__main__":
    main()
