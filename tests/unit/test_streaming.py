"""Streaming: the same samples as in memory, a place that is one number, and connections that are lost."""

import http.server
import io
import json
import tarfile
import threading
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import recipe_of, refusal, write_records

from zerofit.checkpoint.manager import data_fingerprint
from zerofit.data import streaming
from zerofit.data.causal import prepare_causal_data
from zerofit.data.order import SampleOrder
from zerofit.data.streaming import find_shards, read_window
from zerofit.model.configuration import load_configuration

TEXTS = [f"record {number}: " + "words " * (number % 7 + 1) for number in range(300)]


def write_parquet(file: Path, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": texts}), file, row_group_size=32)


def write_lines(file: Path, texts: list[str]) -> None:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_tar(file: Path, texts: list[str]) -> None:
    with tarfile.open(file, "w") as tar:
        for number, text in enumerate(texts):
            info, data = tarfile.TarInfo(f"{number:05d}.txt"), text.encode()
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


WRITERS = {".parquet": write_parquet, ".jsonl": write_lines, ".tar": write_tar}


def write_shards(folder: Path, ending: str = ".jsonl", shards: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(shards):
        WRITERS[ending](folder / f"{number}{ending}", TEXTS[number::shards])
    return folder


@pytest.fixture
def prepared(tmp_path, byte_tokenizer):
    """(patterns, options) -> the data of a recipe; output_dir is the same for all of a test."""

    def prepare(*patterns, **options):
        recipe = recipe_of(
            train_file=[str(pattern) for pattern in patterns],
            tokenizer_name=str(byte_tokenizer),
            block_size=64,
            validation_split_percentage=0.0 if "streaming" not in options else 5.0,
            cache_dir=str(tmp_path / "cache"),
            **{"output_dir": str(tmp_path / "run"), **options},
        )
        streaming.find_shards.cache_clear()  # a launch lists the shards once
        return prepare_causal_data(recipe, load_configuration(recipe), lambda updates: 8 * updates)

    (tmp_path / "run").mkdir()
    return prepare


def samples_at(train, start: int, stop: int) -> list[list[int]]:
    return [train[int(place)]["input_ids"].tolist() for place in train.indices(start, stop)]


@pytest.mark.parametrize("packing", ["documents", "concatenate", "none"])
def test_a_window_of_all_data_is_the_data_in_memory(prepared, tmp_path, packing):
    folder = write_shards(tmp_path / "data")
    memory = prepared(folder / "*.jsonl", packing=packing).train
    stream = prepared(folder / "*.jsonl", packing=packing, streaming="1GiB", max_train_steps=9).train
    order, count = SampleOrder(len(memory), 42), len(memory)
    expected = [memory[int(index)]["input_ids"].tolist() for index in order.indices(0, 2 * count + 3)]
    assert samples_at(stream, 0, 2 * count + 3) == expected


@pytest.mark.parametrize("ending", WRITERS)
def test_each_record_comes_once_in_a_pass(prepared, tmp_path, ending):
    column = {"text_column": "txt"} if ending == ".tar" else {}
    folder = write_shards(tmp_path / "data", ending)
    data = prepared(folder / f"*{ending}", streaming="3KiB", packing="none", max_train_steps=9, **column)
    rows = samples_at(data.train, 0, 300)
    assert sorted(data.tokenizer.decode(row, skip_special_tokens=True) for row in rows) == sorted(TEXTS)
    windows = [window for window in data.train.known if window.turn == 0]
    assert len(windows) > 2
    assert samples_at(data.train, 300, 600) != rows  # another order of the shards and in each window


def test_a_place_is_one_number(prepared, tmp_path):
    """A run that resumes finds its window by the file of the run's folder, or without it, in steps of another size."""
    folder, how = write_shards(tmp_path / "data"), {"streaming": "4KiB", "max_train_steps": 99}
    first = prepared(folder / "*.jsonl", **how).train
    expected = samples_at(first, 0, 150)
    for path in first.folder.rglob("*.arrow"):
        path.unlink()
    table = first.table
    assert table.exists()
    resumed = prepared(folder / "*.jsonl", **how).train
    assert resumed.known == first.known[: len(resumed.known)] != []
    assert [row for at in range(60, 150, 3) for row in samples_at(resumed, at, at + 3)] == expected[60:]
    table.unlink()
    assert samples_at(prepared(folder / "*.jsonl", **how).train, 140, 150) == expected[140:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [*lines[:3], lines[3][:9]],
        lambda lines: [b"\xff\x00\xfe", *lines],
        lambda lines: [b'{"shards": 7}'],
        lambda lines: [*lines[:2], *lines[3:]],  # one is missing
        lambda lines: [line.replace(b'"samples": ', b'"samples": "x", "more": ') for line in lines],
    ],
)
def test_a_damaged_file_of_windows_is_passed_over(prepared, tmp_path, damage):
    folder, how = write_shards(tmp_path / "data"), {"streaming": "4KiB", "max_train_steps": 99}
    first = prepared(folder / "*.jsonl", **how).train
    expected = samples_at(first, 0, 150)
    table = first.table
    table.write_bytes(b"\n".join(damage(table.read_bytes().splitlines())))
    if b'"shards": 7' in table.read_bytes():  # as of other data
        assert "--resume never" in refusal(prepared, folder / "*.jsonl", **how)
    else:
        assert samples_at(prepared(folder / "*.jsonl", **how).train, 140, 150) == expected[140:]


def test_a_stream_is_the_same_however_long_the_run(prepared, tmp_path):
    """So a finished run can be made longer; and nothing is read to see that."""
    folder = write_shards(tmp_path / "data")
    short, long = (prepared(folder / "*.jsonl", streaming="2KiB", max_train_steps=steps).train for steps in (20, 500))
    assert len(long) == 25 * len(short)
    assert data_fingerprint(short, "none") == data_fingerprint(long, "none")
    assert len(long.known) <= 1
    samples_at(short, 0, 160)
    named = tmp_path / "run" / "checkpoints" / "update_00000010"
    how = {"resume": str(named), "output_dir": str(tmp_path / "longer")}
    resumed = prepared(folder / "*.jsonl", streaming="2KiB", max_train_steps=500, **how)
    assert len(resumed.train.known) > 2, "it finds its window by the file of the run that it resumes"
    assert data_fingerprint(resumed.train, "none") == data_fingerprint(long, "none")
    for other in (
        prepared(folder / "*.jsonl", streaming="4KiB", max_train_steps=20, resume="never"),
        prepared(folder / "*.jsonl", streaming="2KiB", max_train_steps=20, resume="never", seed=1),
        prepared(folder / "[01].jsonl", streaming="2KiB", max_train_steps=20, resume="never"),
    ):
        assert data_fingerprint(other.train, "none") != data_fingerprint(long, "none")


def test_evaluating_reads_no_shard(prepared, tmp_path):
    held_out = write_records(tmp_path / "held_out.jsonl", [{"text": text} for text in TEXTS[:9]])
    how = {"streaming": "1MiB", "evaluate_only": True}
    data = prepared("s3://no-bucket/*.jsonl", validation_file=[str(held_out)], **how)
    assert data.train is None
    assert data.validation.stats.documents == 9
    assert "validation_file" in " ".join(recipe_of(train_file=["a.jsonl"], **how).problems())


def test_the_disk_holds_a_few_windows(prepared, tmp_path):
    folder = write_shards(tmp_path / "data")
    train = prepared(folder / "*.jsonl", streaming="2KiB", max_train_steps=999).train
    train.lag = 2
    for place in range(0, 400, 4):
        samples_at(train, place, place + 4)
    assert train.known[-1].number > 10
    assert len(list(train.folder.glob("window-*/"))) <= 8


def test_the_table_of_other_shards_is_refused(prepared, tmp_path):
    folder, how = write_shards(tmp_path / "data"), {"streaming": "4KiB", "max_train_steps": 9}
    train = prepared(folder / "*.jsonl", **how).train
    samples_at(train, 0, 4)
    write_lines(folder / "9.jsonl", ["one more"])
    assert "shards" in refusal(prepared, folder / "*.jsonl", **how)
    assert prepared(folder / "*.jsonl", **how, resume="never").train.known[0].number == 0
    assert len(prepared(folder / "[0-2].jsonl", **{**how, "streaming": "1KiB"}).train.known) == 1


class Unreliable(http.server.SimpleHTTPRequestHandler):
    """A server that drops the connection in the middle of every third answer."""

    answers = 0

    def log_message(self, *_):
        pass

    def do_GET(self):
        data = Path(self.translate_path(self.path)).read_bytes()
        Unreliable.answers += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if Unreliable.answers % 3:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.connection.close()
        else:
            self.wfile.write(data)


@pytest.fixture
def address(tmp_path):
    """Of a server of tmp_path/data."""
    handler = lambda *how: Unreliable(*how, directory=str(tmp_path / "data"))  # noqa: E731
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_lost_connection_neither_skips_nor_repeats(prepared, tmp_path, address, monkeypatch):
    monkeypatch.setattr(streaming, "RETRY_PAUSES_S", (0.01,) * 20)
    monkeypatch.setattr(datasets.config, "STREAMING_READ_RETRY_INTERVAL", 0.01)
    write_shards(tmp_path / "data")
    how = {"streaming": "6KiB", "packing": "none", "max_train_steps": 9}
    names = [f"{address}/{number}.jsonl" for number in range(3)]
    data = prepared(*names, **how)
    rows = samples_at(data.train, 0, 300)
    assert sorted(data.tokenizer.decode(row, skip_special_tokens=True) for row in rows) == sorted(TEXTS)
    assert Unreliable.answers > 6


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"max_train_steps": None}, "max_train_steps"),
        ({"max_train_samples": 5}, "max_train_samples"),
        ({"train_file": ["1", "a.jsonl"]}, "weights"),
    ],
)
def test_what_cannot_be_streamed(changed, words):
    recipe = recipe_of(**{"train_file": ["a.jsonl"], "streaming": "1MiB", "max_train_steps": 5, **changed})
    for name in changed:
        recipe.adopt(name, changed[name], f"--{name}")
    assert words in " ".join(recipe.problems())


