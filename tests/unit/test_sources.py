"""Reading text from every format, cutting it into documents, splitting off the held-out part."""

import bz2
import gzip
import json
import lzma
import shutil

import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict
from helpers import check_refusal, load_texts, read_data, refusal, write_records

from zerofit.data import tables
from zerofit.data.causal import prepare_causal_data
from zerofit.data.delimited_files import likely_encodings, propose_encodings
from zerofit.data.options import DataOptions
from zerofit.data.streaming import find_shards, read_window
from zerofit.data.text import split_documents, take_texts
from zerofit.model.chat import read_template
from zerofit.model.configuration import load_configuration
from zerofit.recipe import ClmRecipe, UserError, parse_recipe
from zerofit.recipe.files import read_yaml
from zerofit.recipe.parse import read_recipe
from zerofit.recipe.paths import find_files
from zerofit.tools.generate.generate import GenerateOptions
from zerofit.tools.generate.respond import read_prompts

ROWS = [f"This is text number {number}, and it says little." for number in range(40)]


def write(tmp_path, name: str):
    path = tmp_path / name
    if ".jsonl" in name or ".ndjson" in name:
        content = write_records(path, [{"text": row, "n": 1} for row in ROWS]).read_text()
    elif name.endswith(".json"):
        content = json.dumps([{"text": row} for row in ROWS])
    elif ".csv" in name:
        content = "id,text\n" + "".join(f'{number},"{row}"\n' for number, row in enumerate(ROWS))
    else:
        content = "\n".join(ROWS) + "\n"
    if name.endswith(".parquet"):
        Dataset.from_dict({"text": ROWS}).to_parquet(path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(content.encode()))
    else:
        path.write_text(content)
    return path


def records(cache, *files, **options):
    recipe = ClmRecipe(train_file=[str(file) for file in files], cache_dir=cache, **options)
    return load_texts(recipe)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz", "a.csv.gz", "a.ndjson"])
def test_formats(tmp_path, cache, name):
    found = records(cache, write(tmp_path, name), validation_split_percentage=10)
    assert sorted([*found.train["text"], *found.validation["text"]]) == sorted(ROWS)
    assert len(found.validation) == 4


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.md", "a.html", "a.cpp"])
def test_text_is_one_document_unless_told_otherwise(tmp_path, cache, name):
    path = write(tmp_path, name)
    whole = records(cache, path, validation_split_percentage=0)
    assert (len(whole.train), whole.validation) == (1, None)
    lines = records(cache, path, validation_split_percentage=0, document_separator="line")
    assert lines.train["text"][:] == ROWS
    assert len(records(cache, path, validation_split_percentage=0, packing="none").train) == len(ROWS)


def test_marks_and_other_separators(tmp_path, cache):
    (tmp_path / "marked.txt").write_text("one\ntwo\n<|endoftext|>\nthree\n<|endoftext|>\n")
    found = records(cache, tmp_path / "marked.txt", validation_split_percentage=0)
    assert found.train["text"][:] == ["one\ntwo", "three"]
    (tmp_path / "first.txt").write_text("none\n")
    both = records(cache, tmp_path / "first.txt", tmp_path / "marked.txt", validation_split_percentage=0)
    assert both.train["text"][:] == ["none", "one\ntwo", "three"]
    held_out = records(cache, tmp_path / "first.txt", validation_file=[str(tmp_path / "marked.txt")])
    assert held_out.validation["text"][:] == ["one\ntwo", "three"]
    (tmp_path / "own.txt").write_text("one@@two@@three")
    found = records(cache, tmp_path / "own.txt", validation_split_percentage=0, document_separator="@@")
    assert (found.train["text"][:], found.notes) == (["one", "two", "three"], [])
    found = records(cache, tmp_path / "own.txt", validation_split_percentage=0, document_separator="\\n")
    assert [f"'\\\\n' is not in {tmp_path}/own.txt" in note for note in found.notes] == [True]


