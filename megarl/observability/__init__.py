"""What a run tells people and machines: typed metrics, spans, logs, trackers, console, heartbeats."""
