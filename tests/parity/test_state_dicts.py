"""State dicts of nanoGPT and of `torch.nn.Transformer`, imported by the command, compute what PyTorch computes."""

import itertools
import math
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as library
import torch
from torch import nn
from torch.nn import functional

import tformer_jax as tj
from tests.helpers import assert_close, normal, rest_slow
from tests.parity.checkpoints import TEXTS
from tformer_jax.base.errors import UserError
from tformer_jax.cli import generate, import_hf, translate
from tformer_jax.interop import mapping, state_dicts, torch_transformer
from tformer_jax.interop.decoders import gpt2_rules

N, D, LENGTH = 4, 8, 32
TEXT = "".join(TEXTS)
PROMPT = "the cat"


class Block(nn.Module):
    """A layer with nanoGPT's names."""

    def __init__(self, bias: bool):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(D, bias=bias), nn.LayerNorm(D, bias=bias)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(D, 3 * D, bias), "c_proj": nn.Linear(D, D, bias)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(D, 4 * D, bias), "c_proj": nn.Linear(4 * D, D, bias)})

    def forward(self, x):
        heads = (part.unflatten(-1, (N, -1)).transpose(1, 2) for part in self.attn["c_attn"](self.ln_1(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attn["c_proj"](attended.transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(nn.Module):
    """A model with nanoGPT's names, and its tied head."""

    def __init__(self, vocab_size: int, bias: bool):
        super().__init__()
        embeddings = {"wte": nn.Embedding(vocab_size, D), "wpe": nn.Embedding(LENGTH, D)}
        layers = {"h": nn.ModuleList([Block(bias), Block(bias)]), "ln_f": nn.LayerNorm(D, bias=bias)}
        self.transformer = nn.ModuleDict(embeddings | layers)
        self.lm_head = nn.Linear(D, vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens):
        parts = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1]))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


class Embedding(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.embedding = nn.Embedding(size, D)

    def forward(self, tokens):
        return self.embedding(tokens) * math.sqrt(D)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        angles = torch.arange(LENGTH)[:, None] * torch.exp(-torch.arange(0, D, 2) * math.log(10_000) / D)
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).reshape(LENGTH, 1, D)
        self.register_buffer("pos_embedding", table)

    def forward(self, x):
        return x + self.pos_embedding[: x.shape[1], 0]


class Seq2Seq(nn.Module):
    """A model with the names of PyTorch's translation tutorial."""

    def __init__(self, sizes: tuple[int, int], **options):
        super().__init__()
        depth = {"num_encoder_layers": 2, "num_decoder_layers": 1, "dim_feedforward": 12, "dropout": 0.0}
        self.transformer = nn.Transformer(D, N, **depth, batch_first=True, **options)
        self.src_tok_emb, self.tgt_tok_emb = map(Embedding, sizes)
        self.positional_encoding = Positions()
        self.generator = nn.Linear(D, sizes[1])

    def forward(self, source, target):
        source, target = (
            self.positional_encoding(embed(tokens))
            for embed, tokens in ((self.src_tok_emb, source), (self.tgt_tok_emb, target))
        )
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.generator(self.transformer(source, target, tgt_mask=causal, tgt_is_causal=True))


def randomized(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def import_checkpoint(path, run, *flags) -> tj.Run:
    import_hf.main([str(path), "--run", str(run), *map(str, flags)])
    return tj.load(run)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("characters") / "input.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("bias", rest_slow([True, False], 1))
def test_nanogpt_as_its_training_saves_it(tmp_path, text_file, bias, capsys):
    """After `torch.compile`, with the optimizer's state, and with character-level data."""
    characters = sorted(set(TEXT))
    model = randomized(NanoGPT(len(characters), bias))
    sizes = {"n_layer": 2, "n_head": N, "n_embd": D, "block_size": LENGTH, "bias": bias, "vocab_size": len(characters)}
    compiled = {f"_orig_mod.{name}": array for name, array in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1]])).sum().backward()
    optimizer.step()
    compiled = {name: model.state_dict()[name.removeprefix("_orig_mod.")] for name in compiled}
    checkpoint = {"model": compiled, "optimizer": optimizer.state_dict(), "model_args": sizes | {"dropout": 0.0}}
    torch.save(checkpoint | {"iter_num": 1, "best_val_loss": torch.tensor(2.5), "config": {}}, tmp_path / "ckpt.pt")
    run = import_checkpoint(tmp_path / "ckpt.pt", tmp_path / "run", "--tokenizer", text_file)
    ids = torch.tensor([[characters.index(character) for character in PROMPT]])
    with torch.no_grad():
        assert_close(run.logits([PROMPT])[0], model(ids)[0].numpy(), 1e-5)
        for _ in range(9):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    capsys.readouterr()
    generate.main(["--run", str(tmp_path / "run"), PROMPT, "--max-new-tokens", "9"])
    assert capsys.readouterr().out == "".join(characters[i] for i in ids[0]) + "\n"


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_removed(tmp_path, prefix):
    torch.save({f"{prefix}a.module.b": torch.ones(2)}, tmp_path / "ckpt.pt")
    assert list(state_dicts.read(tmp_path / "ckpt.pt")[0]) == ["a.module.b"]


