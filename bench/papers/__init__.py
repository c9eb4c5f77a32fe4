"""What papers claim of speed and memory, and caches that do what their methods do."""
