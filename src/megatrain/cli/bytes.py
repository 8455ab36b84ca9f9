"""A tokenizer whose tokens are bytes: any text, no vocabulary to learn or download."""

from __future__ import annotations

from typing import Any

SPECIAL = ("<pad>", "<bos>", "<eos>")
VOCAB_SIZE = 256 + len(SPECIAL)


def byte_tokenizer(max_length: int | None = None) -> Any:
    """A fast tokenizer where byte b has id b, and `<pad>`, `<bos>`, `<eos>` have 256, 257, 258.

    It is saved and loaded like any other, and gives every UTF-8 text back unchanged. No special token is added
    on its own.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: byte for byte, letter in enumerate(_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    pad, bos, eos = SPECIAL
    limit = {} if max_length is None else {"model_max_length": max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
        **limit,
    )


def _letters() -> list[str]:
    """The printable letter that `tokenizers` shows each byte as: itself, or the next one from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
