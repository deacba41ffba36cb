"""Writes README's tables from what programs recorded: `python -m tests.readme_tables`.

Results come from configs/results/*.json (`scripts/train.py --record`), equivalences from tests/equivalences.json
(`pytest --equivalences tests/equivalences.json`). A test compares README with them.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHOWN = {"bleu": "BLEU", "chrf": "chrF", "exact_match": "exact match", "accuracy": "accuracy", "loss": "loss"}


def results_table() -> str:
    """One row a recorded result."""
    rows = ["| command | steps | tokens | time | held-out result |", "|---|---|---|---|---|"]
    for path in sorted((ROOT / "configs" / "results").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        config = re.search(r"--config configs/(\S+)", result["command"])[1]
        metrics = [f"{SHOWN[name]} {value:.4g}" for name, value in result["test"].items() if name in SHOWN]
        tokens, minutes = f"{result['tokens'] / 1e6:.1f} M", f"{result['seconds'] / 60:.1f} min"
        rows.append(f"| `{config}` | {result['steps']:,} | {tokens} | {minutes} | {', '.join(metrics)} |")
    return "\n".join(rows)


def equivalences_table() -> str:
    """One row a switch and oracle, with the largest difference that the tests saw."""
    rows = ["| switch | equal to | largest difference |", "|---|---|---|"]
    for switch, oracle, difference in json.loads((ROOT / "tests" / "equivalences.json").read_text(encoding="utf-8")):
        rows.append(f"| `{switch}` | {oracle} | {difference:.0e} |")
    return "\n".join(rows)


def fill(text: str, name: str, table: str) -> str:
    """Replaces what stands between README's marks of that name."""
    start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return before + start + table + end + after


def readme() -> str:
    """README as it should be."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return fill(fill(text, "results", results_table()), "equivalences", equivalences_table())


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme(), encoding="utf-8")
