"""zerofit: train it, fit it, prove it."""

import os

__version__ = "0.1.0"

# Libraries report their use, and ask the hub to convert weights, unless told otherwise before they are imported:
# docs/safety.md.
for _name, _value in (
    ("HF_UPDATE_DOWNLOAD_COUNTS", "0"),
    ("HF_HUB_DISABLE_TELEMETRY", "1"),
    ("DISABLE_SAFETENSORS_CONVERSION", "1"),
):
    os.environ.setdefault(_name, _value)
