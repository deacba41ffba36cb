"""Every preset builds, with the number of parameters stated by its authors or the released checkpoint."""

import jax
import numpy as np
import pytest
from flax import linen as nn

from tests.helpers import rest_slow
from tformer_jax import presets
from tformer_jax.base.errors import UserError
from tformer_jax.models import registry

RELEASED = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "bert_base": 109_482_240 + 768 * 2 + 2,
    "bert_large": 335_141_888 + 1024 * 2 + 2,
    "bert_base_mlm": 109_514_298,
    "bert_large_mlm": 335_174_458,
    "t5_small": 60_506_624,
    "t5_base": 222_903_552,
    "t5_large": 737_668_096,
    "t5_3b": 2_851_598_336,
    "t5_11b": 11_307_321_344,
    "t5_v1_1_small": 76_961_152,
    "t5_v1_1_base": 247_577_856,
    "t5_v1_1_large": 783_150_080,
    "t5_v1_1_xl": 2_849_757_184,
    "t5_v1_1_xxl": 11_135_332_352,
    "bart_base": 139_420_416,
    "bart_large": 406_291_456,
    "m2m_100_418m": 483_905_536,
    "nllb_200_600m": 615_073_792,
    "opus_mt": 74_410_496 - 2 * 512 * 512 + 58_101,  # theirs counts two tables of positions, and not the output bias
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "mistral_7b": 7_241_732_096,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_8b": 8_190_735_360,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_630_071_296,
}


def vaswani(D: int, F: int) -> int:
    """Six layers each: 4 D^2 per attention, 2 D F + F + D per FFN, 2 D per norm, and one embedding."""
    attention, ffn, norm = 4 * D * D, 2 * D * F + F + D, 2 * D
    return 6 * (attention + ffn + 2 * norm) + 6 * (2 * attention + ffn + 3 * norm) + 37_000 * D


BY_HAND = {
    "vaswani2017_base": vaswani(512, 2048),
    "vaswani2017_big": vaswani(1024, 4096),
    # torch.nn.Transformer() has 44,140,544, closing norms included; two embeddings, and an output layer with bias
    "annotated_transformer": 44_140_544 + 3 * 37_000 * 512 + 37_000,
    # GPT-2's size with 47 more rows of embedding
    "gpt_tutorial": 124_439_808 + 47 * 768,
    # 6 blocks (bias on the output projection only), two embeddings, two classes
    "sequence_classifier": 6 * (4 * 128**2 + 128 + 2 * 128 * 512 + 512 + 128 + 4 * 128) + 50_512 * 128 + 2 * 128 + 2,
    # 2 encoder and 3 decoder layers without biases
    "rmsnorm_post_translator": 2 * (4 * 512**2 + 2 * 512 * 2048 + 2 * 512)
    + 3 * (8 * 512**2 + 2 * 512 * 2048 + 3 * 512)
    + 3 * 10_000 * 512
    + 10_000,
    # as vaswani, with a norm after each stack, one embedding and a head
    "pre_norm_translator": vaswani(512, 2048) + 4 * 512 + (2 * 10_000 - 37_000) * 512,
}


BIG = ("medium", "large", "xl", "xxl", "big", "3b", "4b", "11b", "13b", "70b", "405b", "7b", "8b", "9b", "27b", "8x22b")
"""Sizes of a series that has a smaller preset."""
FIRST = ("llama2_7b", "llama3_8b", "mistral_7b")
LATER = ("t5_base", "t5_v1_1_base", "qwen2_5_1_5b", "bert_large_mlm")
"""Larger presets whose size has the name of the smallest one of another series."""
SMALLEST = [
    name for name in presets.PRESETS if name in FIRST or (name not in LATER and name.rpartition("_")[2] not in BIG)
]


@pytest.mark.parametrize(
    "name", rest_slow([*SMALLEST, *(name for name in presets.PRESETS if name not in SMALLEST)], len(SMALLEST))
)
def test_size(name):
    cfg = presets.build(name, scan_layers=True)
    shapes = jax.eval_shape(lambda: nn.unbox(registry.init(registry.build(cfg), jax.random.key(0))))
    assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes)) == (RELEASED | BY_HAND)[name]


def test_the_published_table_is_rounded():
    # table 3 of the 2017 paper says 65 and 213 million, with a vocabulary of "about 37,000"
    assert abs(BY_HAND["vaswani2017_base"] / 65e6 - 1) < 0.05
    assert abs(BY_HAND["vaswani2017_big"] / 213e6 - 1) < 0.05


def test_context_lengths_of_qwen2_5():
    """ "Qwen2.5 Technical Report" (2024), table 1: 32K tokens for the small models, 128K from 7B on."""
    lengths = {name: presets.build(name).max_length for name in presets.PRESETS if name.startswith("qwen2_5")}
    assert lengths == {"qwen2_5_0_5b": 32 * 1024, "qwen2_5_1_5b": 32 * 1024, "qwen2_5_7b": 128 * 1024}


def test_unknown_names_get_a_hint():
    with pytest.raises(UserError, match="preset 'gpt3' is not known; did you mean 'gpt2'?"):
        presets.build("gpt3")


def test_a_preset_can_be_changed_without_changing_it():
    assert presets.build("gpt2", dropout=0.0).dropout == 0.0
    assert "dropout" not in presets.settings("gpt2")


@pytest.mark.parametrize("name", rest_slow(["t5_3b", "t5_small", "t5_v1_1_small"], 2))
def test_t5_scores_initially_have_unit_variance(name):
    """T5 does not divide scores by the root of the head size; the initial queries are smaller instead."""
    sizes = {"dim": 256, "head_dim": 64, "num_heads": 8, "ffn_dim": 8, "vocab_size": 11, "source_vocab_size": 11}
    cfg = presets.build(name, **sizes, encoder_layers=1, decoder_layers=0, init_std=256**-0.5)

    @jax.jit
    def initial():
        params = nn.unbox(registry.init(registry.build(cfg), jax.random.key(0)))
        attention = params["encoder"]["layers_0"]["self_attention"]
        return attention["query"]["kernel"], attention["key"]["kernel"], params["target_embedding"]["embedding"]

    *projections, embedding = jax.device_get(initial())
    x = np.random.default_rng(0).normal(size=(200, 256))
    q, k = (np.einsum("td,dnh->tnh", x, kernel) for kernel in projections)
    assert abs(np.einsum("tnh,snh->nts", q, k).std() - 1) < 0.1
    assert abs(embedding.std() - 1) < 0.1


def test_embeddings_and_positions_have_similar_scale():
    """Embeddings start as in torch.nn.Embedding, N(0, 1), with sinusoidal positions."""
    assert presets.build("rmsnorm_post_translator").embedding_std == 1.0
