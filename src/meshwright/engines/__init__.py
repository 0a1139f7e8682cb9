"""One folder an engine: profile, command, logs."""
