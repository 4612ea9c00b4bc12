"""Text of tokens, made inert and visible: it comes from a model, and may hold anything."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from layerbisect.captures.errors import LayerBisectError

_OTHER_FILES = ("*.model", "vocab.*", "*.tiktoken", "tekken.json")
"""Files, beside tokenizer.json, that hold a vocabulary."""

_MOST = 64
"""Characters that are shown of one token."""

_SPACE = "\N{OPEN BOX}"
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))

# characters that Unicode calls letters, marks or symbols, and that draw nothing or stand for
# something that could not be read
_BLANK = frozenset(
    (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180C, 0x180D, 0x180F, 0x2800, 0x3164)
    + (0xFFA0, 0xFFFC, 0xFFFD, ord(_SPACE))
    + tuple(range(0xFE00, 0xFE10))
    + tuple(range(0xE0100, 0xE01F0))
)


class TokenText:
    """What the tokens of one tokenizer say; open it with :meth:`open`.

    All text that it returns is visible and draws nothing but itself: control, formatting and
    unassigned characters are escapes such as ``\\n`` and ``\\u202e``, bytes that are no UTF-8 are
    ``<0xE2>``, and a space at either end is an open box. Markup stays as it is: a page escapes it.
    """

    def __init__(
        self,
        token: Callable[[int], str | None],
        *,
        added: Mapping[int, str],
        byte_level: bool,
    ) -> None:
        """Take a vocabulary.

        Args:
            token: from an ID to the token as the vocabulary writes it; None where there is none.
            added: tokens that are written as they are, such as ``<|im_end|>``.
            byte_level: whether the vocabulary writes each byte as a character of its own, as GPT-2
                does; else it is read as SentencePiece's is.
        """
        self._token = token
        self._added = added
        self._byte_level = byte_level

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> TokenText:
        """Open the tokenizer of a checkpoint directory; no code of it is run.

        Raises LayerBisectError: no tokenizer there, a damaged one, or neither `tokenizers` nor
        transformers installed.
        """
        folder = Path(directory)
        if not folder.is_dir():
            raise LayerBisectError(
                f"{folder} is no directory; give a checkpoint's, which holds its tokenizer"
            )
        one_file = folder / "tokenizer.json"
        return _of_file(one_file) if one_file.is_file() else _of_transformers(folder)

    def text(self, token_id: int) -> str | None:
        """The token's own text; None for an ID that the tokenizer does not have."""
        raw = self._bytes(token_id)
        return None if raw is None else _shortened(raw)

    def around(
        self, tokens: Sequence[int], at: int, before: int = 8, after: int = 4
    ) -> tuple[str, str, str]:
        """Text of up to ``before`` tokens, of the token at place ``at``, and of ``after`` tokens.

        Characters that several tokens share are put together within each of the three. An ID that
        the tokenizer does not have is written ``<token 7>``.
        """
        if not 0 <= at < len(tokens):
            raise ValueError(f"at is {at}; there are {len(tokens)} tokens")
        return (
            self._run(tokens[max(at - before, 0) : at]),
            self.text(tokens[at]) or f"<token {tokens[at]}>",
            self._run(tokens[at + 1 : at + 1 + after]),
        )

    def _run(self, tokens: Sequence[int]) -> str:
        parts = [self._bytes(one) for one in tokens]
        known = [
            f"<token {one}>".encode() if raw is None else raw
            for one, raw in zip(tokens, parts, strict=True)
        ]
        return inert(b"".join(known))

    def _bytes(self, token_id: int) -> bytes | None:
        if token_id in self._added:
            return self._added[token_id].encode("utf-8", "surrogatepass")
        # a tokenizer counts in 32 bits, and raises beyond them
        written = self._token(token_id) if 0 <= token_id < 1 << 32 else None
        if written is None:
            return None
        if self._byte_level and all(character in _byte_of() for character in written):
            return bytes(_byte_of()[character] for character in written)
        if not self._byte_level:
            if len(written) == 6 and written.startswith("<0x") and written.endswith(">"):
                try:
                    return bytes.fromhex(written[3:5])
                except ValueError:
                    pass
            written = written.replace(_WORD_START, " ")
        return written.encode("utf-8", "surrogatepass")


def inert(raw: bytes | str) -> str:
    """Write text so that every character is seen and none does anything.

    Args:
        raw: text, or bytes that may be no UTF-8.
    """
    data = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
    # surrogateescape keeps each byte that cannot be read as U+DC80 and on
    text = data.decode("utf-8", "surrogateescape")
    shown = [_shown(character) for character in text]
    for place, character in enumerate(text):
        # a single space between others is seen as it is
        inside = 0 < place < len(text) - 1 and text[place - 1] != " " != text[place + 1]
        if character == " " and not inside:
            shown[place] = _SPACE
    if text and unicodedata.category(text[0]).startswith("M"):
        # it would join what stands before it on the page
        shown[0] = _escape(text[0])
    return "".join(shown)


def _shown(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"<0x{code - 0xDC00:02X}>"
    if character in _SHORT:
        return _SHORT[character]
    category = unicodedata.category(character)
    if category in _UNSEEN or code in _BLANK or category == "Zs" and character != " ":
        return _escape(character)
    return character


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def _shortened(raw: bytes) -> str:
    text = raw.decode("utf-8", "surrogateescape")
    if len(text) <= _MOST:
        return inert(raw)
    kept = text[:_MOST].encode("utf-8", "surrogateescape")
    return f"{inert(kept)}... ({len(text):,} characters)"


@cache
def _byte_of() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 for itself, others from U+0100 on."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }


def _of_file(path: Path) -> TokenText:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise LayerBisectError(
            "tokenizers is not installed: run pip install tokenizers to show the text of tokens"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # the library raises Exception itself
    except Exception as error:
        raise LayerBisectError(f"{path} holds no tokenizer: {error}") from None
    return _of_tokenizer(tokenizer)


def _of_tokenizer(tokenizer: Any) -> TokenText:
    return TokenText(
        tokenizer.id_to_token,
        added={one: token.content for one, token in tokenizer.get_added_tokens_decoder().items()},
        byte_level=_is_byte_level(json.loads(tokenizer.to_str()).get("decoder")),
    )


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    return decoder["type"] == "ByteLevel" or any(
        _is_byte_level(one) for one in decoder.get("decoders", ())
    )


def _of_transformers(folder: Path) -> TokenText:
    nothing = f"{folder} holds no tokenizer; give a checkpoint directory with a tokenizer.json"
    # without any, transformers may make a tokenizer that knows no token
    if not any(any(folder.glob(pattern)) for pattern in _OTHER_FILES):
        raise LayerBisectError(nothing)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise LayerBisectError(
            f"{nothing}, or run pip install 'layerbisect[transformers]' to read other kinds"
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    # each kind of tokenizer fails in its own way
    except Exception:
        raise LayerBisectError(nothing) from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return _of_tokenizer(backend)

    def token(token_id: int) -> str | None:
        if token_id >= len(tokenizer):
            return None
        written = tokenizer.convert_ids_to_tokens(token_id)
        return written if isinstance(written, str) else None

    added = {one: str(content) for one, content in tokenizer.added_tokens_decoder.items()}
    return TokenText(token, added=added, byte_level=False)
