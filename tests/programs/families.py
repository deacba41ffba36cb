"""Records what the tests of published families find, for the table in `tformer_jax/README.md`.

    python -m tests.programs.families [NAME ...]

Runs the tests of each checkpoint of `tests/parity/published.json` that the record lacks, slow ones included; a family
is recorded if they pass and find all columns. They need the extra `parity`, and CTranslate2.
"""

import argparse
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_suffix(".json")
TESTS = tuple(f"tests/parity/test_{name}.py" for name in ("families", "multilingual", "encoders"))
COLUMNS = "architecture", "tokenizer", "logits", "outputs", "export", "ctranslate2"


class _Only:
    """A pytest plugin: selects the tests of one checkpoint."""

    def __init__(self, name: str) -> None:
        self.name = name

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            item for item in items if "callspec" in vars(item) and item.callspec.params.get("name") == self.name
        ]


def main() -> None:
    """Runs the tests of the checkpoints, and records each family that passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="run the tests of these checkpoints, also if the record has them")
    options = parser.parse_args()
    published = json.loads((ROOT / "tests/parity/published.json").read_text("utf-8"))
    known = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    failed = []
    for name in options.names or [name for name in published if name not in known]:
        code = pytest.main(["-n", "0", "-q", "--timeout=0", "-m", "", *TESTS], plugins=[_Only(name)])
        from tests.parity import family_table  # after conftest.py has chosen the devices

        actual = family_table.FOUND.get(name, {})
        if code or (missing := [column for column in COLUMNS if column not in actual]):
            failed.append(f"{name} ({'failed' if code else 'without ' + ', '.join(missing)})")
            continue
        known[name] = {column: actual[column] for column in COLUMNS}
        lines = (f"  {json.dumps(key)}: {json.dumps(known[key])}" for key in published if key in known)
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    raise SystemExit(f"failed: {'; '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
