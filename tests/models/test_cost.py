"""Estimated costs against XLA's own count, the arrays of models, and hand arithmetic."""

import dataclasses

import jax
import pytest

from tests.helpers import build, init_module, normal, tiny
from tformer_jax.base.errors import UserError
from tformer_jax.cli.config_file import read_config
from tformer_jax.config import Config, DataConfig, ModelConfig, kinds
from tformer_jax.config.sizes import with_sizes
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.lab.benchmarks import train_cases
from tformer_jax.lab.commands import describe
from tformer_jax.models import cost, registry
from tformer_jax.nn import grouped
from tformer_jax.nn.ffn import make_ffn

SIZES = {"dim": 64, "ffn_dim": 256, "max_length": 64, "vocab_size": 50}


@pytest.mark.parametrize("family", kinds.FAMILIES)
def test_flops_are_those_that_xla_counts(family):
    source = {"source_vocab_size": 50} if family == "seq2seq" else {}
    cfg = tiny(family, **SIZES, **source)
    model, params = build(cfg)
    batch = registry.example_batch(cfg, 2, 32)
    compiled = jax.jit(lambda params: registry.forward(model, params, batch).values).lower(params).compile()
    counted = compiled.cost_analysis()["flops"]
    # XLA also counts operations other than matrix products: softmax, norms, additions
    assert 0.8 * counted < cost.estimate(cfg, 2, 32).forward_flops <= counted


def test_flops_by_hand():
    D, F, V, T, L = 64, 256, 50, 32, 3
    cfg = tiny("decoder_lm", **SIZES, decoder_layers=L)
    per_token = L * (2 * 4 * D * D + 2 * 2 * D * F + 2 * 2 * T * D) + 2 * D * V
    assert cost.estimate(cfg, 2, T).forward_flops == 2 * T * per_token
    assert (
        cost.estimate(tiny("decoder_lm", **SIZES, decoder_layers=L, scan_layers=True), 2, T).forward_flops
        == 2 * T * per_token
    )


def test_only_chosen_experts_count():
    D, F, T, k, E = 64, 256, 32, 2, 8
    dense = cost.estimate(tiny("decoder_lm", **SIZES), 1, T).forward_flops
    moe = {"num_experts": E, "experts_per_token": k}
    sparse = cost.estimate(tiny("decoder_lm", **SIZES, ffn="moe", moe=moe), 1, T).forward_flops
    assert sparse - dense == T * (2 * D * E + k * 3 * 2 * D * F - 2 * 2 * D * F)


@pytest.mark.parametrize("all_scores", [False, True])
def test_scanned_experts_cost_the_same(all_scores):
    """Regression test: training with scanned experts ended in a traceback."""
    cfg = tiny("decoder_lm", **SIZES, decoder_layers=2, ffn="moe")
    scanned, batch = dataclasses.replace(cfg, scan_layers=True), registry.example_batch(cfg, 2, 16)
    flops = cost.forward_flops(cfg, batch, all_scores=all_scores)
    assert cost.forward_flops(scanned, batch, all_scores=all_scores) == flops


def test_products_of_experts_are_not_saved_as_dots():
    D, F, T, k = 64, 256, 32, 2
    moe = {"num_experts": 8, "experts_per_token": k, "every": 2}
    cfg = tiny("decoder_lm", **SIZES, decoder_layers=2, ffn="moe", moe=moe, remat="dots_saveable")
    assert cost.recomputed_flops(cfg, registry.example_batch(cfg, 1, T)) == T * k * 3 * 2 * D * F
    dense = tiny("decoder_lm", **SIZES, remat="dots_saveable")
    assert cost.recomputed_flops(dense, registry.example_batch(dense, 1, T)) == 0


def test_more_tokens_than_positions_have_no_cost():
    with pytest.raises(UserError, match="model.max_length=64: is less than 65 tokens"):
        cost.estimate(tiny("decoder_lm", **SIZES), 1, 65)


