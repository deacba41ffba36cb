"""Added tokens of SentencePiece models: names that are found in a text before the rest of it is split into pieces."""

from collections.abc import Mapping
from typing import Any

import tokenizers as hf

Fields = dict[str, Any]
"""A token as in `added_tokens_decoder` of tokenizer_config.json: its name is `content`."""
SENTINEL = "<extra_id_{}>"
"""Names of T5's sentinels, by number."""


class AddedTokens:
    """Splits texts at names of tokens, with the rules of transformers about spaces around them."""

    def __init__(self, tokens: Mapping[int, Fields]):
        self.tokens = dict(tokens)
        self._library = hf.Tokenizer(hf.models.WordLevel({"": 0}, unk_token=""))
        self._library.add_tokens([hf.AddedToken(**fields) for fields in self.tokens.values()])
        self._ids = {self._library.token_to_id(fields["content"]): i for i, fields in self.tokens.items()}

    def split(self, text: str) -> list[int | str]:
        """Returns the ids of the tokens in a text, and the texts between them."""
        encoding = self._library.encode(text)
        found = zip(encoding.ids, encoding.offsets, strict=True)
        return [self._ids.get(number, text[slice(*place)]) for number, place in found]


def read_added(model: Any, names: list[str], declared: Mapping[int, Fields], sentinels: int) -> dict[int, Fields]:
    """Returns the added tokens of a SentencePiece model by id, with its own special pieces.

    Args:
        names: names of all special tokens; those that neither the model nor `declared` has are appended.
        declared: tokens with their ids.
        sentinels: number of T5's sentinels, which follow the pieces; the first one is the last.
    """
    size = model.get_piece_size()
    own = (i for i in range(size) if model.is_control(i) or model.is_unknown(i))
    found = {i: special_token(model.id_to_piece(i)) for i in own}
    found |= {size + sentinels - 1 - i: special_token(SENTINEL.format(i)) for i in range(sentinels)}
    for i, fields in declared.items():
        found[i] = fields | {"special": fields.get("special", False) or fields["content"] in names}
    known = {fields["content"] for fields in found.values()}
    for name in names:
        if name not in known:
            place = model.piece_to_id(name)
            found[max(size, *(i + 1 for i in found)) if place == model.unk_id() else place] = special_token(name)
    return found


def special_token(name: str, *, special: bool = True) -> Fields:
    """Returns the fields of a token without rules about spaces around it."""
    return {"content": name, "normalized": not special, "special": special}
