"""The fields of a `config.json`, with defaults and other names, and which of them were read."""

from typing import Any

from tformer_jax.base.errors import UserError
from tformer_jax.interop.architecture import UNREADABLE, Settings, check
from tformer_jax.interop.published_fields import ALIASES, DEFAULTS, UNREAD, UNREAD_BY

STACKS = {"t5gemma": ("encoder", "decoder")}
"""Fields that hold the config of each stack, by `model_type`."""
_OF_STACKS = {"num_hidden_layers", "layer_types", "is_decoder", "cross_attention_hidden_size", "use_cache"}
"""Fields in which the stacks of an encoder-decoder may differ."""


class Fields(dict[str, Any]):
    """The fields of a config.json, with the defaults of its `model_type`; remembers which ones were read.

    Raises:
        UserError: a field and another name of it have different values.
    """

    def __init__(self, hf: dict[str, Any]):
        kind = hf["model_type"]
        super().__init__(DEFAULTS[kind] | _resolve_aliases(_join_stacks(hf), ALIASES.get(kind, {})))
        self._read: set[str] = set()
        self._unread = UNREAD.union(UNREAD_BY.get(kind, ()), ALIASES.get(kind, {}))

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        if name not in self:
            raise UserError(f"config.json has no {name!r}")
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field, or the default."""
        self._read.add(name)
        return super().get(name, default)

    def check_all_read(self) -> None:
        """Raises `UserError` for a field that has a value, was not read, and may change what the model computes."""
        for name in sorted(self.keys() - self._read - self._unread):
            value = super().__getitem__(name)
            if value not in (None, False, "", [], {}):
                raise UserError(f"{UNREADABLE}the field {name}={value!r} is not supported")


def _resolve_aliases(hf: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """Returns the fields of a config.json, adding the standard names of fields that it has under another name."""
    fields = dict(hf)
    for alias, name in aliases.items():
        value = hf.get(alias)
        if value is not None and fields.setdefault(name, value) != value:
            raise UserError(f"{UNREADABLE}{alias}={value!r} differs from {name}={fields[name]!r}: delete one of them")
    return fields


def _join_stacks(hf: Settings) -> Settings:
    """Joins the fields of two stacks: the decoder's fields, with the encoder's depth and layers as `encoder_NAME`.

    Raises:
        UserError: the stacks differ in other fields.
    """
    names = STACKS.get(hf["model_type"], ())
    if not all(isinstance(hf.get(name), dict) for name in names):
        raise UserError(f"{UNREADABLE}config.json needs the fields {' and '.join(names)}, one for each stack")
    if not names:
        return hf
    encoder, decoder = (hf[name] for name in names)
    shared = (encoder.keys() | decoder.keys()) - _OF_STACKS - UNREAD
    for name in sorted(shared):
        problem = f"{name}={encoder.get(name)!r} of the encoder differs from {decoder.get(name)!r} of the decoder"
        check(encoder.get(name) == decoder.get(name), problem)
    own = {f"encoder_{name}": encoder.get(name) for name in ("num_hidden_layers", "layer_types")}
    return decoder | {name: value for name, value in hf.items() if name not in names} | own
