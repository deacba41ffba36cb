"""GGUF files give the runs of the Hugging Face checkpoints that they were made of."""

import io
import json

import gguf
import jax
import numpy as np
import pytest
import sentencepiece
import tokenizers as library
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import tformer_jax as tj
from tests.parity import checkpoints
from tformer_jax.base.errors import UserError
from tformer_jax.cli import import_hf
from tformer_jax.interop import gguf as ours
from tformer_jax.interop import hf
from tformer_jax.interop.files import read_arrays

N, K, H = 4, 2, 6
SIZES = {**checkpoints.SIZES, "num_key_value_heads": K, "head_dim": H, "max_position_embeddings": 32, "vocab_size": 64}
KINDS = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma2", "gemma3": "Gemma3"}
GEMMA = {"query_pre_attn_scalar": H, "sliding_window": 16, "rope_theta": 1e6}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"rope_theta": 5e5, "original_max_position_embeddings": 8192}
MORE = {
    "llama": {"rope_parameters": LLAMA3, "head_dim": 6, "tie_word_embeddings": True, "mlp_bias": True},
    "qwen2": {"head_dim": 2},  # it has no other sizes of heads than D / N
    "gemma2": GEMMA,
    "gemma3": GEMMA | {"model_type": "gemma3_text"},
}
TEXTS = ["the cat sat, 1234 times", "don't  sit on the\nlog", "Ω!"]


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes the GGUF file of a checkpoint folder, as llama.cpp's converter does."""

    def write_file(architecture: str, folder, tokens: dict, *, lacks="", order=gguf.GGUFEndian.LITTLE, **more):
        config = json.loads((folder / "config.json").read_text())
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture, endianess=order)
        if lacks != "context_length":
            writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(N)
        writer.add_head_count_kv(K)
        if lacks != "layer_norm_rms_eps":
            writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        rotary = config["rope_parameters"]
        if lacks != "rope_freq_base":
            writer.add_rope_freq_base(rotary.get("full_attention", rotary)["rope_theta"])
        if architecture != "qwen2":
            writer.add_key_length(H)
        if "gemma" in architecture and lacks != "sliding_window":
            writer.add_sliding_window(config["sliding_window"])
        for name, value in more.items():
            add = {float: writer.add_float32, int: writer.add_uint32}
            add[type(value)](name if "split" in name else f"{architecture}.{name}", value)
        for name, value in tokens.items():
            add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
            add[type(value)](f"tokenizer.ggml.{name}", value)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
        for theirs, array in read_arrays(folder).items():
            array = np.asarray(array, np.float32)
            name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
            if architecture == "llama" and name.split(".")[-2] in ("attn_q", "attn_k"):
                heads = N if "attn_q" in name else K
                rows = np.arange(heads * H).reshape(heads, 2, H // 2)
                array = array[rows.transpose(0, 2, 1).reshape(-1)]
            writer.add_tensor(name, array + ("gemma" in architecture and name.endswith("norm.weight")))
        if rotary.get("rope_type") == "llama3":
            frequencies = {}
            for kind in ("llama3", "default"):
                llama = transformers.LlamaConfig(**config | {"rope_parameters": rotary | {"rope_type": kind}})
                frequencies[kind] = LlamaRotaryEmbedding(llama).inv_freq.numpy()
            writer.add_tensor("rope_freqs.weight", frequencies["default"] / frequencies["llama3"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "model.gguf"

    return write_file


def byte_level_bpe() -> tuple[library.Tokenizer, dict]:
    """Returns a tokenizer with SmolLM's digits, and its metadata."""
    special = ["<|endoftext|>", "<|im_end|>"]
    tokenizer = checkpoints.trained(library.models.BPE(), library.trainers.BpeTrainer, special, metaspace=False)
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 5, trainer)  # with numbers as tokens
    digits = library.pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    vocab, model = tokenizer.get_vocab(), json.loads(tokenizer.to_str())["model"]
    return tokenizer, {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": sorted(vocab, key=vocab.get),
        "token_type": [3, 3, *[1] * (len(vocab) - 2)],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "eot_token_id": 0,
        "add_bos_token": True,
    }


@pytest.mark.parametrize("architecture", KINDS)
def test_parameters_and_settings_are_those_of_the_checkpoint(architecture, write, tmp_path):
    checkpoints.save(tmp_path, f"{KINDS[architecture]}ForCausalLM", SIZES | MORE.get(architecture, {}))
    expected, parameters = hf.load(tmp_path)
    (tmp_path / "unpacked").mkdir()
    arrays = ours.unpack(write(architecture, tmp_path, byte_level_bpe()[1]), tmp_path / "unpacked")
    actual, same = hf.load(tmp_path / "unpacked", arrays=arrays)
    assert actual == expected
    tolerance = 1e-6 if "gemma" in architecture else 0  # scales of norms are stored plus 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), same, parameters)


def test_the_command_reads_a_byte_level_bpe(write, tmp_path):
    tokenizer, tokens = byte_level_bpe()
    checkpoints.save(tmp_path, "LlamaForCausalLM", SIZES | {"vocab_size": tokenizer.get_vocab_size()})
    import_hf.main([str(write("llama", tmp_path, tokens)), "--run", str(tmp_path / "run")])
    actual = tj.load(tmp_path / "run").tokenizers.target
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert actual.special.wrap_text(actual.encode(text)) == [0, *ids]
        assert actual.decode(ids) == text
    assert set(actual.special.eos) == {0, 1}


@pytest.mark.parametrize("ids", [{}, {"bos_token_id": 1, "eos_token_id": 2}])
def test_a_sentencepiece_model(ids, write, tmp_path):
    raw = io.BytesIO()
    options = {"model_type": "bpe", "vocab_size": 300, "byte_fallback": True, "normalization_rule_name": "identity"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(checkpoints.TEXTS),
        model_writer=raw,
        hard_vocab_limit=False,
        remove_extra_whitespaces=False,
        minloglevel=9,
        **options,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=raw.getvalue())
    V = model.get_piece_size()
    kinds = [2, 3, 3, *(6 if model.is_byte(i) else 1 for i in range(3, V))]
    tokens = {
        "model": "llama",
        "tokens": [model.id_to_piece(i) for i in range(V)],
        "scores": [model.get_score(i) for i in range(V)],
        "token_type": kinds,
    } | ids
    checkpoints.save(tmp_path, "LlamaForCausalLM", SIZES | {"vocab_size": V})
    import_hf.main([str(write("llama", tmp_path, tokens)), "--run", str(tmp_path / "run")])
    actual = tj.load(tmp_path / "run").tokenizers.target
    for text in TEXTS:
        assert actual.special.wrap_text(actual.encode(text)) == [1, *model.encode(text)]
        assert actual.special.eos == (2,)
        assert actual.decode(model.encode(text)) == text


def test_runs_of_spaces_are_tokens_as_in_gemma(write, tmp_path):
    """Regression test: two spaces were two tokens, because llama.cpp's converter writes that token with its spaces."""
    raw, spaces = io.BytesIO(), ["  ", "   ", "\n\n"]
    symbols = [text.replace(" ", "\u2581") for text in spaces]
    options = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    options |= {"add_dummy_prefix": False, "remove_extra_whitespaces": False, "user_defined_symbols": symbols}
    options |= {"vocab_size": 300, "hard_vocab_limit": False, "minloglevel": 9}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(checkpoints.TEXTS), model_writer=raw, **options)
    model = sentencepiece.SentencePieceProcessor(model_proto=raw.getvalue())
    V = model.get_piece_size()
    written, kinds = (
        [model.id_to_piece(i) for i in range(V)],
        [2, 3, 3, *(6 if model.is_byte(i) else 1 for i in range(3, V))],
    )
    for piece, text in zip(symbols, spaces, strict=True):
        written[model.piece_to_id(piece)], kinds[model.piece_to_id(piece)] = text, 4
    tokens = {
        "model": "llama",
        "tokens": written,
        "scores": [model.get_score(i) for i in range(V)],
        "token_type": kinds,
    }
    tokens |= {"bos_token_id": 1, "eos_token_id": 2, "add_space_prefix": False}
    checkpoints.save(tmp_path, "Gemma2ForCausalLM", SIZES | GEMMA | {"vocab_size": V})
    import_hf.main([str(write("gemma2", tmp_path, tokens)), "--run", str(tmp_path / "run")])
    actual = tj.load(tmp_path / "run").tokenizers.target
    for text in ("the  cat   sat", "  the\n\ncat ", "     "):
        assert actual.encode(text) == model.encode(text)
        assert actual.decode(model.encode(text)) == text


@pytest.mark.parametrize("lacks", ["context_length", "layer_norm_rms_eps", "sliding_window"])
def test_metadata_that_llama_cpp_requires(lacks, write, tmp_path):
    checkpoints.save(tmp_path, "Gemma3ForCausalLM", SIZES | MORE["gemma3"])
    with pytest.raises(UserError, match=rf"the metadata gemma3\.\S*{lacks.removesuffix('eps')}\S* are missing"):
        ours.unpack(write("gemma3", tmp_path, byte_level_bpe()[1], lacks=lacks), tmp_path)


def test_the_base_of_rotations_and_the_period_of_windows_without_and_with_metadata(write, tmp_path):
    checkpoints.save(tmp_path, "Gemma3ForCausalLM", SIZES | MORE["gemma3"])
    more = {"attention.sliding_window_pattern": 3}
    ours.unpack(write("gemma3", tmp_path, byte_level_bpe()[1], lacks="rope_freq_base", **more), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["rope_theta"], config["sliding_window_pattern"]) == (10_000, 3)


def test_big_endian_files(write, tmp_path):
    """Regression test: their numbers were read as little-endian ones."""
    checkpoints.save(tmp_path, "LlamaForCausalLM", SIZES)
    file = write("llama", tmp_path, byte_level_bpe()[1], order=gguf.GGUFEndian.BIG)
    expected = read_arrays(tmp_path)
    (tmp_path / "unpacked").mkdir()
    actual = ours.unpack(file, tmp_path / "unpacked")
    assert actual.keys() == expected.keys()
    for name, array in actual.items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize(
    ("name", "order", "message"),
    [
        ("Q8_1", gguf.GGUFEndian.LITTLE, "more has the type Q8_1, which is not read: convert the file to F32 or Q8_0"),
        ("Q8_0", gguf.GGUFEndian.BIG, "more has the type Q8_0, which is not read from big-endian files"),
    ],
)
def test_types_that_are_not_read(name, order, message, write, tmp_path, monkeypatch):
    checkpoints.save(tmp_path, "LlamaForCausalLM", SIZES)
    kind = gguf.GGMLQuantizationType[name]
    header = gguf.GGUFWriter.write_header_to_file

    def with_more(writer):
        blocks = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        writer.add_tensor("more", blocks, raw_dtype=kind)
        header(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_more)
    arrays = ours.unpack(write("llama", tmp_path, byte_level_bpe()[1], order=order), tmp_path)
    with pytest.raises(UserError, match=message):
        arrays["more"]


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("smollm", False)])
def test_what_the_metadata_do_not_say_is_what_llama_cpp_does(pre, begins, write, tmp_path):
    checkpoints.save(tmp_path, "LlamaForCausalLM", SIZES)
    tokens = byte_level_bpe()[1] | {"pre": pre}
    del tokens["add_bos_token"]
    ours.unpack(write("llama", tmp_path, tokens), tmp_path)
    encoded = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("the cat")
    assert (encoded.ids[0] == tokens["bos_token_id"]) == begins


