"""The vocabulary as grammars see it: what each token adds to the text. Compilers and matchers must be given the same; knows neither."""

from pathlib import Path
from typing import TYPE_CHECKING

from loray.models.model_folder import eos_token_ids, model_limits, read_config

if TYPE_CHECKING:
    import xgrammar


def grammar_vocabulary(folder: Path, trust_remote_code: bool = False) -> "xgrammar.TokenizerInfo":
    """Of the model in this folder. Its EOS tokens end a text. Special tokens are no text, so that no grammar lets them pass for it.

    Raises ValueError for a model without an EOS token: nothing could end a text that has become whole.
    """
    import xgrammar
    from transformers import AutoTokenizer

    eos_ids = sorted(eos_token_ids(folder))
    if not eos_ids:
        raise ValueError("the model has no end-of-sequence token, so nothing could end a text that follows a grammar")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    vocab_size = model_limits(read_config(folder)).vocab_size  # of the logits
    found = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=eos_ids)
    texts = list(found.decoded_vocab)  # bytes
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special and token_id < len(texts):
            texts[token_id] = b""
    return xgrammar.TokenizerInfo(
        texts, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=eos_ids, add_prefix_space=found.add_prefix_space
    )
