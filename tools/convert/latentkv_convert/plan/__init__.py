"""What the cache will hold: methods and what they share, allocators, the frontier of groupings, forecasts."""
