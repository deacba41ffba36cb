"""Numbers in messages."""

from tformer_jax.base.numbers import counted


def test_one_is_singular():
    """Regression test: messages had "1 examples" and "1 texts"."""
    assert [counted(number, "example") for number in (0, 1, 1200)] == ["0 examples", "1 example", "1,200 examples"]
    assert [counted(number, "text is", "texts are") for number in (1, 2)] == ["1 text is", "2 texts are"]
