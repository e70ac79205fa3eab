"""Training: data order, state, the loop, metrics; what every rank executes."""
