"""Measured constants as data: source, engine version and the rows each was fitted on."""
