"""Training of a small nanoGPT equals PyTorch step by step: same initial weights, same batches, float32."""

import argparse
import dataclasses
import inspect
import math

import jax
import numpy as np
import pytest
import torch
from flax import linen as nn
from torch.nn import functional

from tests.helpers import assert_close
from tformer_jax.cli.config_file import read_config
from tformer_jax.config import Config, OptimConfig, ParallelConfig, TrainConfig
from tformer_jax.models import registry
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.train import optimizers, state
from tformer_jax.train.step import jitted, make_train_step

STEPS = 50


class Block(torch.nn.Module):
    """A pre-norm block of attention and FFN, without biases."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(dim, bias=False), torch.nn.LayerNorm(dim, bias=False)
        self.qkv, self.proj = torch.nn.Linear(dim, 3 * dim, bias=False), torch.nn.Linear(dim, dim, bias=False)
        self.up, self.down = torch.nn.Linear(dim, 4 * dim, bias=False), torch.nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(functional.gelu(self.up(self.ln_2(x))))


class GPT(torch.nn.Module):
    """A language model whose output head is the token embedding."""

    def __init__(self, vocab: int, dim: int, heads: int, layers: int, context: int):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(vocab, dim), torch.nn.Embedding(context, dim)
        self.blocks = torch.nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(dim, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


def read_weights(model: GPT, params: dict) -> None:
    """Copies our parameters into the PyTorch model."""
    tensor = lambda array: torch.tensor(np.asarray(array))  # noqa: E731
    D = model.tokens.weight.shape[1]
    with torch.no_grad():
        model.tokens.weight.copy_(tensor(params["embedding"]["embedding"]))
        model.positions.weight.copy_(tensor(params["input"]["positions"]["embedding"]))
        model.norm.weight.copy_(tensor(params["decoder"]["norm"]["scale"]))
        for number, block in enumerate(model.blocks):
            layer = params["decoder"][f"layers_{number}"]
            attention = layer["self_attention"]
            kernels = [tensor(attention[name]["kernel"]).reshape(D, D).T for name in ("query", "key", "value")]
            block.qkv.weight.copy_(torch.cat(kernels))
            block.proj.weight.copy_(tensor(attention["output"]["kernel"]).reshape(D, D).T)
            block.up.weight.copy_(tensor(layer["ffn"]["expand"]["kernel"]).T)
            block.down.weight.copy_(tensor(layer["ffn"]["contract"]["kernel"]).T)
            block.ln_1.weight.copy_(tensor(layer["self_attention_residual"]["norm"]["scale"]))
            block.ln_2.weight.copy_(tensor(layer["ffn_residual"]["norm"]["scale"]))


def rate(step: int, optim: OptimConfig) -> float:
    """nanoGPT's schedule: linear warm-up, then cosine decay to a tenth."""
    t = step + 1
    if t < optim.warmup_steps:
        return optim.learning_rate * t / optim.warmup_steps
    done = (t - optim.warmup_steps) / (STEPS - optim.warmup_steps)
    return optim.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    """Returns the characters of a Python module, as ids."""
    letters = inspect.getsource(argparse)
    known = sorted(set(letters))
    return np.array([4 + known.index(letter) for letter in letters], np.int32)


@pytest.fixture(scope="module")
def cfg(text) -> Config:
    shipped = read_config("configs/lm_tiny_shakespeare.py:cpu")
    return dataclasses.replace(
        shipped,
        model=dataclasses.replace(shipped.model, vocab_size=int(text.max()) + 1),
        optim=dataclasses.replace(shipped.optim, warmup_steps=10),
        train=TrainConfig(steps=STEPS),
    )


def test_the_loss_curve_of_nanogpt(cfg, text):
    batch, context = cfg.data.batch_size, cfg.data.window
    starts = np.random.default_rng(0).integers(0, len(text) - context - 1, (STEPS, batch))
    windows = [np.stack([text[start : start + context + 1] for start in row]) for row in starts]

    model = registry.build(cfg.model)
    optimizer = optimizers.build(cfg, registry.shapes(model))
    mesh = make_mesh(ParallelConfig(data=1))
    current = state.create(model, optimizer, cfg, mesh)
    theirs = GPT(cfg.model.vocab_size, cfg.model.dim, cfg.model.num_heads, cfg.model.decoder_layers, context)
    read_weights(theirs, jax.device_get(current.params))

    step, ours = jitted(make_train_step(model, optimizer, cfg), current, mesh), []
    for window in windows:
        current, metrics = step(current, {"tokens": window[:, :-1], "targets": window[:, 1:]})
        ours.append(float(metrics["loss"]))

    matrices = [parameter for parameter in theirs.parameters() if parameter.dim() > 1]
    norms = [parameter for parameter in theirs.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": cfg.optim.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(cfg.optim.beta1, cfg.optim.beta2), eps=cfg.optim.eps)
    losses = []
    for number, window in enumerate(windows):
        for group in adamw.param_groups:
            group["lr"] = rate(number, cfg.optim)
        tokens = torch.tensor(window, dtype=torch.long)
        loss = functional.cross_entropy(theirs(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), cfg.optim.clip_norm)
        adamw.step()
        losses.append(loss.item())

    assert losses[-1] < losses[0] - 1
    assert_close(ours, losses, 1e-3 / max(losses), proves=("training: nanoGPT, 50 steps", "PyTorch, every loss"))


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.8, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_of_an_optimizer(name):
    draw = np.random.default_rng(0)
    start = draw.normal(size=(6, 4)).astype(np.float32)
    grads = draw.normal(size=(3, 6, 4)).astype(np.float32)
    parameter = torch.nn.Parameter(torch.tensor(start))
    theirs = OPTIMIZERS[name]([parameter])
    settings = {"learning_rate": 0.01, "warmup_steps": 1, "beta1": 0.8}
    settings |= {"beta2": 0.9, "eps": 1e-6} if name == "adamw" else {}
    optim = OptimConfig(optimizer=name, schedule="constant", weight_decay=0.1, clip_norm=0.0, **settings)
    shape = nn.LogicallyPartitioned(jax.ShapeDtypeStruct((6, 4), np.float32), ("embed", "mlp"))
    ours = optimizers.build(Config(optim=optim), {"kernel": shape})
    params = {"kernel": start}
    opt_state = ours.init(params)
    for grad in grads:
        parameter.grad = torch.tensor(grad)
        theirs.step()
        updates, opt_state = ours.update({"kernel": grad}, opt_state, params)
        params = {"kernel": params["kernel"] + updates["kernel"]}
    proves = (f"optim.optimizer={name}", "torch.optim, three steps")
    assert_close(params["kernel"], parameter.detach(), 1e-6, proves=proves)
