"""`benchmark.py train --memory`: parsing of XLA's live ranges, and the buffers of a step."""

import pytest

from tests.helpers import tiny
from tformer_jax.config import Config, DataConfig
from tformer_jax.lab.benchmarks import memory, train_cases

RANGES = """  BufferLiveRange:
    dot.1{}:5-9
  Live ranges at 7 (peak):
    dot.1{}: 800 bytes (cumulative: 800 bytes)
    dot.2{1}: 200 bytes (cumulative: 1000 bytes)
    param.1{}: 64 bytes (cumulative: 1064 bytes)
    param.2{}: 4 bytes (cumulative: 1068 bytes)
    copy.3{}: 2 bytes (cumulative: 1070 bytes)
  Stack trace breakdown for peak usage: 1 068 bytes
    main{}: 1 bytes
"""
PATH = "jit(step)/jvp(Model)/decoder/layers_{}/ffn/dot_general"
PROGRAM = f"""HloModule step
ENTRY %main (param.1: f32[16], param.2: s32[]) -> f32[] {{
  %param.1 = f32[16]{{0}} parameter(0), metadata={{op_name="state.params['a']"}}
  %param.2 = s32[] parameter(1), metadata={{op_name="state.step"}}
  %dot.1 = f32[200]{{0}} dot(%param.1), metadata={{op_name="{PATH.format(0)}"}}
  %dot.2 = f32[50]{{0}} dot(%param.1), metadata={{op_name="{PATH.format(1)}"}}
}}
"""


def test_buffers_are_grouped():
    rows = memory.table_rows(RANGES, PROGRAM)
    assert [tuple(row.values()) for row in rows] == [
        ("product", "forward", "decoder/layers_*/ffn", 2, 1000),
        ("argument", "", "parameters", 1, 64),
        ("argument", "", "batch and counters", 1, 4),
        ("other", "", "", 1, 2),
    ]


@pytest.mark.slow
def test_the_memory_of_a_step(capsys):
    data = DataConfig(source="stdlib_text", batching="windows", batch_size=64, window=64)
    case = train_cases.config_case(
        Config(name="tiny", model=tiny("decoder_lm", dim=64, ffn_dim=256, max_length=64), data=data)
    )
    (result,) = memory.measure_memory([case], 1)["cases"]
    peaks = list(result["peak_bytes"].values())
    assert peaks == sorted(peaks)
    arguments = {row["module"]: row["bytes"] for row in result["buffers"] if row["kind"] == "argument"}
    assert arguments["optimizer"] == pytest.approx(2 * arguments["parameters"], abs=64)  # two moments and counters
    assert sum(row["bytes"] for row in result["buffers"]) <= result["state_bytes"] + result["temporary_bytes"] + 1024
    assert "decoder/layers_*/ffn" in capsys.readouterr().out
