import random

import pytest
from tokenizers import Tokenizer as TokenizerBackend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from loray.deployments.detokenizer import BROKEN, Detokenizer
from loray.deployments.tokenizer import Tokenizer
from tests.tiny_tokenizer import byte_ids, tiny_tokenizer

TEXTS = ["hello world", "grüße", "日本語", "🙂🙂 ok", "👩‍👩‍👧 naïve", "\n\t  spaces  "]
EOS_ID = 2


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """The other large family: spaces as ▁, unknown characters as bytes, the first space stripped."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for word in ["▁", "▁hello", "▁world", "hello", "e", "日", "▁日"]:
        vocab[word] = len(vocab)
    backend = TokenizerBackend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def pieces_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_one_byte_tokens_give_whole_characters_only(byte_level: Tokenizer, text: str) -> None:
    ids = byte_ids()
    pieces = pieces_of(byte_level, [ids[byte] for byte in text.encode()])
    assert [piece for piece in pieces if piece] == list(text)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_fallback_gives_whole_characters_only(byte_fallback: Tokenizer, text: str) -> None:
    pieces = pieces_of(byte_fallback, [byte + 1 for byte in text.encode()])
    assert "".join(pieces) == text.removeprefix(" ")
    assert not any(BROKEN in piece for piece in pieces)


def test_random_ids_give_what_decoding_the_whole_gives_less_a_cut_end(byte_level: Tokenizer) -> None:
    characters = [token_id for text in TEXTS for token_id in tiny_tokenizer().encode(text)]
    for seed in range(500):
        rng = random.Random(seed)
        any_id = range(byte_level.vocab_size + 5)  # models have rows beyond the vocabulary
        token_ids = [rng.choice(characters if rng.random() < 0.6 else any_id) for _ in range(rng.randrange(1, 60))]
        assert "".join(pieces_of(byte_level, token_ids)) == byte_level.decode(token_ids).rstrip(BROKEN)


def test_a_piece_once_given_is_never_taken_back(byte_level: Tokenizer) -> None:
    rng = random.Random(0)
    token_ids = [rng.randrange(byte_level.vocab_size) for _ in range(200)]
    detokenizer = Detokenizer(byte_level)
    text = ""
    for num, token_id in enumerate(token_ids, start=1):
        text += detokenizer.push(token_id)
        assert byte_level.decode(token_ids[:num]).startswith(text)


def test_words_of_a_sentencepiece_vocabulary_keep_their_spaces(byte_fallback: Tokenizer) -> None:
    token_ids = [258, 259, 258, 263, 257, 260, 262]
    assert "".join(pieces_of(byte_fallback, token_ids)) == byte_fallback.decode(token_ids) == "hello world hello 日 hello日"


def test_special_tokens_give_no_text_even_within_a_character(byte_level: Tokenizer) -> None:
    ids = byte_ids()
    first, *rest = "日".encode()
    assert pieces_of(byte_level, [ids[first], EOS_ID, *(ids[byte] for byte in rest), EOS_ID]) == ["", "", "", "日", "", ""]


def test_bytes_after_a_prompt_that_ends_within_a_character_are_not_lost(byte_level: Tokenizer) -> None:
    smile, ids = "🙂".encode(), byte_ids()
    detokenizer = Detokenizer(byte_level, [ids[smile[0]]])
    assert [detokenizer.push(ids[byte]) for byte in (smile[1], *b" ok")] == ["", BROKEN + " ", "o", "k"]


def test_a_character_cut_at_the_end_is_dropped(byte_level: Tokenizer) -> None:
    ids = byte_ids()
    assert "".join(pieces_of(byte_level, [ids[byte] for byte in "ok 日".encode()[:-1]])) == "ok "


def test_bytes_that_never_become_a_character_are_given_out_after_a_while(byte_level: Tokenizer) -> None:
    ids = byte_ids()
    broken = [ids[0x80]] * 100
    pieces = pieces_of(byte_level, [*broken, *(ids[byte] for byte in b"ok")])
    assert "".join(pieces).endswith("ok") and set("".join(pieces)) == {BROKEN, "o", "k"}
    assert sum(bool(piece) for piece in pieces[:100]) >= 3


@pytest.mark.parametrize("text", ["ok \ufffd", "\ufffd", "日\ufffd\ufffd"])
def test_a_replacement_character_that_was_written_is_not_taken_for_a_cut_one(
    byte_level: Tokenizer, byte_fallback: Tokenizer, text: str
) -> None:
    ids = byte_ids()
    assert "".join(pieces_of(byte_level, [ids[byte] for byte in text.encode()])) == text
    assert "".join(pieces_of(byte_level, [ids[byte] for byte in (text + "日").encode()[:-1]])) == text
    assert "".join(pieces_of(byte_fallback, [byte + 1 for byte in text.encode()])) == text


def test_added_and_special_tokens_are_whole() -> None:
    hf = tiny_tokenizer()
    hf.add_tokens(["日本", "\ufffd"])
    hf.add_special_tokens({"additional_special_tokens": ["<é>"]})
    tokenizer = Tokenizer(hf)
    token_ids = hf.convert_tokens_to_ids(["\ufffd", "日本", "<é>"])
    assert [tokenizer.bytes.partial(token_id) for token_id in token_ids] == [b"", b"", b""]
    assert pieces_of(tokenizer, token_ids) == ["\ufffd", "日本", "", ""]


def test_only_tokens_that_are_no_whole_characters_have_bytes_of_their_own(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    ids = byte_ids()
    for byte in range(256):
        expected = b"" if byte < 0x80 else bytes([byte])
        assert byte_level.bytes.partial(ids[byte]) == byte_fallback.bytes.partial(byte + 1) == expected
    assert byte_level.bytes.partial(EOS_ID) == byte_level.bytes.partial(10**6) == byte_fallback.bytes.partial(261) == b""


def bytes_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[bytes]:
    """The tokens' own."""
    detokenizer = Detokenizer(tokenizer)
    found = []
    for token_id in token_ids:
        own = detokenizer.own_bytes(token_id)
        text = detokenizer.push(token_id)
        found.append(own or text.encode())
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_texts_tokens_are_the_texts(byte_level: Tokenizer, byte_fallback: Tokenizer, text: str) -> None:
    for token_ids in (tiny_tokenizer().encode(text), [byte_ids()[byte] for byte in text.encode()]):
        assert b"".join(bytes_of(byte_level, token_ids)) == text.encode()
    assert b"".join(bytes_of(byte_fallback, [258, *(byte + 1 for byte in text.encode()), 259])) == f"hello{text} world".encode()


