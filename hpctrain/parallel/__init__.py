"""Parallelism applied to a model; :mod:`hpctrain.parallel.parallelize` is the one place."""
