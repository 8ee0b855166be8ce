"""Folders with tiny transformers models and tokenizers, in the format of real ones."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

WORDS = "the a cat dog runs sleeps red blue stone river sings loud soft old new".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def write_bert(folder: Path) -> Path:
    """Writes an encoder of two layers with dropout, and a word tokenizer."""
    torch.manual_seed(0)
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_llama(folder: Path) -> Path:
    """Writes a language model of two blocks, and a word tokenizer."""
    torch.manual_seed(0)
    vocabulary = {word: index for index, word in enumerate(["[UNK]", *WORDS])}
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_sentences(path: Path, count: int, first: int = 0) -> None:
    """Writes labelled sentences; the label is the animal."""
    lines = []
    for index in range(first, first + count):
        animal = ("cat", "dog", "stone")[index % 3]
        words = [WORDS[(index * 7 + place * 3) % len(WORDS)] for place in range(1 + index % 5)]
        words = [word for word in words if word not in ("cat", "dog", "stone")]
        lines.append(json.dumps({"text": " ".join([*words, animal]), "label": f"about-{animal}"}))
    path.write_text("\n".join(lines) + "\n")


def files_below(folder: Path) -> dict[str, Path]:
    """Returns a folder's files by relative name."""
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