def test_the_bytes_of_any_tokens_are_what_was_decoded(byte_level: Tokenizer) -> None:
    for seed in range(200):
        rng = random.Random(seed)
        token_ids = [rng.randrange(3, byte_level.vocab_size) for _ in range(rng.randrange(1, 60))]
        found = b"".join(bytes_of(byte_level, token_ids)).decode(errors="replace")
        assert found.rstrip(BROKEN) == byte_level.decode(token_ids).rstrip(BROKEN)


def test_a_token_after_bytes_that_became_no_character_has_its_own_bytes(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    ids = byte_ids()
    comma, hello = ids[ord(",")], tiny_tokenizer().encode("hell")[0]
    assert bytes_of(byte_level, [ids[0xF0], comma, ids[0xE6], ids[0x97], hello]) == [b"\xf0", b",", b"\xe6", b"\x97", b"hell"]
    assert bytes_of(byte_level, [ids[0xF0], EOS_ID, comma]) == [b"\xf0", b"", b","]
    spaced = [0xE6 + 1, 258, 0xE6 + 1, 257, 0xE6 + 1, ord("A") + 1, 260]
    assert bytes_of(byte_fallback, spaced) == [b"\xe6", b" hello", b"\xe6", b" ", b"\xe6", b"A", b"hello"]


def test_tokens_at_other_places_have_the_bytes_of_their_text(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    words = [258, 259, 263, 262, 10**6, 258]  # the fifth is none
    assert [Detokenizer(byte_fallback).own_bytes(token_id) for token_id in words] == [b""] * 6
    assert bytes_of(byte_fallback, words) == [b"hello", b" world", " 日".encode(), "日".encode(), b"", b" hello"]
    assert bytes_of(byte_fallback, [10**6, 258]) == [b"", b"hello"], "what is no token is no beginning of a character"
    assert not Detokenizer(byte_level).own_bytes(EOS_ID)


def test_a_token_that_would_not_make_a_character_whole_has_no_text(byte_level: Tokenizer) -> None:
    ids = byte_ids()
    detokenizer = Detokenizer(byte_level)
    assert [detokenizer.push(ids[byte]) for byte in "日".encode()[:2]] == ["", ""]
    assert [detokenizer.peek(ids[byte]) for byte in (0xA5, 0xE6, 0x80)] == ["日", "", "\u65c0"]
    detokenizer.push(ids[0xC3])  # those before it are lost
    assert detokenizer.peek(ids[0xA9]) == ""
