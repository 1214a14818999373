"""`zerofit prepare`: byte for byte what megatron-core's builder makes of the plain tokenizer's ids, or nothing."""

import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers import ROOT, refusal, write_records
from transformers import AutoTokenizer, GPT2Config, LlamaConfig

from zerofit.cli import main
from zerofit.data.megatron import import_megatron, open_corpus, read_card, tokenizer_fingerprint
from zerofit.model.tokenizer import END_OF_TEXT, load_named_tokenizer
from zerofit.tools.prepare import documents
from zerofit.tools.prepare.corpora import load_prepare_tokenizer, make_encoder
from zerofit.tools.prepare.prepare import PrepareOptions

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.usefixtures("tools")
FOLDERS = {"gpt2": "tokenizers/gpt2", "llama": "tokenizers/llama", "small": "models/llama/hf"}


@pytest.fixture(scope="module")
def tokenizers(data) -> dict:
    """Those that training loads from the folders with the configurations of the models."""
    found = {}
    for name, folder in FOLDERS.items():
        config = GPT2Config() if name == "gpt2" else LlamaConfig()
        found[name] = load_named_tokenizer("tokenizer_name", str(data(folder)), config)
    return found


@pytest.fixture(scope="module")
def texts(data) -> list[str]:
    """Over a thousand, among them an empty one, one of white space, and some that are not English."""
    japanese = json.loads(data("instruct/japanese.json").read_text())[:40]
    other = [record["instruction"] + record["input"] + record["output"] for record in japanese]
    english = "\n".join(data(f"text/{name}.txt").read_text() for name in ("valid", "train")).split("\n")
    return [" \n", *list(filter(None, english))[:1000], "", *other]


def write_lines(path: Path, texts: list[str]) -> Path:
    return write_records(path, [{"id": 0, "text": text} for text in texts])


@pytest.fixture(scope="module")
def lines(texts, tmp_path_factory) -> Path:
    return write_lines(tmp_path_factory.mktemp("lines") / "texts.jsonl", texts)


def reference(prefix: Path, texts: list[str], tokenizer, end: bool = True) -> None:
    """What Megatron-LM's tools/preprocess_data.py does, one document at a time."""
    indexed = import_megatron().indexed
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=indexed.DType.optimal_dtype(len(tokenizer)))
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        lengths = [len(ids)] if ids else []
        if ids and end:
            ids.append(tokenizer.eos_token_id)
            lengths[-1] += 1
        builder.add_document(ids, lengths)
    builder.finalize(f"{prefix}.idx")


def prepare(*words: object) -> int:
    return main(["prepare", *map(str, words)])


def prepared(folder: Path, source: object, tokenizer: object, *more: object) -> Path:
    """The prefix of a corpus that was made in `folder`."""
    sources = source if isinstance(source, (list, tuple)) else [source]
    assert prepare("--input", *sources, "--output_prefix", folder / "made", "--tokenizer", tokenizer, *more) == 0
    return folder / "made_text_document"


def content(prefix: object) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def refused(capsys, *words: object) -> str:
    assert prepare(*words) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "Traceback" not in said
    return said


def texts_in(prefix: object, tokenizer) -> list[str]:
    corpus = open_corpus("input", str(prefix))
    return [tokenizer.decode(ids) for ids in np.split(np.array(corpus.ids()), np.cumsum(corpus.lengths)[:-1])]


