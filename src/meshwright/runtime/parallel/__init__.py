"""The parallel half of a decoder: how blocks meet the axes of the mesh. One file a strategy."""
