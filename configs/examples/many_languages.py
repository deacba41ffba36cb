"""Trains one translator for six directions on files of its own: python configs/examples/many_languages.py

The files have dates in three languages. Flags such as --config.train.steps=100 change settings.
"""

import dataclasses
import datetime
import sys
from pathlib import Path

from babel.dates import format_date

import tformer_jax as tj
from tformer_jax.cli.config_file import read_config
from tformer_jax.config import DataConfig

LANGUAGES = ("en", "de", "fr")


def write_dates(folder: Path) -> None:
    """Writes one file per split and language; line n has the same date in all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, first, count in (("train", 0, 8000), ("validation", 9000, 400), ("test", 9500, 400)):
        dates = [datetime.date(2000, 1, 1) + datetime.timedelta(days=first + day) for day in range(count)]
        for language in LANGUAGES:
            lines = (format_date(date, "full", locale=language) for date in dates)
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(runs: Path, *changes: str) -> None:
    """Trains the run `many_languages` in the folder `runs`, and prints a date in all directions."""
    write_dates(runs / "dates")
    data = DataConfig(
        source="parallel_lines",
        directions=("en-de", "en-fr", "de-fr"),
        both_directions=True,
        **{split: f"dates/{split}.{{lang}}" for split in ("train", "validation", "test")},
        tokenizer="characters",
        bucket_lengths=(24, 40),
        batch_tokens=4096,
    )
    cfg = dataclasses.replace(read_config("translate_cldr", changes), data=data)
    run = tj.train(cfg, run=runs / "many_languages", data_root=runs, overwrite=True)
    date = datetime.date(2026, 3, 3)
    texts = {language: format_date(date, "full", locale=language) for language in LANGUAGES}
    for source, target in ((a, b) for a in LANGUAGES for b in LANGUAGES if a != b):
        print(
            f"{source}-{target}",
            texts[source],
            "->",
            *run.translate([texts[source]], to=target, source_language=source),
        )


if __name__ == "__main__":
    main(Path("runs"), *sys.argv[1:])
