"""A version of a library that was not tried is named, by a run and by `zerofit doctor`."""

from importlib.metadata import version

from helpers import ROOT, main_of

from zerofit import __version__
from zerofit.record import environment
from zerofit.tools.doctor.doctor import make_report, read_options


def test_a_version_outside_the_bounds_is_said_in_one_line(monkeypatch, capsys, tmp_path):
    """Of the packages that everybody has; a run says it before it imports them, and so does zerofit doctor."""
    assert environment.untried_versions() == []
    needed = ["torch<2.3,>=2.2", "pytest", "peft>=0.1", 'pyyaml<1; extra == "x"', "not-there>=1", "tqdm>=99"]
    monkeypatch.setattr(environment, "requires", lambda name: needed)
    (line,) = environment.untried_versions()
    installed = f"torch {version('torch')}, tqdm {version('tqdm')}"
    assert line == f"zerofit {__version__} was not tried with {installed}: pip install 'torch<2.3,>=2.2' 'tqdm>=99'"
    assert ("warning", line) in make_report(*read_options([]), {}).findings
    words = f"--config_name gpt2 --tokenizer_name x --train_file {ROOT}/README.md --strategy x --output_dir {tmp_path}"
    assert main_of("clm")(words.split()) == 2
    assert f"warning   {line}" in capsys.readouterr().out
