"""The spine: what every rank does and holds, as three tables."""
