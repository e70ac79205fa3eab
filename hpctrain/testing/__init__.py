"""Parts that tests are made of: real MPI ranks, a real local Slurm cluster, real slow links.

They ship with the package so that users can test their own models and jobs with them; see
docs/testing.md. Nothing here is imported by the rest of hpctrain, and importing this package
loads neither torch nor mpi4py.

- :mod:`hpctrain.testing.slurm`: a Slurm cluster of several nodes on this one machine.
- :mod:`hpctrain.testing.hosts`: hosts with their own network behind rate-limited links.
- :mod:`hpctrain.testing.plugin`: the pytest fixtures, registered by installing the package.
"""