@pytest.mark.parametrize(("linear", "transposed"), [(mapping.untransposed, False), (mapping.kernel, True)])
def test_the_heads_are_side_by_side_in_gpt2s_output_projection(linear, transposed):
    (layout,) = [rule.layout for rule in gpt2_rules(linear) if rule.theirs.endswith("attn.c_proj.weight")]
    heads, kernel = (np.asarray(normal(*shape)) for shape in ((3, N, 2), (N, 2, D)))
    theirs = layout.theirs(kernel)
    rows = heads.reshape(3, N * 2) @ (theirs.T if transposed else theirs)
    assert_close(rows, np.einsum("tnh,nhd->td", heads, kernel))
    np.testing.assert_array_equal(layout.ours(theirs, kernel.shape), kernel)


@pytest.fixture(scope="module")
def word_files(tmp_path_factory):
    """Tokenizers of words with four special tokens; the source one adds <bos> and <eos>."""
    files = []
    for name, more in (("source", ()), ("target", ("extra",))):
        words = sorted({word for text in TEXTS for word in text.split()} | set(more))
        vocab = {word: number for number, word in enumerate(["<unk>", "<pad>", "<bos>", "<eos>", *words])}
        tokenizer = library.Tokenizer(library.models.WordLevel(vocab, unk_token="<unk>"))
        tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
        ends = [("<bos>", 2), ("<eos>", 3)]
        tokenizer.post_processor = library.processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=ends)
        files.append(tmp_path_factory.mktemp("words") / f"{name}.json")
        tokenizer.save(str(files[-1]))
    return files


def sizes(files) -> list[int]:
    return [library.Tokenizer.from_file(str(file)).get_vocab_size() for file in files]


TRANSFORMERS = {
    "as in the tutorial": {},
    "norms first": {"norm_first": True, "activation": "gelu"},
    "no biases": {"bias": False, "layer_norm_eps": 1e-3},
}


@pytest.mark.parametrize("options", rest_slow(TRANSFORMERS, 1))
def test_torch_transformer(tmp_path, word_files, options, capsys):
    model = randomized(Seq2Seq(sizes(word_files), **options))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    given = [f"{key}={value}" for key, value in {"nhead": N, "dropout": 0.0, **options}.items()]
    flags = "--tokenizer", *word_files, "--model-args", *given
    run = import_checkpoint(tmp_path / "model.pt", tmp_path / "run", *flags)
    source, target = "the cat sat on the mat", "the dog sat"
    words = [library.Tokenizer.from_file(str(file)) for file in word_files]
    ids = [known.encode(text).ids for known, text in zip(words, (source, target), strict=True)]
    tokens = [torch.tensor([row]) for row in ids]
    with torch.no_grad():
        expected = model(tokens[0], tokens[1][:, :-1])[0].numpy()
        assert_close(run.logits([(source, target)])[0], expected, 1e-5)
        output = torch.tensor([[2]])
        for _ in range(6):
            output = torch.cat([output, model(tokens[0], output)[:, -1:].argmax(-1)], dim=1)
    capsys.readouterr()
    translate.main(["--run", str(tmp_path / "run"), source, "--max-new-tokens", "6", "--strategy", "greedy"])
    until_end = itertools.takewhile(lambda token: token != 3, output[0, 1:].tolist())
    expected = " ".join(words[1].id_to_token(token) for token in until_end if token > 3)
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize(
    ("copies", "kind"),
    [(("source", "head"), "all"), (("source",), "inputs"), (("head",), "output"), ((), "none")],
)
def test_copies_of_the_targets_embedding_are_tied(copies, kind):
    arrays = {"target": np.eye(2)}
    arrays |= {name: np.eye(2) if name in copies else np.ones((2, 2)) for name in ("source", "head")}
    assert torch_transformer.remove_tied(arrays, "source", "target", "head") == kind
    assert arrays.keys() == {"target", "source", "head"} - {*copies}


