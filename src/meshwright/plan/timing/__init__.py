"""Time of what the ledger counts: collectives on a topology, work on a device, and how sure each figure is."""
