"""One function a method: (ranks, chunks, micro_batches, options) to a table of passes."""
