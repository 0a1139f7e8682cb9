"""Predict a ledger from specs, choose a layout, say why."""
