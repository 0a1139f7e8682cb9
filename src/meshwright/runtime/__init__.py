"""Runs a model under a layout. The only room that imports torch; importing this package alone does not."""
