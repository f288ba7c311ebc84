"""Turns token ids into text as they come, whole characters only. Knows nothing of requests.

tokenizers' DecodeStream is not used: it raises on byte-fallback vocabularies when the bytes are not valid UTF-8, and it has
no way to ask for what it still holds at the end.
"""

from collections.abc import Sequence

from loray.deployments.tokenizer import Tokenizer

PROMPT_TAIL = 8  # tokens; enough for a word's leading space
MAX_PENDING = 32  # tokens without a whole character; a character has four bytes, so these never become one
BROKEN = "\ufffd"  # how the decoder writes bytes that are no character, or not yet


class Detokenizer:
    """The pieces, joined, are the decoded whole, less bytes at the end that never became a character. Many such bytes on end are given
    out as they are."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # A token's text depends on the one before (leading spaces), so a window of two groups is decoded: what was already
        # given out, as context, and what is new. At first the context is the end of the prompt.
        self._context_ids = [token_id for token_id in prompt_ids[-PROMPT_TAIL:] if token_id not in tokenizer.special_texts]
        if tokenizer.decode(self._context_ids).endswith(BROKEN):
            self._context_ids = []
        self._new_ids: list[int] = []
        self._context_len = len(tokenizer.decode(self._context_ids))  # characters

    def push(self, token_id: int) -> str:
        """The text that became whole with this token; "" for a special token or within a character."""
        if token_id in self._tokenizer.special_texts:
            return ""
        piece = self._piece(token_id)
        self._new_ids.append(token_id)
        if not piece:
            return ""
        self._context_ids, self._new_ids = self._new_ids, []
        self._context_len = len(self._tokenizer.decode(self._context_ids))
        return piece

    def peek(self, token_id: int) -> str:
        """What `push` would give, without taking the token; nothing where a token within a character would not make it whole."""
        if token_id in self._tokenizer.special_texts:
            return ""
        piece = self._piece(token_id)
        return "" if BROKEN in piece and self._tokenizer.bytes.partial(token_id) else piece

    def own_bytes(self, token_id: int) -> bytes:
        """Of a token that might come next, where its text is not they: within a character, or after bytes that never became one."""
        partial = self._tokenizer.bytes.partial(token_id)
        if partial or not self._new_ids or not any(map(self._tokenizer.bytes.partial, self._new_ids)):
            return partial
        return self._tokenizer.own_text(token_id).encode()

    def _piece(self, token_id: int) -> str:
        text = self._tokenizer.decode([*self._context_ids, *self._new_ids, token_id])
        is_hopeless = len(self._new_ids) >= MAX_PENDING
        is_cut = text.endswith(BROKEN) and not is_hopeless and self._is_cut([*self._new_ids, token_id])
        return "" if is_cut else text[self._context_len :]

    def _is_cut(self, token_ids: list[int]) -> bool:
        """Of tokens whose text ends in BROKEN: whether that stands for bytes, not for itself."""
        partial = b"".join(map(self._tokenizer.bytes.partial, token_ids))
        return partial != b"" and not partial.endswith(BROKEN.encode())

    def flush(self) -> str:
        """What is left at the end of the sequence, less a cut character."""
        text = self._tokenizer.decode(self._context_ids + self._new_ids)
        self._new_ids = []
        return text[self._context_len :].rstrip(BROKEN)
