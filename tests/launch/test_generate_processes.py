"""`zerofit generate` with several processes: killed half-way, and completed by another number of them."""

import json
import subprocess
import sys
import time

import pytest
from folders import save_writer, small_tokenizer
from helpers import environment

COMMAND = [sys.executable, "-m", "zerofit.cli", "generate"]


@pytest.mark.long
@pytest.mark.parametrize("drawn", [[], ["--temperature", "1.5", "--seed", "3"]])
def test_a_killed_run_is_completed_by_other_processes(tmp_path, drawn):
    save_writer(tmp_path / "model", small_tokenizer(tmp_path / "tokenizer"))
    asked = tmp_path / "asked.jsonl"
    prompts = [f"{'word ' * (number % 9)}{number}" for number in range(80)]
    asked.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))

    def command(name: str, *flags: str) -> list[str]:
        return [*COMMAND, "--model", str(tmp_path / "model"), "--prompt_file", str(asked), "--output",
                str(tmp_path / name), "--max_new_tokens", "30", "--batch_size", "2", *drawn, *flags]  # fmt: skip

    def run(name: str, *flags: str) -> tuple[str, str]:
        done = subprocess.run(command(name, *flags), capture_output=True, text=True, env=environment(), timeout=200)
        assert done.returncode == 0, done.stderr
        return (tmp_path / name).read_text(), done.stderr

    one, _ = run("one.jsonl")
    assert [json.loads(line)["prompt"] for line in one.splitlines()] == prompts
    killed, journal = command("all.jsonl", "--num_processes", "2"), tmp_path / "all.jsonl.partial"
    with subprocess.Popen(killed, stderr=subprocess.DEVNULL, env=environment()) as process:
        until = time.monotonic() + 200
        while journal.read_text().count("generated") < 8 if journal.exists() else True:
            assert process.poll() is None
            assert time.monotonic() < until
        process.kill()  # its processes notice it
    completed, err = run("all.jsonl", "--tensor_parallel", "2")
    assert "prompts are answered already" in err
    assert completed == one
    assert not journal.exists()
    assert not list(tmp_path.glob("*.log"))
