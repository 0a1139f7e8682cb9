"""Why a distributed job hangs or is slow: readers fill an ``Incident``, ``hang`` draws ``Finding`` rows from it."""
