"""The planner: memory, step time and the best layout of a job, as pure numbers.

Nothing here starts a process, reads a device or imports torch; see docs/planner.md.
"""
