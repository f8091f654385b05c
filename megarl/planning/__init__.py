"""What can be said about a run before it starts: on a login node, without torch."""
