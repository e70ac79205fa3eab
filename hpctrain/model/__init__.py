"""Models: the transformer, its initialisation and dropout, and the door for users' own."""