def test_a_file_with_more_tokens_than_its_model_is_named(write, tmp_path):
    """Regression test: the message named the folder to which the file was unpacked."""
    checkpoints.save(tmp_path, "LlamaForCausalLM", SIZES | {"vocab_size": 9})
    file = write("llama", tmp_path, byte_level_bpe()[1])
    with pytest.raises(UserError, match=rf"{file}: its tokenizer has \d+ tokens, and its model only 9"):
        import_hf.main([str(file), "--run", str(tmp_path / "run")])


def test_files_without_a_whole_model_are_refused(tmp_path):
    for name, value, message in (
        ("general.type", "adapter", "file.gguf holds .adapter.: name the GGUF file of a whole model"),
        ("general.name", "a vocabulary", "file.gguf has no token_embd.weight: name the GGUF file of a whole"),
    ):
        writer = gguf.GGUFWriter(tmp_path / "file.gguf", "llama")
        writer.add_string(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(UserError, match=message):
            ours.unpack(tmp_path / "file.gguf", tmp_path)


@pytest.mark.parametrize(
    ("tokens", "more", "message"),
    [
        ({"merges": None}, {}, r"model.gguf lacks metadata of a model, or is damaged \(KeyError: .merges.\)"),
        ({"tokens": None}, {}, r"model.gguf lacks metadata of a model, or is damaged \(KeyError: .tokens.\)"),
        ({"bos_token_id": None}, {}, r"model.gguf lacks metadata of a model, or is damaged \(TypeError: "),
        ({"pre": "tekken"}, {}, "tokenizer.ggml.pre='tekken' is not supported"),
        ({"model": "bert"}, {}, "tokenizer.ggml.model='bert' is not supported"),
        ({}, {"split.count": 3}, "model.gguf is a part of a model in 3 files: join them by llama-gguf-split --merge"),
        ({}, {"logit_scale": 0.5}, "the metadata llama.logit_scale=0.5 are not supported"),
    ],
)
def test_what_is_not_supported_is_named(tokens, more, message, write, tmp_path):
    checkpoints.save(tmp_path, "LlamaForCausalLM", SIZES)
    tokens = {name: value for name, value in (byte_level_bpe()[1] | tokens).items() if value is not None}
    file = write("llama", tmp_path, tokens, **more)
    with pytest.raises(UserError, match=message):
        ours.unpack(file, tmp_path)
    file.write_bytes(b"GGUF")
    with pytest.raises(UserError, match="is not a GGUF file, or is damaged"):
        ours.unpack(file, tmp_path)
