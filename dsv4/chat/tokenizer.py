"""Text to token ids and back; text never becomes a control token."""

import codecs
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Backend

from dsv4.chat import texts
from dsv4.chat.dialect import Dialect
from dsv4.errors import CheckpointError, RequestError

_UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


@dataclass(frozen=True)
class SpecialIds:
    """This tokenizer's ids by role. None: the tokenizer has no such marker.

    No conversation can be encoded without the roles that are always set, so a tokenizer that lacks
    one of them is refused.
    """

    bos: int
    eos: int
    user: int
    assistant: int
    think_open: int
    think_close: int
    dsml: int | None
    latest_reminder: int | None
    system: int | None
    image: int | None
    pad: int | None
    tasks: Mapping[str, int]
    grounding: Mapping[str, int]


class Tokenizer:
    """A byte-level `tokenizer.json`. Ids always come from the file."""

    def __init__(self, backend: _Backend, plain: _Backend, added: dict[str, int]) -> None:
        self._backend = backend
        self._plain = plain
        self._added = added
        self._added_ids = frozenset(added.values())
        self._bytes: dict[int, bytes] = {}
        self._char_bytes = _byte_level_alphabet()
        self.special = _resolve_special(added)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self._most_bytes = max(len(token.encode()) for token in vocabulary)  # of one token

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        return cls.from_file(Path(folder) / "tokenizer.json")

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path}: cannot be read as UTF-8 text ({error}); expected the tokenizer.json"
                " that comes with the model"
            ) from error
        return cls.from_str(text, str(path))

    @classmethod
    def from_str(cls, text: str, name: str = "tokenizer.json") -> "Tokenizer":
        content = _read_json(text, name)
        # A file may request truncation or padding; a prompt must never be cut or padded.
        content["truncation"] = content["padding"] = None
        backend = _build(content, name)
        plain = _build({**content, "added_tokens": []}, name)
        added = {token["content"]: token["id"] for token in content["added_tokens"]}
        tokenizer = cls(backend, plain, added)
        tokenizer._check_plain_is_plain(name)
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. The spelling of a marker gives ordinary tokens, never the marker."""
        return _encode(self._plain, text)

    def encode_with_specials(self, text: str) -> list[int]:
        """Ids of a text written by the operator, in which markers are recognised by spelling."""
        return _encode(self._backend, text)

    def least_tokens(self, num_characters: int) -> int:
        """A lower bound on the tokens of any text of this length."""
        return -(-num_characters // self._most_bytes)

    def marker_id(self, marker: str) -> int:
        """The id of a marker that a prompt needs."""
        token_id = self._added.get(marker)
        if token_id is None:
            raise RequestError(
                f"the prompt needs the marker {marker}, which this model's tokenizer does not"
                " have; leave out the tools, reminder, task, image or V4.1 dialect that calls for"
                " it"
            )
        return token_id

    def has_marker(self, marker: str) -> bool:
        return marker in self._added

    def is_marker(self, token_id: int) -> bool:
        return token_id in self._added_ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, markers by their spelling; broken UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """A token's bytes, possibly a part of a character. U+FFFD for unknown ids."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._make_bytes(token_id)
        return found

    def detokenizer(self) -> "Detokenizer":
        return Detokenizer(self)

    def stop_ids(self, dialect: Dialect) -> frozenset[int]:
        """The tokens that end an assistant turn: its end marker, and every turn marker."""
        special = self.special
        ids = {special.eos, special.bos, special.user, special.assistant}
        if special.latest_reminder is not None:
            ids.add(special.latest_reminder)
        if dialect.is_v41:
            if special.system is None:
                raise CheckpointError(
                    f"the tokenizer lacks {texts.SYSTEM}, which the dialect {dialect.name} needs;"
                    " choose a v4 dialect or use the model's own tokenizer.json"
                )
            ids.add(special.system)
        return frozenset(ids)

    def _make_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            return _UNKNOWN
        if token_id in self._added_ids:
            return str(token).encode()
        try:
            return bytes(self._char_bytes[char] for char in token)
        except KeyError:
            return str(token).encode()

    def _check_plain_is_plain(self, name: str) -> None:
        for encoding, spelling in zip(
            self._plain.encode_batch(list(self._added), add_special_tokens=False),
            self._added,
            strict=True,
        ):
            if not self._added_ids.isdisjoint(encoding.ids):
                raise CheckpointError(
                    f"{name}: the base vocabulary turns the text {spelling!r} into a special"
                    " token; expected merges that cannot produce it, or a user could inject a"
                    " turn. Use the model's own tokenizer.json"
                )


def _encode(backend: _Backend, text: str) -> list[int]:
    if len(text) < 4096:
        return list(backend.encode(text, add_special_tokens=False).ids)
    # a batch is encoded without the GIL, which `encode` would hold for seconds
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)


class Detokenizer:
    """Ids to text, one at a time; a character is emitted when its last byte has arrived."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """U+FFFD if the last character is incomplete."""
        tail = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return tail


def _read_json(text: str, name: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{name}: not JSON ({error}); expected the tokenizer.json that comes with the model"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise CheckpointError(f"{name}: found no 'model' object, expected a tokenizer.json")
    added = content.get("added_tokens")
    if not isinstance(added, list) or not all(
        isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and isinstance(token.get("id"), int)
        for token in added
    ):
        raise CheckpointError(
            f"{name}: 'added_tokens' is not a list of objects with 'content' and 'id'; use the"
            " model's own tokenizer.json"
        )
    if "ByteLevel" not in _decoder_types(content.get("decoder")):
        raise CheckpointError(
            f"{name}: found the decoder {_decoder_types(content.get('decoder'))}, expected"
            " ByteLevel; V4 tokenizers are byte-level"
        )
    return content


def _decoder_types(decoder: object) -> list[str]:
    if not isinstance(decoder, dict):
        return []
    parts = decoder.get("decoders")
    members = parts if isinstance(parts, list) else [decoder]
    return [str(member.get("type")) for member in members if isinstance(member, dict)]


def _build(content: dict[str, Any], name: str) -> _Backend:
    try:
        return _Backend.from_str(json.dumps(content, ensure_ascii=False))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(
            f"{name}: the tokenizers library refuses it ({error}); use the model's own file"
        ) from error


def _resolve_special(added: Mapping[str, int]) -> SpecialIds:
    def required(marker: str) -> int:
        if marker not in added:
            raise CheckpointError(
                f"the tokenizer lacks the marker {marker}, without which no conversation can be"
                " written; expected it among 'added_tokens' of tokenizer.json"
            )
        return added[marker]

    return SpecialIds(
        bos=required(texts.BOS),
        eos=required(texts.EOS),
        user=required(texts.USER),
        assistant=required(texts.ASSISTANT),
        think_open=required(texts.THINK_OPEN),
        think_close=required(texts.THINK_CLOSE),
        dsml=added.get(texts.DSML),
        latest_reminder=added.get(texts.LATEST_REMINDER),
        system=added.get(texts.SYSTEM),
        image=added.get(texts.IMAGE_V41),
        pad=added.get(texts.PAD),
        tasks={name: added[marker] for name, marker in texts.TASKS.items() if marker in added},
        grounding={marker: added[marker] for marker in texts.GROUNDING if marker in added},
    )


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies use for the 256 bytes.

    Printable Latin-1 bytes map to themselves; the others follow in order from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet
