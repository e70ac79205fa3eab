"""Health of a job: preflight, heartbeats, watchdog, stragglers, inconsistency."""
