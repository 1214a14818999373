"""From records to samples: sources, tokenizing, packing, collating, and the global order of samples."""
