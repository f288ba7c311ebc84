"""A small byte-level BPE tokenizer for tests: every byte, special tokens, a chat template. Trained in milliseconds."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

EOS = "<|im_end|>"
SPECIALS = ["<|endoftext|>", "<|im_start|>", EOS]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' and loop.first %}"
    "{{ raise_exception('the first message must not be from the assistant') }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ["hello world, this is a test of the tiny tokenizer", "user assistant system", "grüße 日本語 🙂🙂"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, bos_token=SPECIALS[0], additional_special_tokens=[SPECIALS[1]]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny_tokenizer(folder: Path) -> Path:
    tiny_tokenizer().save_pretrained(folder)
    return folder


def byte_ids() -> list[int]:
    """The id of each byte's own token."""
    vocab = tiny_tokenizer().get_vocab()
    return [vocab[symbol] for _, symbol in sorted(bytes_to_unicode().items())]