@pytest.mark.parametrize("kind", ["a.jsonl", "a.csv", "a.txt", "saved"])
def test_tokens_are_cached_until_a_file_an_option_or_the_tokenizer_changes(tmp_path, kind):
    """Each case is looked up twice, as by another process, which knows no table of this one."""
    marks = {"document_separator": "line"} if kind == "a.txt" else {}

    def store(rows: list[str]) -> dict:
        if kind == "saved":
            shutil.rmtree(tmp_path / "saved", ignore_errors=True)
            table = Dataset.from_dict({"text": rows, "n": [1] * len(rows)})
            DatasetDict({"train": table}).save_to_disk(tmp_path / kind)
            return {"dataset_name": str(tmp_path / kind)}
        path = tmp_path / kind
        lines = {
            "a.jsonl": [json.dumps({"text": row, "n": 1}) for row in rows],
            "a.csv": ["text,n", *(f'"{row}",1' for row in rows)],
        }
        path.write_text("\n".join(lines.get(kind, rows)) + "\n")
        return {"train_file": [str(path)]}

    def stored(**options) -> set[str]:
        tables._TABLE_KEYS.clear()
        common = {
            "config_name": "gpt2",
            "train_tokenizer_vocab_size": 280,
            "block_size": 32,
            "cache_dir": tmp_path / "c",
            "validation_split_percentage": 25,
        }
        recipe = ClmRecipe(**{**common, **marks, **options})
        prepare_causal_data(recipe, load_configuration(recipe))
        return {path.name for path in (tmp_path / "c").rglob("tokens-*.arrow")}

    known, on_disk = set[str](), None
    edited = [row.replace("little", "nothing") if number == 7 else row for number, row in enumerate(ROWS)]
    for rows, options, new in (
        (ROWS, {}, 2),
        (ROWS, {"block_size": 16}, 0),
        (ROWS, {"append_eos": False}, 2),
        (ROWS, {"validation_split_percentage": 50}, 2),
        (ROWS, {"train_tokenizer_vocab_size": 270}, 2),
        (ROWS, {"max_train_samples": 9}, 1),
        (edited, {}, 2),
        (ROWS[:30], {}, 2),
    ):
        if rows is not on_disk:
            source, on_disk = store(rows), rows
        before = known
        known = stored(**source, **options)
        assert known >= before
        assert len(known - before) == new, (len(rows), options)
        assert stored(**source, **options) == known


def test_files_that_cannot_be_read(tmp_path, cache):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("line\ncaf\xe9 au lait".encode("latin-1"))
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "table.xls").write_text("x")
    assert "there is no such file" in refusal(find_files, "train_file", [str(tmp_path / "absent.txt")])
    assert "no file matches" in refusal(find_files, "train_file", [str(tmp_path / "*.nothing")])
    assert "is a folder" in refusal(find_files, "train_file", [str(tmp_path)])
    assert "empty" in refusal(find_files, "train_file", [str(tmp_path / "empty.txt")])
    (tmp_path / "large.txt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9000\n")
    assert "git lfs pull" in refusal(find_files, "train_file", [str(tmp_path / "large.txt")])
    check_refusal(["0xe9 at offset 8 (line 2)", "--encoding cp1252 or "], records, cache, tmp_path / "latin.txt")
    assert "broken.jsonl, line 2: not valid JSON" in refusal(records, cache, tmp_path / "broken.jsonl")
    assert "unknown file extension" in refusal(records, cache, tmp_path / "table.xls")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.tsv", "a.jsonl.gz"])
@pytest.mark.parametrize("encoding", ["cp932", "euc_jp", "utf-16-le"])
def test_other_encodings_are_named_and_read(tmp_path, cache, name, encoding):
    """What the message proposes reads the file right."""
    texts = ["吾輩は猫である。名前はまだ無い。", "どこで生れたかとんと見当がつかぬ。", "plain"]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    content = {
        "txt": "\n".join(texts) + "\n",
        "jsonl": lines,
        "csv": "text\n" + "\n".join(texts) + "\n",
        "json": json.dumps([{"text": text} for text in texts], ensure_ascii=False),
    }
    data = content[name.split(".")[1].replace("tsv", "csv")].encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    options = {"validation_split_percentage": 0, "document_separator": "line"}
    recipe = ClmRecipe(train_file=[str(tmp_path / name)], cache_dir=cache, **options)
    message = refusal(load_texts, recipe)
    assert encoding in message.rpartition("--encoding ")[2].strip().split(" or ")
    found = records(cache, tmp_path / name, encoding=encoding, **options)
    assert found.train["text"][:] == texts


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.txt.gz", "a.jsonl.gz"])
def test_utf_16_without_a_mark_is_no_utf_8(tmp_path, cache, name, encoding):
    data = '{"text": "plain"}\n'.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert f"--encoding {encoding}" in refusal(records, cache, tmp_path / name)


PROSE = {
    "吾輩は猫である。名前はまだ無い。": ("cp932", "euc_jp", "utf-16", "utf-32"),
    "どこで生れたかとんと見当がつかぬ。何でも薄暗いじめじめした所でニャーニャー泣いていた。": ("cp932", "euc_jp"),
    "今天天气很好。我们去公园散步。看见了很多花和树。": ("gb18030",),
    "今天天氣很好。我們去公園散步。看見了很多花和樹。": ("cp950",),
    "오늘은 날씨가 매우 좋아서 우리는 공원에 산책하러 갔습니다.": ("cp949",),
    "Die Straße führt über die Brücke, schöne Grüße aus München": ("cp1252",),
    "Déjà vu: un café naïf, déjà bu": ("cp1252",),
    "Москва является столицей России и крупнейшим городом страны.": ("cp1251", "koi8_r"),
}


