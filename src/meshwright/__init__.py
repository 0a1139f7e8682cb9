"""meshwright plans, proves, runs and diagnoses parallel layouts of large language models."""
