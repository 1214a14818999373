"""The loop, the schedule, evaluation, meters and the record of a run."""
