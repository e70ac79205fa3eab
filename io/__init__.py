"""What lies on disk: checkpoints of global logical tensors and token files, both plain HDF5.

- :mod:`hpctrain.io.shards`: the tensors a rank hands in.
- :mod:`hpctrain.io.checkpoint`: a directory of committed checkpoints.
- :mod:`hpctrain.io.tokens`: token files; :mod:`hpctrain.io.order`: the order of samples.
- :mod:`hpctrain.io.corpus`: text to token files.

The formats are described in docs/checkpoint-format.md and docs/data.md. Nothing here knows
torch or MPI: arrays are numpy's, and a communicator is handed in.
"""
