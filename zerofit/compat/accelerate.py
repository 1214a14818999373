"""Private parts of accelerate. Tried with accelerate 1.15."""


def forget_state() -> None:
    """Let accelerate forget the run of this process, so that another one may have another precision or strategy.
    accelerate keeps it for as long as the process lives; its own tests reset it so. Without it: a second run in a
    process is refused, or trains as the first one did."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
