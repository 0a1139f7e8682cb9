"""Generation speed of the own runtime beside that of others, each a program of its own."""
