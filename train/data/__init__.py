"""Sources, tokenising, packing, collating, and the global order of samples."""
