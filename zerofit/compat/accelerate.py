"""Private parts of accelerate. Tried with accelerate 1.15."""


def forget_state() -> None:
    """Reset accelerate's state, so that the next run in this process may have another precision or strategy.
    accelerate keeps its state as long as the process lives; its own tests reset it with this method. Without it: a
    second run in a process is refused, or trains with the settings of the first."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
