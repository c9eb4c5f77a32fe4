"""llama.cpp's own routes: completions, filling in the middle, templates, and what the server is like."""
