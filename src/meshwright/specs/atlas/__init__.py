"""Models, devices and links as data, each entry with its source."""
