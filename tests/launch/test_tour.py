"""docs/tour.md: its commands, as printed and in their order, in an empty folder, print what is on the page."""

import os
import re
import subprocess

import pytest
from helpers import BIN, ROOT, environment

STEP = re.compile(r"^```bash\n(.*?)^```\n(?:\n```\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
# What depends on the machine and on its Python: losses, sizes, times and rates.
VARIES = re.compile(r"\d[\d,]*[.:]\d[\d.:]*(e[-+]\d+)?[kMG]?|[\d,]+(?= tokens/s| +\d+\.\dM)")


def lines_of(text: str, exact: bool) -> list[str]:
    return [" ".join((line if exact else VARIES.sub("#", line)).split()) for line in text.splitlines()]


@pytest.mark.long
def test_the_tour_is_as_the_page_says(tmp_path):
    steps = STEP.findall((ROOT / "docs" / "tour.md").read_text())
    assert len(steps) >= 6
    place = environment(PATH=f"{BIN}:{os.environ['PATH']}", PYTHONPATH=str(ROOT))
    for commands, shown in steps:
        done = subprocess.run(
            ["bash", "-e"], input=commands, cwd=tmp_path, env=place, text=True, timeout=1200,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{commands}\n{done.stdout}"
        exact = commands.startswith("zerofit plan")
        printed = iter(lines_of(done.stdout, exact))
        missing = [line for line in lines_of(shown, exact) if line != "..." and line not in printed]
        assert not missing, f"{commands}\n{done.stdout}"