def test_dense_layers_and_shared_experts_count():
    D, F, T, k, E = 64, 256, 32, 2, 8
    gated = cost.estimate(tiny("decoder_lm", **SIZES, decoder_layers=4, ffn="gated"), 1, T)
    moe = {"num_experts": E, "experts_per_token": k, "every": 2, "dense_dim": 96, "shared_dim": 32, "shared_gate": True}
    mixed = cost.estimate(tiny("decoder_lm", **SIZES, decoder_layers=4, ffn="moe", moe=moe), 1, T)
    in_dense, in_experts = 3 * D * 96, D * E + k * 3 * D * F + 3 * D * 32 + D
    assert mixed.forward_flops - gated.forward_flops == T * 2 * (2 * in_dense + 2 * in_experts - 4 * 3 * D * F)
    biases = 2 * (2 * 96 + D) + 2 * (E * (2 * F + D) + 2 * 32 + D) - 4 * (2 * F + D)
    kernels = 2 * 3 * D * 96 + 2 * (D * E + E * 3 * D * F + 3 * D * 32 + D) - 4 * 3 * D * F
    assert mixed.total - gated.total == kernels + biases


@pytest.mark.slow
def test_experts_run_the_products_that_are_predicted(monkeypatch):
    D, F, T, k, E = 8, 16, 500, 2, 4
    moe = {"num_experts": E, "experts_per_token": k}
    cfg = tiny("decoder_lm", ffn="moe", dim=D, ffn_dim=F, max_length=T, moe=moe)
    layer, x, flops, dot = make_ffn(cfg), normal(1, T, D), [], grouped._dot

    def counted(x, y, *axes):
        out = dot(x, y, *axes)
        flops.append(2 * out.size * x.shape[axes[0]])
        return out

    params = init_module(layer, x)
    monkeypatch.setattr(grouped, "_dot", counted)
    with jax.disable_jit():
        layer.apply({"params": params}, x)
    predicted = k * T * 3 * 2 * D * F
    assert predicted <= sum(flops) <= predicted * 1.3
    assert len(flops) <= 3 * (k * T / grouped.ROWS["cpu"] + E)


def test_neither_flops_nor_memory_of_experts_grow_with_their_number():
    def compiled(E):
        shapes = {"x": ((512, 64), "float32"), "kernels": ((E, 64, 128), "float32"), "counts": ((E,), "int32")}
        arguments = (jax.ShapeDtypeStruct(*shape) for shape in shapes.values())
        return grouped.grouped_product.lower(*arguments).compile()

    few, many = compiled(2), compiled(32)
    block = 2 * grouped.ROWS["cpu"] * 64 * 128
    for program in (few, many):  # XLA counts one iteration of each loop
        assert block <= program.cost_analysis()["flops"] < 1.1 * block
    assert many.memory_analysis().temp_size_in_bytes < 1.1 * few.memory_analysis().temp_size_in_bytes


def test_caches_of_latents_and_states_by_hand():
    L, S, H = 3, 16, 2
    latents = tiny("decoder_lm", decoder_layers=L, attention="mla", mla={"latent_dim": 6, "rotary_dim": 2})
    assert cost.estimate(latents, 5, S).cache_bytes == 4 * L * 5 * S * (6 + 2)
    halves = tiny("decoder_lm", decoder_layers=L, layer_pattern=("gated_delta", "gated_delta", "full"))
    assert cost.estimate(halves, 5, S).cache_bytes == 4 * 5 * 4 * (2 * (H * H + 3 * 3 * H) + 2 * S * H)


def test_flops_of_latent_attention_by_hand():
    """Keys and values are computed from latents, and padded to one size, that of the scores."""
    D, F, V, T, N, H, C, R, Q = 64, 256, 50, 32, 4, 16, 10, 6, 12
    mla = {"latent_dim": C, "rotary_dim": R, "query_latent_dim": Q, "value_dim": 5}
    cfg = tiny("decoder_lm", **SIZES, attention="mla", mla=mla, position="rotary")
    queries, latents = D * Q + Q * N * (H + R), D * (C + R)
    projections = queries + latents + C * N * (H + 5) + N * 5 * D
    per_token = 2 * projections + 2 * 2 * T * N * (H + R) + 2 * 2 * D * F + 2 * D * V
    assert cost.estimate(cfg, 2, T).forward_flops == 2 * T * per_token