@pytest.mark.parametrize("text", list(PROSE))
@pytest.mark.parametrize("times", [1, 300])
def test_likely_encodings(text, times):
    for encoding in PROSE[text]:
        data = (f"label,text\n1,{text}\n" * times).encode(encoding)
        assert encoding in likely_encodings(data)
    assert likely_encodings(bytes(range(128, 256)) * 9) == []
    assert "--encoding" in propose_encodings(bytes(range(128, 256)) * 9)


def test_an_encoding_that_would_corrupt_is_refused(tmp_path, cache):
    (tmp_path / "a.txt").write_text("吾輩は猫である。名前はまだ無い。" * 3)
    check_refusal(["a.txt is UTF-8", "--encoding utf-8"], records, cache, tmp_path / "a.txt", encoding="latin-1")
    assert "is not in it" in refusal(records, cache, tmp_path / "a.txt", encoding="ascii")
    assert "sjiss" in read_recipe(ClmRecipe, ["--train_file", "a.txt", "--encoding", "sjiss"])[1][0]


def test_records_under_a_key(tmp_path, cache):
    rows = [{"text": row} for row in ROWS]
    (tmp_path / "a.json").write_text(json.dumps({"version": "1", "all": {"data": rows}}))
    found = records(cache, tmp_path / "a.json", field="all.data", validation_split_percentage=0)
    assert found.train["text"][:] == ROWS
    assert "has no key 'data'; its keys are version, all" in refusal(records, cache, tmp_path / "a.json", field="data")
    assert "has no list of records there" in refusal(records, cache, tmp_path / "a.json", field="version")
    assert "field = 'data'" in refusal(records, cache, write(tmp_path, "a.csv"), field="data")


def test_of_a_long_text_the_end_is_held_out_at_a_line():
    train, held = split_documents(Dataset.from_dict({"text": ["\n".join(ROWS)]}), 0.1)
    assert train["text"][0] + held["text"][0] == "\n".join(ROWS)
    assert train["text"][0].endswith("\n")
    assert 0.08 < len(held["text"][0]) / len("\n".join(ROWS)) < 0.13


@pytest.mark.parametrize(("number", "said"), [(1, "note"), (9, "WARNING"), (21, "--allow_data_loss")])
def test_texts_under_another_name_are_told(tmp_path, cache, number, said):
    rows = [{"text": row} for row in ROWS[:20]] + [{"content": row} for row in ROWS[:number]]
    recipe = ClmRecipe(train_file=[str(write_records(tmp_path / "a.jsonl", rows))], cache_dir=cache)
    source = read_data(recipe)
    try:
        take_texts(source, recipe, DataOptions.of(recipe))
        columns, told = source.notes
        assert columns == "data      each text is in the column text (not read: content)"
    except UserError as error:
        told = str(error)
    assert said in told
    assert f"{number} of {20 + number} records of {tmp_path / 'a.jsonl'} have no text (text)" in told


def test_empty_texts_are_told(tmp_path, llama, prepare_causal):
    (tmp_path / "a.csv").write_text("id,text\n" + "1,a\n2,\n" * 3)
    data = prepare_causal(llama, tmp_path / "a.csv", validation_split_percentage=0)
    assert "note      3 of 6 training texts are empty, and are left out" in data.notes


@pytest.mark.parametrize("texts", [[b"a", b"b"], [["a"], ["b"]], [1, 2]])
def test_a_column_text_that_holds_none_is_not_passed_over(tmp_path, cache, texts):
    Dataset.from_dict({"text": texts, "title": ["one text", "two"]}).to_parquet(tmp_path / "a.parquet")
    assert "'text' holds no text" in refusal(records, cache, tmp_path / "a.parquet")


