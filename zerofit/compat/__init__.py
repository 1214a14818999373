"""The private parts of other libraries that zerofit needs, in one module for each library.

A part is a function, a context manager or a class. Its docstring says why nothing public is enough, and what happens
without it ("Without it"). The module's docstring says with which versions the parts were tried ("Tried with"). A part
restores what it replaces in a library. tests/unit/test_compat.py looks for private parts elsewhere, and checks each
one here: after an upgrade it names the part that is missing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

# Restores, at the end of a run, what was replaced for longer than a call (`run_once` of zerofit/training/entry.py).
UNTIL_THE_RUN_ENDS = contextlib.ExitStack()


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Within this context the attribute `name` of a module or an object is replaced."""
    is_in_owner = name in vars(owner)  # otherwise the attribute is inherited
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if is_in_owner:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
