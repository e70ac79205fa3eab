"""Scaling studies: sweeps of one job over its keys, and reports of what they measured."""
