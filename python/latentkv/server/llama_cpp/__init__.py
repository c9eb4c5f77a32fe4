"""llama.cpp's own routes: completions, infill, templates, and the server's properties."""
