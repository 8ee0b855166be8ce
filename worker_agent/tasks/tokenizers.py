"""Byte-level and trained BPE tokenizers for texts of any kind.  [shell]"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BYTE_VOCABULARY = 256


def encode(text: str, tokenizer: Tokenizer | None) -> npt.NDArray[np.integer]:
    """Returns a text's token ids; its UTF-8 bytes where there is no tokenizer."""
    if tokenizer is None:
        return np.frombuffer(text.encode("utf-8"), np.uint8)
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def train_bpe(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Returns a byte-level BPE tokenizer of `vocabulary` symbols that gives every text back exactly.

    The same texts give the same tokenizer. Workers compare hashes of the tokens that they see, so a difference between
    two versions of the library is refused when the second one joins.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    # Paragraphs keep the trainer from holding one pre-token list for the whole text.
    tokenizer.train_from_iterator((line for text in texts for line in text.splitlines(keepends=True)), trainer)
    return tokenizer