@pytest.mark.slow
def test_tied_embeddings(tmp_path, word_files):
    model = randomized(Seq2Seq((sizes(word_files)[1],) * 2))
    model.generator.weight = model.src_tok_emb.embedding.weight = model.tgt_tok_emb.embedding.weight
    torch.save({"state_dict": model.state_dict()}, tmp_path / "model.pth")
    flags = "--tokenizer", word_files[1], "--model-args", f"nhead={N}"
    run = import_checkpoint(tmp_path / "model.pth", tmp_path / "run", *flags)
    assert run.config.model.tie_embeddings == "all"
    ids = torch.tensor([[2, 5, 6, 3]])
    with torch.no_grad():
        expected = model(ids, ids).numpy()
    actual = run.model.apply({"params": run.params}, jnp.array(ids), jnp.array(ids))
    assert_close(actual, expected, 1e-5)


class Runs:
    """An object whose unpickling writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def mistake_states(path):
    return randomized(NanoGPT(5, True)).state_dict(), path / "ckpt.pt"


def an_object(path):
    state, file = mistake_states(path)
    torch.save({"model": state, "config": Runs(path / "ran")}, file)


def a_pickle(path):
    (path / "ckpt.pt").write_bytes(pickle.dumps({"model": Runs(path / "ran")}))


def truncated(path):
    state, file = mistake_states(path)
    torch.save(state, file)
    file.write_bytes(file.read_bytes()[:-100])


def saved(change):
    def save(path):
        state, file = mistake_states(path)
        torch.save(change(state), file)

    return save


def without(state, name: str):
    return {key: array for key, array in state.items() if key != name}


WHOLE = {"n_head": N}
MISTAKES = {
    "an object": (an_object, "holds other objects than tensors, which are never unpickled: save model.state_dict"),
    "a pickle": (a_pickle, "ckpt.pt (holds other objects than tensors|is not a file of torch.save)"),
    "truncated": (truncated, "ckpt.pt is not a file of torch.save, or is damaged"),
    "no tensors": (saved(lambda _: {"model": {"a": 3}}), "has no state dict, neither as a whole nor under one of mod"),
    "another model": (saved(lambda _: {"a": torch.ones(3)}), "is a state dict of another model: it has no array 'tran"),
    "a number": (saved(lambda _: {"a": torch.tensor(3.0)}), "is a state dict of another model: it has no array 'tran"),
    "missing": (
        saved(lambda s: {"model": without(s, "transformer.h.1.ln_2.bias"), "model_args": WHOLE}),
        "the checkpoint has no array 'transformer.h.1.ln_2.bias' for the parameter decoder/layers_1/",
    ),
    "missing size": (
        saved(lambda s: {"model": without(s, "transformer.wpe.weight"), "model_args": WHOLE}),
        "the checkpoint has no 'transformer.wpe.weight'",
    ),
    "vector": (
        saved(lambda s: {"model": s | {"transformer.wpe.weight": torch.ones(9)}, "model_args": WHOLE}),
        r"transformer.wpe.weight of the checkpoint has the shape .9,., but must be a matrix",
    ),
    "two projections": (
        saved(lambda s: s | {"self_attn.in_proj_bias": torch.ones(8)}),
        r"self_attn.in_proj_bias has the shape .8,., which cannot be split into three projections",
    ),
    "heads": (
        saved(lambda state: state),
        "model_args: n_head is missing and cannot be inferred from the arrays: add --model-args n_h",
    ),
    "contradiction": (saved(lambda s: {"model": s, "model_args": WHOLE | {"n_layer": 3}}), "n_layer=3, but the arrays"),
    "unknown": (saved(lambda s: {"model": s, "model_args": WHOLE | {"rope": True}}), "rope=True is not supported; sup"),
    "vocabulary": (saved(lambda s: {"model": s, "model_args": WHOLE}), "input.txt has 19 different characters"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(tmp_path, text_file, name):
    write, sentence = MISTAKES[name]
    write(tmp_path)
    with pytest.raises(UserError, match=sentence) as caught:
        import_checkpoint(tmp_path / "ckpt.pt", tmp_path / "run", "--tokenizer", text_file)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "ran").exists()


def test_positions_and_tokenizers_that_do_not_fit(tmp_path, word_files):
    model = randomized(Seq2Seq(sizes(word_files)))
    model.positional_encoding.pos_embedding += 1
    torch.save(model.state_dict(), tmp_path / "model.pt")
    flags = "--model-args", f"nhead={N}"
    with pytest.raises(UserError, match="model.pt has no tokenizer: add --tokenizer FILE, or two files"):
        import_checkpoint(tmp_path / "model.pt", tmp_path / "run", *flags)
    with pytest.raises(UserError, match="pos_embedding of the checkpoint is not supported, only interleaved sines"):
        import_checkpoint(tmp_path / "model.pt", tmp_path / "run", "--tokenizer", *word_files, *flags)
    torch.save(model.state_dict() | {"positional_encoding.pos_embedding": torch.ones(D + 1)}, tmp_path / "model.pt")
    with pytest.raises(UserError, match=rf"pos_embedding .* has the shape \({D + 1},\), which does not fit D = {D}"):
        import_checkpoint(tmp_path / "model.pt", tmp_path / "run", "--tokenizer", *word_files, *flags)


def test_tokenizers_that_do_not_fit(tmp_path, text_file, word_files):
    characters = len(set(TEXT))
    state = {"model": randomized(NanoGPT(characters, True)).state_dict(), "model_args": WHOLE}
    torch.save(state, tmp_path / "ckpt.pt")
    for name, content in (("latin.txt", "zwölf".encode("latin-1")), ("empty.txt", b""), ("other.txt", b"abc")):
        (tmp_path / name).write_bytes(content)
    mistakes = {
        "latin.txt is not UTF-8 .byte 2.: convert it": ["--tokenizer", "latin.txt"],
        "empty.txt is empty: name the text": ["--tokenizer", "empty.txt"],
        f"other.txt has 3 different characters, but .* on {characters}: name": ["--tokenizer", "other.txt"],
        "2 tokenizers are given, but this model has 1: leave out ": ["--tokenizer", "other.txt", "empty.txt"],
        "--family is for checkpoints in Hugging Face's format, but": [
            "--tokenizer",
            text_file,
            "--family",
            "masked_lm",
        ],
    }
    for sentence, (flag, *values) in mistakes.items():
        flags = [tmp_path / value if str(value).endswith(".txt") else value for value in values]
        with pytest.raises(UserError, match=sentence):
            import_checkpoint(tmp_path / "ckpt.pt", tmp_path / "run", flag, *flags)
    assert not (tmp_path / "run").exists()


def test_characters_are_nanogpts(text_file):
    from tformer_jax.data.tokenizers.standalone import character_tokenizer

    tokenizer, known = character_tokenizer(TEXT), sorted(set(TEXT))
    assert tokenizer.encode(PROMPT) == [known.index(character) for character in PROMPT]
    assert tokenizer.decode(tokenizer.encode(PROMPT)) == PROMPT
    np.testing.assert_array_equal(tokenizer.encode("\n \t"), tokenizer.encode(" "))
