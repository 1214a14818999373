"""The private parts of other libraries that this program cannot do without, in one module for each library.

A part is a function, a context manager or a class, and its docstring says why nothing public does, and what happens
without it ("Without it"); its module says what the parts were tried with ("Tried with"). What a part replaces in a
library it puts back. tests/unit/test_compat.py finds private parts elsewhere, and touches each one here: after an
upgrade it names the part that is gone.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

# What is replaced for longer than a call is put back when a run has ended (`run_once` of zerofit/training/entry.py).
UNTIL_THE_RUN_ENDS = contextlib.ExitStack()


@contextlib.contextmanager
def replaced(owner: Any, name: str, other: Any) -> Iterator[None]:
    """Within this context a module or an object has another function, class or value of this name."""
    is_its_own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        if is_its_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
