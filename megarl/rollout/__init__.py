"""Generation: engines as replicas, what is asked of them, and how requests are spread. Read ``engine.py`` first."""
