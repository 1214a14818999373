"""What tests and benchmarks read: texts, records, tokenizers and a small trained Llama, made on this machine.

`make_material(caches)` makes all of it from the source of Python's standard library, which every machine has, in about
half a minute, and keeps it: the next session finds it. The same Python, libraries and maker make the same. Below the
folder that it returns:

    text/{train,valid}.txt              documents separated by a line with <|endoftext|>: signatures and docstrings
    glue/MRPC/{train,dev}.tsv           pairs, in the columns, the quoting and with the byte order mark of the release
    glue/SST-2/{train,dev}.tsv          sentences and 0 or 1, learnable from their words
    dialogue/keyed.json                 Topical-Chat's form: {id: {"content": [{"message", "agent"}, ...], ...}}
    dialogue/talks.json                 BlendedSkillTalk's form: [{"dialogue": [turns], "response": the next turn}]
    instruct/{english,japanese}.json    instruction, input, output; half of the inputs are empty
    tokenizers/gpt2                     vocab.json, merges.txt: byte-level, <|endoftext|> is the last token
    tokenizers/blenderbot               vocab.json, merges.txt: byte-level, <pad> <s> </s> <unk> are 0 to 3
    tokenizers/llama                    tokenizer.model: SentencePiece BPE with byte fallback, 2,000 tokens, some kana
    models/llama/{hf,meta}              one Llama of 260,032 parameters (GQA 8/4, tied, vocabulary 512) that
                                        was trained on text/train.txt, and its bare tokenizer.model
    megatron/{first,second}_document    .bin and .idx of 100 documents each, int32, no card
"""

import hashlib
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

HERE = Path(__file__).resolve().parent
LIBRARIES = ("torch", "transformers", "tokenizers", "sentencepiece", "safetensors")


def fingerprint() -> str:
    """Of all that decides what is made: this package, Python, and the libraries that write the files."""
    found = hashlib.sha256(platform.python_version().encode())
    for name in LIBRARIES:
        found.update(f"{name} {version(name)}".encode())
    for file in sorted(HERE.glob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def make_material(caches: Path) -> Path:
    """The folder of the material under `caches`, made if it is not there.

    It is made under another name and renamed, so it is whole or absent. Of sessions, and of workers of one, that ask
    at once, one makes it, and the others wait.
    """
    from .llama import write_llama
    from .records import write_records
    from .texts import write_texts
    from .vocabularies import write_corpora, write_tokenizers

    made = Path(caches) / f"material-{fingerprint()}"
    made.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{made}.lock"), tempfile.TemporaryDirectory(prefix=f"{made.name}.", dir=made.parent) as partial:
        if not made.is_dir():
            folder = Path(partial) / "material"
            folder.mkdir()
            for write in (write_texts, write_records, write_tokenizers, write_corpora, write_llama):
                write(folder)
            folder.rename(made)
    return made
