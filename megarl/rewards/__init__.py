"""Scoring responses: verifiers, your own functions, and the pool of processes they run in."""
