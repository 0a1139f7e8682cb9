"""Hangs of real processes on gloo and shared memory: programs, what runs them, what they must be called."""
