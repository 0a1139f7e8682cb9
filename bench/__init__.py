"""Scores of predictions against measured truth, and how fitted constants came to be."""
