"""Topics of caches: the KV cache and its pages."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tformer_jax.base.numbers import GIB
from tformer_jax.config import ModelConfig
from tformer_jax.inference.engine.page_table import Allocation, PageTable
from tformer_jax.lab.explain.figures import Curve, Heat, Lines
from tformer_jax.lab.explain.mathml import formula
from tformer_jax.lab.explain.topic import CFG, Example, Shape, Topic, make_topic, random_params
from tformer_jax.models import cost
from tformer_jax.nn.attention import Attention
from tformer_jax.nn.decoder_cache import empty_cache
from tformer_jax.nn.kv_cache import KeyValues
from tformer_jax.nn.masks import Mask
from tformer_jax.nn.row_slots import PagedSlots
from tformer_jax.nn.slots import EMPTY, DenseSlots, RingSlots, Tokens

WINDOW, PAGE = 4, 4
LENGTHS = (256, 1024, 4096, 16384, 65536)
CONTINUATION = "C"


def kv_cache(example: Example) -> Topic:
    """Explains the KV cache, and its ring for windows."""
    T = len(example.source)
    stored, difference = _step_by_step(example)
    assert isinstance(stored.k, jax.Array)
    return make_topic(
        "kv-cache",
        formulas=(
            formula("out_t = attention ( q_t , [ k_1 … k_t ] , [ v_1 … v_t ] )"),
            formula("bytes of the cache = 2 · B · S · K · H · L · bytes of one number"),
        ),
        shapes=(
            Shape("x", "B T D", example.x[:, :1].shape, "one token"),
            Shape("k, v", "B K S H", stored.k.shape, "cached keys and values, also of empty slots"),
        ),
        functions=(KeyValues, DenseSlots, RingSlots),
        figures=(
            _slots("Dense slots, step by step", lambda: DenseSlots.empty(1, T), example),
            _slots(f"A ring for a window of {WINDOW}", lambda: RingSlots.empty(1, min(WINDOW, T), 1), example),
            Lines(
                "Size of the cache of a model with 32 layers, 32 heads of 128 features, bfloat16",
                [
                    Curve(name, LENGTHS, _gibibytes(kv_heads))
                    for name, kv_heads in (("MHA, K = 32", 32), ("GQA, K = 8", 8), ("MQA, K = 1", 1))
                ],
                "tokens",
                "GiB",
                f"Largest difference between {T} cached steps of the sentence and one full pass: {difference:.0e}.",
                log="xy",
            ),
        ),
    )


def _step_by_step(example: Example) -> tuple[KeyValues, float]:
    """Attends token by token; returns the cache, and the largest difference of the outputs from a full pass."""
    module, T = Attention(dataclasses.replace(CFG, attention_backend="reference")), len(example.source)
    params = {"params": random_params(module, example.x)}

    @jax.jit
    def start(x: jax.Array) -> tuple[jax.Array, KeyValues, Any]:
        zeros = jnp.zeros((1, CFG.kv_heads, T, CFG.head_size))
        full, _ = module.apply(params, x, mask=Mask(causal=True))
        return full, KeyValues(zeros, zeros), DenseSlots.empty(1, T)

    @jax.jit
    def step(x: jax.Array, t: jax.Array, cache: KeyValues, slots: Any) -> tuple[jax.Array, KeyValues, Any]:
        slots, keys = slots.allocate(Tokens.of_call(t))
        mask = Mask(causal=True, positions=(t, keys.positions))
        return *module.apply(params, x, mask=mask, cache=cache, slots=slots), slots

    full, cache, slots = start(example.x)
    outputs = []
    for t in range(T):
        out, cache, slots = step(example.x[:, t : t + 1], np.array([[t]]), cache, slots)
        outputs.append(out)
    return cache, float(np.abs(np.concatenate(outputs, axis=1) - full).max())


def _slots(title: str, empty: Callable[[], Any], example: Example) -> Heat:
    """Shows which token each slot of the layout `empty()` holds after each step."""

    def step(slots: Any, t: Any) -> tuple[Any, jax.Array]:
        slots, _ = slots.allocate(Tokens.of_call(t[None, None]))
        slots = slots.end_call()
        return slots, slots.tokens.positions[0]

    steps = np.arange(len(example.source), dtype=np.int32)
    positions = np.asarray(jax.jit(lambda: jax.lax.scan(step, empty(), steps)[1])())
    texts = [[example.source[at] if at != EMPTY else "" for at in row] for row in positions]
    rows = [f"{t} {word}" for t, word in enumerate(example.source)]
    values = np.where(positions == EMPTY, np.nan, positions + 1)
    return Heat(
        title, values, rows, [f"slot {s}" for s in range(positions.shape[1])], "Stronger colors: newer tokens.", texts
    )


def _gibibytes(kv_heads: int) -> list[float]:
    cfg = ModelConfig(
        family="decoder_lm",
        dim=4096,
        num_heads=32,
        num_kv_heads=kv_heads,
        decoder_layers=32,
        dtype="bfloat16",
        max_length=LENGTHS[-1],
    )
    caches = [jax.eval_shape(lambda length=length: empty_cache(cfg, 1, length).layers) for length in LENGTHS]
    return [cost.size_bytes(cache) / GIB for cache in caches]


def paged_cache(example: Example) -> Topic:
    """Explains pages, shared prefixes and copies on write."""
    cache = _three_rows(example)
    return make_topic(
        "paged-cache",
        formulas=(formula("slot of token t of row b = Z · table_{b, ⌊ t / Z ⌋} + t mod Z"),),
        shapes=(
            Shape(
                "pool",
                "M K Z H",
                (cache.table.pages, CFG.kv_heads, PAGE, CFG.head_size),
                "keys, and values, of all rows, by page",
            ),
            Shape("table", "B P", cache.pages.shape, "pages of each row"),
        ),
        functions=(PageTable, PagedSlots),
        figures=(
            _pool_map(cache),
            Heat(
                "Table of pages",
                cache.pages,
                list(cache.rows),
                [f"tokens {PAGE * n} – {PAGE * n + PAGE - 1}" for n in range(cache.pages.shape[1])],
                "Page numbers; 0 is a reserved page.",
                [[f"{page:.0f}" for page in row] for row in cache.pages],
            ),
        ),
        values={"page": PAGE},
    )


@dataclasses.dataclass(frozen=True)
class PagedRows:
    """A paged cache with the rows A, a sentence, B, which begins like A, and C, which continues A."""

    rows: dict[str, list[str]]
    """Words by row."""
    alike: int
    """Number of words with which B begins like A."""
    table: PageTable
    allocations: dict[str, Allocation]
    copies: Sequence[tuple[int, int]]
    """Pages that were copied, from and to."""
    pool: list[list[str]]
    """The words that each page of the pool holds; "" for an empty slot."""

    @property
    def pages(self) -> np.ndarray:
        """The page table: float [rows, pages], 0 after the last page of a row."""
        return _padded([allocation.pages for allocation in self.allocations.values()])


def _three_rows(example: Example) -> PagedRows:
    source, T = list(example.source), len(example.source)
    alike = max(T // 2, 1)
    rows = {"A": source, "B": [*source[:alike], *reversed(source[alike:])], CONTINUATION: [*source, *source[:2]]}
    names = sorted({word for words in rows.values() for word in words})
    ids = {key: [names.index(word) for word in words] for key, words in rows.items()}
    table = PageTable(3 * (T // PAGE + 2), PAGE)
    first, second = _allocation(table, ids["A"]), _allocation(table, ids["B"])
    third, copies = table.fork(first)
    table.grow(third, len(rows[CONTINUATION]))
    allocations = dict(zip(rows, (first, second, third), strict=True))
    pool = _pool(table, allocations, ids, copies)
    words = [[names[number] if number != EMPTY else "" for number in page] for page in pool]
    return PagedRows(rows, alike, table, allocations, copies, words)


def _pool_map(cache: PagedRows) -> Heat:
    """Shows the words of the pages in use; stronger colors: pages of more rows."""
    owners: dict[int, list[str]] = {}
    for key, allocation in cache.allocations.items():
        for page in allocation.pages:
            owners.setdefault(page, []).append(key)
    table, used = cache.table, sorted(owners)
    texts = [cache.pool[page] for page in used]
    several = sum(len(keys) > 1 for keys in owners.values())
    dense = sum(table.pages_for(len(words)) for words in cache.rows.values())
    return Heat(
        "The pool after three rows",
        np.array([[len(owners[page]) if text else np.nan for text in cache.pool[page]] for page in used]),
        [f"page {page}: {', '.join(owners[page])}" for page in used],
        [str(slot) for slot in range(PAGE)],
        f"A is the sentence; B begins with its first {cache.alike} words; C continues A. {table.used_pages} pages are "
        f"in use, {several} by several rows; without sharing there would be {dense}. "
        f"Copied pages: {len(cache.copies)}.",
        texts,
    )


def _allocation(table: PageTable, ids: Sequence[int]) -> Allocation:
    """Allocates the pages of a prompt, shared ones first."""
    allocation = table.match(ids)
    table.grow(allocation, len(ids))
    allocation.filled = len(ids)
    table.share_prefix(allocation, ids)
    return allocation


def _pool(
    table: PageTable, allocations: dict[str, Allocation], ids: dict[str, list[int]], copies: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Writes the token ids of all rows through `PagedSlots`: int [pages, size], EMPTY where nothing was written."""
    widest = max(len(allocation.pages) for allocation in allocations.values())

    @jax.jit
    def write() -> jax.Array:
        pool = jnp.full((table.pages, 1, table.size, 1), EMPTY)
        for key, allocation in allocations.items():
            for source, target in copies if key == CONTINUATION else ():
                pool = pool.at[target].set(pool[source])
            empty = PagedSlots.without_pages(1, widest, table.size)
            slots = dataclasses.replace(empty, table=jnp.asarray(_padded([allocation.pages], widest), jnp.int32))
            slots, _ = slots.allocate(Tokens.of_call(jnp.arange(len(ids[key]))[None]))
            pool, _ = slots.extend(pool, jnp.asarray(ids[key])[None, None, :, None])
        return pool[:, 0, :, 0]

    return np.asarray(write())


def _padded(rows: Sequence[Sequence[int]], width: int = 0) -> np.ndarray:
    widest = max(width, *map(len, rows))
    return np.array([[*row, *[0] * (widest - len(row))] for row in rows], np.float64)
