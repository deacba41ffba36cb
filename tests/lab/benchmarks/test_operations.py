"""`benchmark.py train --operations`: parsing of XLA programs and traces."""

import pytest

from tests.helpers import tiny
from tformer_jax.config import Config, DataConfig
from tformer_jax.lab.benchmarks import operations, train_cases
from tformer_jax.lab.benchmarks.operations import Operation, Traced

HLO = """
HloModule jit_step, is_scheduled=true

%fused_computation.7 (param_0.1: f32[8,4], param_1: f32[4,2]) -> f32[8,2] {
  %param_0.1 = f32[8,4]{1,0} parameter(0)
  %param_1 = f32[4,2]{1,0} parameter(1)
  %dot.3 = f32[8,2]{1,0} dot(%param_0.1, %param_1), metadata={op_name="jit(f)/jvp(M)/decoder/layers_0/ffn/dot_general"}
  ROOT %add.1 = f32[8,2]{1,0} add(%dot.3, %dot.3), metadata={op_name="jit(f)/jvp(M)/decoder/layers_0/add"}
}

%body.2 (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %add_fusion.4 = f32[8]{0} fusion(%arg), kind=kLoop, calls=%inner, metadata={op_name="jit(f)/add"}
}

ENTRY %main.9 (x: f32[8,4]) -> f32[8,2] {
  %ynn_fusion.12 = f32[8,2]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused_computation.7
  %dot.8 = f32[8,2]{1,0} dot(%x, %w), metadata={op_name="jit(f)/transpose(jvp(M))/decoder/layers_11/ffn/dot_general"}
  %while.5 = (s32[], f32[8]{0}) while(%tuple.1), condition=%cond.1, body=%body.2
  ROOT %copy.1.clone.2 = f32[8,2]{1,0} copy(%ynn_fusion.12)
}
"""


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("", ("", "")),
        ("jit(step)/mul", ("update", "optimizer")),
        ("jit(step)/jvp()/reduce_sum", ("forward", "loss")),
        ("jit(step)/transpose(jvp())/mul", ("backward", "loss")),
        ("jit(s)/jvp(LM)/LM.features/decoder/decoder.full_pass/layers_3/ffn/erf", ("forward", "decoder/layers_*/ffn")),
        (
            "jit(s)/transpose(jvp(LM))/head/tied.attend/...D,VD->...V/dot_general",
            ("backward", "head/tied/...D,VD->...V"),
        ),
        (
            "jit(s)/jvp(LM)/layers_0/a_residual.sublayer_input/norm/while/body/add",
            ("forward", "layers_*/a_residual/norm"),
        ),
    ],
)
def test_direction_and_module(op_name, expected):
    assert operations.direction_and_module(op_name) == expected


def test_a_program_is_parsed():
    actual = operations.parse_program(HLO)
    assert actual["ynn_fusion.12"] == Operation("product", "forward", "decoder/layers_*/ffn")
    assert actual["dot.8"] == Operation("product", "backward", "decoder/layers_*/ffn")
    assert actual["add_fusion.4"] == Operation("add_fusion", "update", "optimizer")
    assert actual["copy.1.clone.2"] == Operation("copy", "", "")
    assert actual["while.5"].kind == "while"


def test_rows_sum_up_and_loops_count_once():
    events = [("dot.8", 3.0), ("dot.8", 1.0), ("while.5", 50.0), ("add_fusion.4", 2.0), ("of_another_program", 10.0)]
    rows = operations.table_rows(operations.parse_program(HLO), events, steps=2)
    assert [(row["kind"], row["milliseconds"], row["share"], row["count"]) for row in rows] == [
        ("other", 5, 0.625, 0.5),
        ("product", 2, 0.25, 1),
        ("add_fusion", 1, 0.125, 0.5),
    ]


@pytest.mark.slow
def test_a_traced_step(capsys):
    data = DataConfig(source="stdlib_text", batching="windows", batch_size=8, window=16)
    case = train_cases.config_case(Config(name="tiny", model=tiny("decoder_lm", dim=64, ffn_dim=256), data=data))
    actual = Traced(case).operations(2)
    rows = actual["operations"]
    assert sum(row["milliseconds"] for row in rows) == pytest.approx(actual["summed_milliseconds"])
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    products = {(row["module"], row["direction"]) for row in rows if row["kind"] == "product"}
    for name in ("expand", "contract"):
        assert {(f"decoder/layers_*/ffn/{name}", direction) for direction in ("forward", "backward")} <= products
    operations.print_operations(actual | {"case": "tiny", "rows": 8, "length": 16, "dtype": "float32"})
    assert "summed over threads" in capsys.readouterr().out
