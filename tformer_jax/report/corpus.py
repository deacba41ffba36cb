"""Tables of what a run was trained on: its splits, the directions or entries of its mixture, and its languages."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tformer_jax.report.run import RunFiles


class Table(NamedTuple):
    """A table of texts; numbers stand in all columns but the first."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def corpus_tables(run: RunFiles) -> list[Table]:
    """Returns the tables of a run's statistics of its data; [] if it has none."""
    splits: Mapping[str, Any] = run.data.get("splits", {})
    train: Mapping[str, Any] = splits.get("train", {})
    tables = [
        Table(
            "Splits",
            ("split", "examples", "tokens on average", "longest", "too long", "duplicates", "in training", "left out"),
            [_split_row(name, split) for name, split in splits.items()],
        ),
        Table(
            "Directions" if run.config["data.directions"] or run.config["data.language_fields"] else "Entries",
            ("name", "examples", "% of examples drawn", "% of tokens", "epochs"),
            [
                (
                    part["name"],
                    f"{part['size']:,}",
                    *(f"{100 * part[name]:.2g}" for name in ("examples", "tokens")),
                    f"{part['epochs']:.2g}",
                )
                for part in train.get("parts", ())
            ],
        ),
        Table(
            "Languages",
            ("language", "texts", "tokens on average", "tokens per character", "% unknown"),
            [_language_row(name, facts) for name, facts in train.get("languages", {}).items()],
        ),
    ]
    return [table for table in tables if table.rows]


def _split_row(name: str, split: Mapping[str, Any]) -> tuple[str, ...]:
    sides, read = split["sides"], max(split["read"], 1)
    return (
        name,
        "endless" if split["examples"] is None else f"{split['examples']:,}",
        " / ".join(f"{side['tokens'] / read:.1f}" for side in sides.values()),
        " / ".join(f"{side['longest']:,}" for side in sides.values()),
        *(f"{split[key]:,}" for key in ("long", "duplicates", "in_training")),
        f"{sum(split['left_out'].values()):,}",
    )


def _language_row(name: str, facts: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{facts['texts']:,}",
        f"{facts['tokens'] / max(facts['read'], 1):.1f}",
        f"{facts['tokens_per_character']:.2f}",
        f"{100 * facts['unknown'] / max(facts['tokens'], 1):.2g}",
    )
