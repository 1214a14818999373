"""The model of bytes and seconds: what a training step takes, before there is a machine.

What is marked "fitted" was fitted on published measurements (measured_rows.csv) by benchmarks/published_times.py;
docs/measurements/plan-times.md says on how many.
"""
