"""Ranks: bootstrap, context, stopping, output and failure of a process."""
