"""The run folder, its files, meters, plots, trackers and the terminal."""