def test_flops_of_the_gated_delta_rule_by_hand():
    D, F, V, T, C, N, H = 64, 256, 50, 48, 48, 4, 16
    cfg = tiny("decoder_lm", **SIZES, attention="gated_delta")
    projections = 2 * (3 * D * N * H + 2 * D * N + 2 * D * N * H)
    inverse = sum(64 // (2 * half) * 2 * 2 * half**3 for half in (2, 4, 8, 16, 32))  # of one chunk, padded to 64 tokens
    rule = N * (3 * 2 * C * H + 2 * C * 2 * H + 3 * 2 * H * H + 2 * C * C)  # the last sums log decays
    per_token = projections + rule + 2 * 2 * D * F + 2 * D * V
    assert cost.estimate(cfg, 2, T).forward_flops == 2 * (T * per_token + N * inverse)


def test_parameters_by_module():
    actual = cost.estimate(tiny("decoder_lm", decoder_layers=2, position="learned"), 1, 4, depth=2)
    D, V = 8, 11
    assert actual.parameters["embedding"] == V * D
    assert actual.parameters["decoder/norm"] == 2 * D
    assert actual.parameters["decoder/layers_*"] == 2 * (4 * (D * D + D) + 2 * D * 12 + 12 + D + 4 * D)
    assert actual.embeddings == (V + 16) * D
    assert actual.total == sum(actual.parameters.values())


def test_token_types_are_embeddings():
    actual = cost.estimate(tiny("masked_lm", position="learned", token_types=2), 1, 4)
    D, V = 8, 11
    assert actual.embeddings == (V + 16 + 2) * D


@pytest.mark.parametrize(
    "settings",
    [
        {"num_kv_heads": 2},
        {"attention": "mla"},
        {"layer_pattern": ("gated_delta", "full")},
    ],
    ids=str,
)
def test_predicted_cache_size_equals_the_real_one(settings):
    cfg = tiny("decoder_lm", decoder_layers=3, dtype="bfloat16", **settings)
    cache = jax.eval_shape(lambda: registry.build(cfg).apply({}, 3, 9, method="init_cache"))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.layers))
    assert cost.estimate(cfg, 3, 9).cache_bytes == size


def test_layers_with_a_window_keep_all_tokens():
    """By hand: keys and values of 3 layers, 2 rows, 9 tokens, 2 heads; in decoding commands, the rows differ."""
    cfg = tiny("decoder_lm", decoder_layers=3, layer_pattern=("window", "full"), window=4, num_kv_heads=2)
    assert cost.estimate(cfg, 2, 9).cache_bytes == 2 * 3 * 2 * 9 * 2 * cfg.head_size * 4


@pytest.mark.parametrize("arguments", [["--preset", "gpt2"], ["--config", "configs/translate_cldr.py"]])
def test_the_command_prints_tables(arguments, capsys):
    describe.main([*arguments, "--length", "32"])
    shown = capsys.readouterr().out
    assert "FLOPs per token, forward" in shown
    assert "124,439,808" in shown or "1,051,520" in shown


def test_the_vocabulary_of_each_side_is_that_of_its_tokenizer():
    def sizes(family="seq2seq", **tokenizers):
        model = ModelConfig(family=family, source_vocab_size=None, vocab_size=None)
        source = {"seq2seq": "cldr_translation", "decoder_lm": "stdlib_text"}[family]
        batching = {"seq2seq": "buckets", "decoder_lm": "windows"}[family]
        data = DataConfig(source=source, batching=batching, vocab_size=500, shared_vocab=False, **tokenizers)
        actual = with_sizes(Config(model=model, data=data))
        return actual.source_vocab_size, actual.vocab_size

    assert sizes(tokenizer="bpe", target_tokenizer="bytes") == (500, 260)
    assert sizes(tokenizer="characters", source_tokenizer="bytes", target_tokenizer="words") == (260, 500)
    assert sizes("decoder_lm", tokenizer="bytes") == (None, 260)
    with pytest.raises(
        UserError, match="vocab_size=None: depends on the characters of the text; add, for example, --config"
    ):
        sizes(tokenizer="bpe", target_tokenizer="characters")
    problem = "source_vocab_size=None: depends on data.tokenizer_file; add, for example, --config.model.source"
    with pytest.raises(UserError, match=problem):
        sizes(tokenizer="bpe", source_tokenizer="file", tokenizer_file="x.json")


