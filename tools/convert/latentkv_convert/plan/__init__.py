"""What a plan is chosen from: options, the frontier of groupings, and times on a GPU."""
