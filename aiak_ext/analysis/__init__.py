"""What the `aiak-ext` command computes: lengths of a dataset, simulated settings, fitted costs, checks before a run."""