@pytest.mark.parametrize("objective", [*kinds.OBJECTIVES])
def test_the_vocabulary_has_the_tokens_of_the_objective(objective):
    cfg = read_config(str(train_cases.CONFIGS / f"pretrain_stdlib.py:{objective}"), ["--config.data.tokenizer=bytes"])
    trained = train_tokenizers(cfg.data, [{"text": "abc"}]).target.vocab_size
    assert with_sizes(cfg).vocab_size == trained == 260 + len(kinds.load(kinds.OBJECTIVES, objective).added)
    pair = dataclasses.replace(cfg.data, target_tokenizer="words", shared_vocab=False)
    with pytest.raises(UserError, match=f"data.target_tokenizer='words': must be None for .*={objective!r}: set"):
        dataclasses.replace(cfg, data=pair, model=dataclasses.replace(cfg.model, tie_embeddings="output"))


def test_an_assumed_number_of_classes_is_said(tmp_path, capsys):
    (tmp_path / "here.py").write_text(
        "from tformer_jax.config import *\n"
        "def get_config():\n"
        "    model = ModelConfig(family='classifier', dim=8, encoder_layers=1)\n"
        "    return to_config_dict(Config(model=model, data=DataConfig(source='tsv', train='a.tsv')))\n"
    )
    arguments = ["--config", str(tmp_path / "here.py"), "--length", "8"]
    describe.main(arguments)
    sentence = "2 classes are assumed, as the data is not read: add --config.model.num_classes=N"
    assert sentence in capsys.readouterr().out
    describe.main([*arguments, "--config.model.num_classes=2"])
    assert "assumed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--length", "1025"], "error: --length 1025: must be at most model.max_length=1024"),
        (["--length", "9999999999"], "argument --length: 9999999999 is too large: at most 2147483647"),
        (["--batch", "x"], "argument --batch: x is not an integer of at least 1"),
    ],
)
def test_lengths_and_batches_out_of_range(flags, sentence, capsys):
    with pytest.raises((UserError, SystemExit)) as caught:
        describe.main(["--preset", "gpt2", *flags])
    assert sentence in f"error: {caught.value}{capsys.readouterr().err}"


def test_sizes_are_shown_in_units():
    assert describe.format_size(3 * 2**30) == "3.00 GiB"
    assert describe.format_size(2**19) == "512.00 KiB"


def test_the_cache_has_the_dtype_of_the_config():
    cfg = tiny("decoder_lm", num_heads=2, head_dim=8, decoder_layers=3)
    tokens, heads = 2 * 10 * 3, 2 * 2  # in all layers; of keys and values
    assert cost.estimate(cfg, 2, 10).cache_bytes == tokens * heads * 8 * 4
    assert cost.estimate(cfg, 2, 10, cache_dtype="bfloat16").cache_bytes == tokens * heads * 8 * 2
    assert cost.estimate(cfg, 2, 10, cache_dtype="int8").cache_bytes == tokens * heads * (8 + 4)  # and a float32 scale


@pytest.mark.parametrize("name", ["lm_tiny_shakespeare.py:cpu", "pretrain_stdlib.py", "classify_cldr.py"])
def test_batches_of_any_config(name):
    flags = ["--config.model.vocab_size=65"] if "shakespeare" in name else []
    cfg = read_config(str(train_cases.CONFIGS / name), flags)
    case = train_cases.config_case(cfg)
    (batch,) = case.batches(1)
    assert set(batch) == {*cfg.model.model_class.inputs, cfg.model.model_class.labels}
    assert case.cfg.model.vocab_size == {"lm": 65, "cl": 260}.get(name[:2], cfg.data.vocab_size + 1)
    if flags:
        with pytest.raises(UserError, match="vocab_size=None: depends on the characters of the text"):
            train_cases.config_case(read_config(str(train_cases.CONFIGS / name)))
