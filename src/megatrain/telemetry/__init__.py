"""What a run tells its user: notices, counters, the timeline."""