@pytest.fixture(scope="module")
def made(lines, texts, tokenizers, data, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """{tokenizer: (our corpus, the reference)}."""
    found = {}
    for name in ("gpt2", "llama"):
        folder = tmp_path_factory.mktemp(name)
        ours = prepared(folder, lines, data(FOLDERS[name]), "--append_eod", "--workers", 2)
        reference(folder / "reference", texts, tokenizers[name])
        found[name] = ours, folder / "reference"
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_bytes_are_megatrons(made, tokenizers, texts, name):
    ours, expected = made[name]
    assert content(ours) == content(expected)
    corpus = open_corpus("input", str(ours))
    empty = texts.index("")
    assert corpus.documents == len(texts) > 1000
    assert corpus.dtype is np.uint16
    assert len(corpus.lengths) == len(texts) - (name == "gpt2")  # Llama's empty document has its first token
    assert np.diff(corpus.ends)[empty] == (name == "llama")
    card = corpus.card
    assert (card.documents, card.tokens, card.eod) == (len(texts), corpus.tokens, tokenizers[name].eos_token_id)
    assert card.largest_id == corpus.ids().max()
    assert card.fingerprint == tokenizer_fingerprint(tokenizers[name])


def test_a_slow_tokenizer_and_a_large_vocabulary():
    """A pickled tokenizer without a native one, and ids of four bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

    options = PrepareOptions(input=["x"], output_prefix="y", tokenizer="z", append_eod=True)
    slow = ByT5Tokenizer()
    encoder = pickle.loads(pickle.dumps(make_encoder(slow, options)))
    assert encoder.end == slow.eos_token_id
    (row,) = encoder.ids(["naïve"])
    assert np.frombuffer(row, np.uint16).tolist() == slow("naïve")["input_ids"]
    native = Tokenizer(models.WordLevel({f"w{number}": number for number in range(70_000)}, unk_token="w0"))
    native.pre_tokenizer = pre_tokenizers.Whitespace()
    large = PreTrainedTokenizerFast(tokenizer_object=native, eos_token="w1", unk_token="w0")
    encoder = pickle.loads(pickle.dumps(make_encoder(large, options)))
    assert isinstance(encoder.tokenizer, Tokenizer)
    (row,) = encoder.ids(["w3 w69999  x"])
    assert np.frombuffer(row, np.int32).tolist() == [3, 69_999, 0]


def test_names_of_tokenizers(data, tokenizers, tmp_path):
    same = {
        "gpt2": [data("tokenizers/gpt2")],
        "llama": [data("tokenizers/llama"), data("tokenizers/llama") / "tokenizer.model"],
        "small": [data("models/llama/hf"), data("models/llama/meta")],
    }
    for name, places in same.items():
        tokenizers[name].save_pretrained(tmp_path / name)
        for place in [*places, tmp_path / name]:
            found = load_prepare_tokenizer(str(place))
            assert tokenizer_fingerprint(found) == tokenizer_fingerprint(tokenizers[name]), place
            assert found.eos_token_id == tokenizers[name].eos_token_id
            assert found("One <s>two</s>")["input_ids"] == tokenizers[name]("One <s>two</s>")["input_ids"]
    assert len({tokenizer_fingerprint(one) for one in tokenizers.values()}) == len(tokenizers)


SAYINGS = ["First one.", "Second\n\none, two lines.", " third ", "Fourth: naïve café", "Fifth"]


def test_all_kinds_of_input_give_one_corpus(byte_tokenizer, tmp_path):
    import pyarrow
    from pyarrow import parquet

    whole = write_lines(tmp_path / "whole.jsonl", SAYINGS)
    tree = tmp_path / "tree"
    for number, text in enumerate(SAYINGS):
        (tree / f"A{chr(65 + number)}").mkdir(parents=True)
        write_lines(tree / f"A{chr(65 + number)}" / "wiki_00", [text])
    (tree / "AA" / ".hidden").write_text("x")
    (tree / "AA" / "_SUCCESS").write_text("")
    (tmp_path / "[a]").symlink_to(tree)
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(b"\n" + whole.read_bytes().replace(b"\n", b"\r\n") + b"\n\n"))
    table = pyarrow.table({"id": [1, 2, 3, 4, 5], "text": SAYINGS})
    parquet.write_table(table, tmp_path / "table.parquet", row_group_size=2)
    expected = content(prepared(tmp_path, whole, byte_tokenizer, "--workers", 1))
    twice = [tree / "AA", tree / "AB" / "wiki_00", tree, f"{tree}/AC/*"]
    for source in (tree, tmp_path / "[a]", f"{tree}/**/wiki_*", packed, tmp_path / "table.parquet", twice):
        made = prepared(tmp_path, source, byte_tokenizer, "--workers", 1, "--overwrite")
        assert content(made) == expected, source


@pytest.mark.parametrize("part", [7, documents.CHUNK_SIZE])
def test_plain_text(byte_tokenizer, tmp_path, part, monkeypatch):
    """Texts are cut the same whatever the size of the parts in which a file is read."""
    monkeypatch.setattr(documents, "CHUNK_SIZE", part)
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer)
    (tmp_path / "marked.txt").write_text(f"\nOne\n\n{END_OF_TEXT}\n{END_OF_TEXT}\nTwo, \r\n too\n")
    (tmp_path / "whole.md").write_bytes(b"\xef\xbb\xbfWhole\n\nfile\n\n\n\nof it\n")

    def found(*more) -> list[str]:
        source = [tmp_path / "marked.txt", tmp_path / "whole.md"]
        return texts_in(prepared(tmp_path, source, byte_tokenizer, "--workers", 1, "--overwrite", *more), tokenizer)

    whole = "Whole\n\nfile\n\n\n\nof it\n"
    assert found() == ["One", "Two, \n too", whole]
    assert found("--document_separator", "file")[1] == whole
    assert found("--document_separator", "line")[-3:] == ["Whole", "file", "of it"]
    assert found("--document_separator", "paragraph")[-3:] == ["Whole", "file", "of it"]
    assert found("--document_separator", "file\n\n")[-2:] == ["Whole", "of it"]


BAD = {
    b"nonsense": "not JSON",
    b'["text"]': "not a JSON object but a list",
    b'{"txt": "a"}': "no key 'text'; it has txt",
    b'{"text": 3}': "'text' is a int, not a text",
    b'{"text": null}': "'text' is null, not a text",
    b'{"text": "caf\xe9"}': "not UTF-8: byte 0xe9",
    b'{"text": "\\ud800"}': "half of a surrogate pair",
}


@pytest.mark.parametrize("bad", list(BAD))
def test_a_bad_line_ends_the_job(byte_tokenizer, tmp_path, capsys, bad):
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "good"}\n\n' + bad + b'\n{"text": "good"}\n')
    words = ("--input", source, "--output_prefix", tmp_path / "x", "--tokenizer", byte_tokenizer, "--workers", 1)
    said = refused(capsys, *words)
    assert f"{source}, line 3: " in said
    assert BAD[bad] in said
    assert "--skip_bad_lines" in said
    assert list(tmp_path.iterdir()) == [source]


def test_bad_lines_are_left_out_and_counted(byte_tokenizer, tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "one"}\n' + b"\n".join(BAD) + b'\n{"text": "two"}')
    (tmp_path / "b.txt").write_bytes(b"three\nfo\xffur\nfive\n")
    more = ("--skip_bad_lines", "--workers", 1, "--document_separator", "line")
    made = prepared(tmp_path, [source, tmp_path / "b.txt"], byte_tokenizer, *more)
    assert texts_in(made, AutoTokenizer.from_pretrained(byte_tokenizer)) == ["one", "two", "three", "five"]
    said = capsys.readouterr().out
    assert f"{len(BAD) + 1} bad lines" in said
    assert "a.jsonl, line 2: not JSON" in said


@pytest.mark.parametrize(("name", "encoding"), [
    ("list.json", None), ("a.csv", None), ("a.csv", "utf-16"), ("lines.jsonl", "cp932"), ("lines.txt", "euc_jp"),
    *(pytest.param(*each, marks=pytest.mark.long) for each in (
        ("list.json.gz", None), ("a.tsv", None), ("list.json", "cp932"), ("lines.jsonl", "utf-16"),
    )),
])  # fmt: skip
def test_lists_tables_and_other_encodings_make_the_same_corpus(byte_tokenizer, tmp_path, name, encoding):
    written = ["吾輩は猫である。", "a, b", "", '名前は "まだ" 無い。', "x" * 70_000, "last"]
    written = [text for text in written if text or not name.endswith(".txt")]
    lines = "".join(json.dumps({"n": 1, "text": text}, ensure_ascii=False) + "\n" for text in written)
    plain = prepared(tmp_path / "plain", write_lines(tmp_path / "plain.jsonl", written), byte_tokenizer)
    content_of = {
        "list": json.dumps([{"text": text, "n": 1} for text in written], ensure_ascii=False, indent=1),
        "lines": "".join(text + "\n" for text in written) if name.endswith("txt") else lines,
        "a": "n,text\r\n" + "".join(f'1,"{text.replace(chr(34), chr(34) * 2)}"\r\n' for text in written),
    }
    if name == "a.tsv":
        content_of["a"] = "text\tn\n" + "".join(f"{text}\t1\n" for text in written)
    data = content_of[name.split(".")[0]].encode(encoding or "utf-8")
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    more = ["--encoding", encoding] if encoding else []
    more += ["--document_separator", "line"] if name.endswith(".txt") else []
    made = prepared(tmp_path / "made", tmp_path / name, byte_tokenizer, *more)
    assert content(made) == content(plain)


def test_input_that_is_refused(byte_tokenizer, tmp_path, capsys):
    (tmp_path / "a.csv").write_text("a,b\n")
    (tmp_path / "a.xls").write_text("a,b\n")
    (tmp_path / "list.json").write_text('[{"text": "a"}')
    (tmp_path / "kana.txt").write_text("吾輩は猫である。", encoding="cp932")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(os.urandom(5000))[:-100])
    (tmp_path / "no.parquet").write_bytes(b"PAR1")
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "empty.jsonl").write_text("")
    before = sorted(tmp_path.iterdir())
    for name in [*(path.name for path in before), "gone.txt", "*.xyz"]:
        words = ("--output_prefix", tmp_path / "x", "--tokenizer", byte_tokenizer, "--workers", 1)
        assert name in refused(capsys, "--input", tmp_path / name, *words)
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_there_is_kept(byte_tokenizer, tmp_path, capsys):
    source = write_lines(tmp_path / "a.jsonl", ["one"])
    made = prepared(tmp_path, source, byte_tokenizer, "--workers", 1)
    before = content(made)
    write_lines(source, ["two"])
    words = ("--input", source, "--output_prefix", tmp_path / "made", "--tokenizer", byte_tokenizer, "--workers", 1)
    assert "already exists. Name another prefix, or add --overwrite" in refused(capsys, *words)
    source.write_text("bad")
    assert prepare(*words, "--overwrite") == 2
    assert content(made) == before
    write_lines(source, ["two"])
    assert content(prepared(tmp_path, source, byte_tokenizer, "--workers", 1, "--overwrite")) != before
    assert len(list(tmp_path.iterdir())) == 4


def workers_of(job: subprocess.Popen) -> list:
    children = psutil.Process(job.pid).children()
    return [child for child in children if any("spawn_main" in word for word in child.cmdline())]


def started(source: Path, byte_tokenizer: Path, output: Path) -> subprocess.Popen:
    """A job of two workers that has begun to write, and has much left to do."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    job = subprocess.Popen(
        [sys.executable, "-m", "zerofit.cli", "prepare", "--input", str(source), "--output_prefix", str(output),
         "--tokenizer", str(byte_tokenizer), "--workers", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    partial = Path(f"{output}_text_document.bin.partial")
    deadline = time.monotonic() + 120
    while not (partial.exists() and partial.stat().st_size and len(workers_of(job)) == 2):
        assert job.poll() is None, job.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return job


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Input that keeps a job busy for longer than it takes to be ended."""
    folder = tmp_path_factory.mktemp("large")
    line = json.dumps({"text": " ".join(f"{number:x}" for number in range(20_000))}) + "\n"
    (folder / "a.jsonl").write_text(line * 10)
    for number in range(400):
        os.link(folder / "a.jsonl", folder / f"{number}.jsonl")
    return folder


def ended(job: subprocess.Popen, workers: list, code: int, seconds: float = 60) -> str:
    said = job.communicate(timeout=seconds)[1]
    assert job.returncode == code, said
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive, "a worker has outlived its job"
    return said


@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_an_interrupted_job_leaves_nothing(byte_tokenizer, tmp_path, large, sent):
    job = started(large, byte_tokenizer, tmp_path / "x")
    workers = workers_of(job)
    job.send_signal(sent)
    ended(job, workers, 128 + sent)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_killed_job_leaves_no_corpus_and_is_replaced(byte_tokenizer, tmp_path, large, capsys):
    job = started(large, byte_tokenizer, tmp_path / "made")
    workers = workers_of(job)
    words = ("--output_prefix", tmp_path / "made", "--tokenizer", byte_tokenizer, "--workers", 1)
    assert "another job is writing" in refused(capsys, "--input", byte_tokenizer / "tokenizer_config.json", *words)
    job.kill()
    ended(job, workers, -signal.SIGKILL)
    assert [path.suffix for path in tmp_path.iterdir()] == [".partial"]
    assert "there is no" in refusal(open_corpus, "input", str(tmp_path / "made_text_document"))
    assert "another job" not in refused(capsys, "--input", "gone.jsonl", *words)
    source = write_lines(tmp_path / "a.jsonl", ["one"])
    prepared(tmp_path, source, byte_tokenizer, "--workers", 1)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.long
def test_a_worker_that_dies_ends_the_job(byte_tokenizer, tmp_path, large):
    job = started(large, byte_tokenizer, tmp_path / "x")
    workers = workers_of(job)
    workers[1].kill()
    said = ended(job, workers, 2)
    assert "a worker was killed" in said
    assert "--workers" in said
    assert not list(tmp_path.iterdir())


def test_joined_is_one_pass(byte_tokenizer, tmp_path, texts):
    parts_of_texts = {"a": texts[-200:-90], "b": texts[-90:]}
    halves = [write_lines(tmp_path / f"{name}.jsonl", part) for name, part in parts_of_texts.items()]
    whole = prepared(tmp_path, halves, byte_tokenizer, "--append_eod")
    parts = []
    for half in halves:
        (tmp_path / half.stem).mkdir()
        parts.append(prepared(tmp_path / half.stem, half, byte_tokenizer, "--append_eod"))
    assert prepare("merge", "--input", *parts, "--output_prefix", tmp_path / "joined") == 0
    assert content(tmp_path / "joined") == content(whole)
    ours, expected = read_card(str(tmp_path / "joined")), read_card(str(whole))
    assert ours.sources == [str(part) for part in parts]
    assert {**vars(ours), "sources": 0} == {**vars(expected), "sources": 0}


def test_what_is_not_joined(data, tokenizers, byte_tokenizer, tmp_path, made, capsys):
    source = write_lines(tmp_path / "a.jsonl", ["one"])
    with_end = prepared(tmp_path, source, byte_tokenizer, "--append_eod")
    (tmp_path / "other").mkdir()
    without_end = prepared(tmp_path / "other", source, byte_tokenizer)
    output = ("--output_prefix", tmp_path / "joined")
    assert "0 and none" in refused(capsys, "merge", "--input", with_end, without_end, *output)
    assert main(["prepare", "merge", *map(str, ("--input", with_end, made["gpt2"][0], *output))]) == 2
    said = capsys.readouterr().err
    assert f"0 and {tokenizers['gpt2'].eos_token_id}" in said
    assert "different tokenizers" in said
    refused(capsys, "merge", "--input", with_end, "--output_prefix", with_end, "--overwrite")
    assert "and no card" in refused(capsys, "merge", "--input", without_end, data("megatron/first_document"), *output)


def test_several_keys_become_several_corpora(byte_tokenizer, tmp_path):
    file = write_records(tmp_path / "a.jsonl", [{"text": "one", "title": "1"}, {"text": "two", "title": "2"}])
    made = prepared(tmp_path, file, byte_tokenizer, "--json_keys", "text", "title", "--append_eod")
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer)
    assert texts_in(made, tokenizer) == [f"one{END_OF_TEXT}", f"two{END_OF_TEXT}"]
    assert texts_in(tmp_path / "made_title_document", tokenizer) == [f"1{END_OF_TEXT}", f"2{END_OF_TEXT}"]