def test_records_without_text_are_left_out(tmp_path, cache):
    path = tmp_path / "nulls.jsonl"
    path.write_text('{"text": "a"}\n{"text": null}\n{"text": "b"}\n{"n": 1}\n')
    assert records(cache, path, validation_split_percentage=0).train["text"][:] == ["a", "b"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.tsv"])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, cache, name, encoding):
    texts = [f"ä {row}" for row in ROWS[:3]]
    content = {
        "a.jsonl": "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts),
        "a.json": json.dumps([{"text": text} for text in texts]),
        "a.tsv": "text\tid\n" + "".join(f"{text}\t1\n" for text in texts),
    }.get(name, "\n".join(texts))
    for number in range(2):
        (tmp_path / f"{number}{name}").write_bytes(("\ufeff" + content).encode(encoding))
    found = records(cache, tmp_path / f"*{name}", validation_split_percentage=0, document_separator=None)
    assert found.train["text"][:] == (2 * ["\n".join(texts)] if name == "a.txt" else 2 * texts)


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "A.NDJSON"])
def test_packed_files(tmp_path, cache, name, ending):
    plain = write(tmp_path, name.lower()).read_bytes()
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    packed = pack[ending](plain) if ending in pack else pa.compress(plain, "zstd", asbytes=True)
    path = tmp_path / f"{name}{ending}"
    path.write_bytes(packed)
    options = {"validation_split_percentage": 0, **({"document_separator": "line"} if ".txt" in name else {})}
    assert records(cache, path, **options).train["text"][:] == ROWS
    path.write_bytes(packed[: len(packed) // 2])
    assert f"{path} cannot be read" in refusal(records, cache, path, **options)


@pytest.mark.parametrize("name", ["a[1]", "[a]", "{a}", "a*", "a?", "a b", "a::b", "a#1", "a%20", "~a", "本"])
@pytest.mark.parametrize("ending", [".jsonl.gz", ".csv"])
def test_an_existing_file_is_a_file_before_it_is_a_glob(tmp_path, cache, name, ending):
    path = write(tmp_path, f"a{ending}").rename(tmp_path / f"{name}{ending}")
    assert records(cache, path, validation_split_percentage=0).train["text"][:] == ROWS


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv.gz", "a.parquet"])
def test_a_link_to_a_file_without_an_ending(tmp_path, cache, name):
    """As the hub's cache has them."""
    path = write(tmp_path, name)
    path.rename(tmp_path / "0a1b")
    path.symlink_to(tmp_path / "0a1b")
    found = records(cache, path, tmp_path / "." / name, validation_split_percentage=0)
    assert found.train["text"][:] == ROWS


@pytest.mark.parametrize("splits", [("train",), ("train", "validation")])
def test_a_folder_of_save_to_disk(tmp_path, cache, splits):
    tables = {split: Dataset.from_dict({"Text": [split, "another"], "Id": ["a b", "c"]}) for split in splits}
    saved = DatasetDict(tables) if len(splits) > 1 else tables["train"]
    saved.save_to_disk(tmp_path / "saved")
    recipe = ClmRecipe(dataset_name=str(tmp_path / "saved"), cache_dir=cache, validation_split_percentage=0)
    found = load_texts(recipe)
    assert found.train["text"][:] == ["train", "another"]
    assert found.validation is None if len(splits) == 1 else found.validation["text"][0].startswith("val")
    assert not any("splits" in note for note in found.notes)
    assert "--dataset_name" in refusal(records, cache, tmp_path / "saved")


def test_texts_of_csv_files_of_a_data_set_stay_as_they_are_written(tmp_path, cache):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("text,label\n0110,NA\n110,1.0\nnull,\n")
    found = read_data(ClmRecipe(dataset_name=str(tmp_path / "data"), cache_dir=cache)).parts["train"]
    assert found.to_dict() == {"text": ["0110", "110", "null"], "label": ["NA", "1.0", ""]}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_other_files_with_a_byte_order_mark(tmp_path, encoding):
    (tmp_path / "a.jinja").write_bytes("{{ messages }}".encode(encoding))
    assert read_template(str(tmp_path / "a.jinja")) == "{{ messages }}"
    (tmp_path / "a.yaml").write_bytes("train_file: [ä.txt]\nmodel_name_or_path: gpt2\n".encode(encoding))
    assert read_yaml(tmp_path / "a.yaml") == {"train_file": ["ä.txt"], "model_name_or_path": "gpt2"}
    assert parse_recipe(ClmRecipe, ["--config", str(tmp_path / "a.yaml")]).train_file == ["ä.txt"]
    (tmp_path / "a.jsonl").write_bytes('{"prompt": "ä"}\n{"prompt": "b"}'.encode(encoding))
    (tmp_path / "a.txt").write_bytes("ä\r\nb".encode(encoding))
    for name in ("a.jsonl", "a.txt"):
        prompts = read_prompts(GenerateOptions(model="m", prompt_file=str(tmp_path / name)))
        assert prompts == ["ä", "b"]


@pytest.mark.parametrize("name", ["a[1].jsonl", "{a}.ndjson", "a*.jsonl.gz"])
def test_shards_whose_names_look_like_globs(tmp_path, name):
    rows = b"\xef\xbb\xbf" + b'{"text": "a"}\n{"text": "b"}\n'
    (tmp_path / name).write_bytes(gzip.compress(rows) if name.endswith("gz") else rows)
    shards = find_shards((str(tmp_path / name),))
    assert read_window(shards, [0], (0, 0), 1 << 20)[0].to_pydict() == {"text": ["a", "b"]}
