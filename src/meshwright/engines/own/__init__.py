"""The runtime of this project as an engine: it splits unevenly."""
