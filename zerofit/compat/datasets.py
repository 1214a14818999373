"""Private parts of datasets."""

from collections.abc import Callable
from typing import Any


def check_blocks(builder: Any, check: Callable[..., None]) -> None:
    """Let `check` see each block that a builder of JSON tables has read (a pyarrow table, the paths of its values that
    are texts of JSON) before it is cast to the schema of the blocks before it.

    The library casts what differs: "007" becomes 7, and dates among texts become times. Tried with datasets 5.2.
    Without it: texts of JSON files may be changed without a word.
    """
    cast = builder._cast_table

    def checked(table: Any, json_field_paths: Any = ()) -> Any:
        check(table, json_field_paths)
        return cast(table, json_field_paths=json_field_paths)

    builder._cast_table = checked
