"""The wheel holds the library, and what lies beside it in a clone: scripts, strategies, recipes."""

from pathlib import Path

from setuptools import find_packages, setup

beside = ["train", "accelerate_configs", "ds_configs", *map(str, Path("recipes").glob("*"))]
data = {f"zerofit.{folder.replace('/', '.')}": folder for folder in beside}

setup(
    packages=[*find_packages(include=["zerofit*"]), *data],
    package_dir=data,
    package_data={
        **{package: ["*.yaml", "*.json", "*.py"] for package in data},
        "zerofit": ["py.typed"],
        "zerofit.estimate": ["measured_rows.csv"],
        "zerofit.model": ["architectures/*.json", "templates/*.jinja"],
        "zerofit.tools.submit": ["templates/*.jinja"],
        "zerofit.tools.simulate": ["csrc/*", "device/*.py"],
    },
)
