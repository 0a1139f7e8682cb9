"""SGLang: profile, command, logs."""
