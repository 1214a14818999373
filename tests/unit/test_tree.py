"""What holds for every file of the tree: a clone needs nothing beside it."""

import subprocess

from helpers import ROOT

BESIDE = "../" + "shared"  # a folder that stood beside the checkout where this was written


def test_no_file_names_a_folder_beside_the_clone():
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in files.split("\0") if name and (ROOT / name).is_file()]
    assert len(names) > 200
    found = [name for name in names if BESIDE.encode() in (ROOT / name).read_bytes()]
    assert not found, f"{BESIDE} is named in {', '.join(found)}"
