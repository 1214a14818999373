"""Numbers and truth values in quotes: published DeepSpeed files have them, and DeepSpeed reads some of them.

Sections that it reads through pydantic may say "true"; of the others it takes the string as it is, and goes wrong.
"""

import json
import re
from typing import Any

from zerofit.strategy.launch import tell_deepspeed_of_a_cpu

VALUE = re.compile(r"true|false|[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


def read_quoted(config: dict[str, Any]) -> list[str]:
    """Put what DeepSpeed's own parsers make of a string in its place. Returns a note on each."""
    tell_deepspeed_of_a_cpu()
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero import config as zero

    parsers = {
        "fp16": precision_config.DeepSpeedFP16Config,
        "bf16": precision_config.DeepSpeedBF16Config,
        "bfloat16": precision_config.DeepSpeedBF16Config,
        "zero_optimization": zero.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": zero.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": zero.DeepSpeedZeroOffloadOptimizerConfig,
    }
    notes = []
    for name, parser in parsers.items():
        section: Any = config
        for step in name.split("."):
            section = section.get(step) if isinstance(section, dict) else None
        for key, value in section.items() if isinstance(section, dict) else ():
            read = _read(parser, key, value) if isinstance(value, str) and VALUE.fullmatch(value.strip()) else value
            if not isinstance(read, str):
                section[key] = read
                if isinstance(value, str):
                    notes.append(f'{name}.{key} = "{value}" is a string, which DeepSpeed reads as {json.dumps(read)}')
    return notes


def _read(parser: Any, key: str, value: str) -> Any:
    """The value as DeepSpeed has it; the string itself where it refuses it."""
    from pydantic import ValidationError

    fields = {field.alias or name: name for name, field in parser.model_fields.items()}
    try:
        return getattr(parser(**{key: value}), fields.get(key, key), value)
    except ValidationError:
        return value


def still_quoted(config: dict[str, Any], prefix: str = "") -> list[str]:
    """The strings that look like a number or a truth value, and what to write."""
    problems = []
    for key, value in config.items():
        if isinstance(value, dict):
            problems += still_quoted(value, f"{prefix}{key}.")
        elif isinstance(value, str) and VALUE.fullmatch(value.strip()):
            problems.append(f"{prefix}{key} is the string {value!r}. Write {value.strip().lower()} without quotes")
    return problems