def test_a_broken_record_names_its_shard(prepared, tmp_path):
    folder = write_shards(tmp_path / "data")
    with (folder / "1.jsonl").open("a") as file:
        file.write('{"text": 1}\n{"te')
    assert "1.jsonl" in refusal(prepared, folder / "*.jsonl", streaming="1GiB", max_train_steps=9)


def test_names_of_columns_in_upper_case(prepared, tmp_path):
    write_records(tmp_path / "a.jsonl", [{"Text": text, "Id": f"{place} x"} for place, text in enumerate(TEXTS)])
    data = prepared(tmp_path / "a.jsonl", streaming="1GiB", max_train_steps=9, packing="none")
    assert data.tokenizer.decode(samples_at(data.train, 0, 1)[0], skip_special_tokens=True) in TEXTS


def test_numbers_of_two_types_are_one_column(tmp_path):
    for name, value in (("a", 1), ("b", 2.5)):
        write_records(tmp_path / f"{name}.jsonl", [{"n": value}] * 2)
    found = read_window(find_shards((str(tmp_path / "*.jsonl"),)), [0, 1], (0, 0), 1 << 20)[0]
    assert found["n"].to_pylist() == [1, 1, 2.5, 2.5]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize("value", [1, [1], {"a": 1}])
def test_shards_with_other_types_are_named(tmp_path, ending, value):
    for name, own in (("a", value), ("b", "x")):
        table, path = datasets.Dataset.from_dict({"n": [own]}), tmp_path / f"{name}{ending}"
        (table.to_json if ending == ".jsonl" else table.to_parquet)(path)
    message = refusal(read_window, find_shards((str(tmp_path / f"*{ending}"),)), [0, 1], (0, 0), 1 << 20)
    assert f"{tmp_path / 'a'}{ending} and the other shards of a window differ in n (" in message
    assert "int64" in message
    assert "string" in message


def test_formats_and_names(prepared, tmp_path):
    folder = write_shards(tmp_path / "data")
    (folder / "a.txt").write_text("text")
    how = {"streaming": "1GiB", "max_train_steps": 9}
    assert "a.txt" in refusal(prepared, folder / "*", **how)
    assert "s3://" in refusal(prepared, "nothing://x", **how)
