"""Tables of what a run was trained on: its splits, the directions or entries of its mixture, and its languages."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tformer_jax.base.numbers import two_digits
from tformer_jax.config.stages import step_range
from tformer_jax.report.run import RunFiles

SHOWN_SHARES = 8
"""Number of sources of a stage whose shares are shown."""


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
                    *(two_digits(100 * part[name]) for name in ("examples", "tokens")),
                    two_digits(part["epochs"]),
                )
                for part in train.get("parts", ())
            ],
        ),
        Table(
            "Stages",
            ("stage", "planned", "began after step", "shares in the examples drawn"),
            [_stage_row(run, number, stage) for number, stage in enumerate(train.get("stages", ()), 1)],
        ),
        Table(
            "Transforms",
            ("transform", "% of the examples"),
            [(name, f"{100 * share:.2g}") for name, share in train.get("transforms", ())],
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
        " / ".join(f"{side['tokens'] / read:,.1f}" for side in sides.values()),
        " / ".join(f"{side['longest']:,}" for side in sides.values()),
        *(f"{split[key]:,}" for key in ("long", "duplicates", "in_training")),
        f"{sum(split['left_out'].values()):,}",
    )


def _stage_row(run: RunFiles, number: int, stage: Mapping[str, Any]) -> tuple[str, ...]:
    began = [event["step"] for event in run.events if _begins(event, number)] or [0 if number == 1 else None]
    shares = [
        f"{name} {' to '.join(dict.fromkeys(f'{100 * share:.3g} %' for share in ends))}"
        for name, ends in stage["examples"].items()
    ]
    more = f", and {len(shares) - SHOWN_SHARES} more" if len(shares) > SHOWN_SHARES else ""
    return (
        f"{number}: {stage['stage']}",
        step_range(stage["from_step"], stage["to_step"]),
        "" if began[-1] is None else f"{began[-1]:,}",
        ", ".join(shares[:SHOWN_SHARES]) + more,
    )


def _begins(event: Mapping[str, Any], number: int) -> bool:
    return event["kind"] == "stage" and event["message"].startswith(f"stage {number} of ")


def _language_row(name: str, facts: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{facts['texts']:,}",
        f"{facts['tokens'] / max(facts['read'], 1):,.1f}",
        f"{facts['tokens_per_character']:.2f}",
        two_digits(100 * facts["unknown"] / max(facts["tokens"], 1)),
    )
