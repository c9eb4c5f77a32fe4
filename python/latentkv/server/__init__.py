"""`latentkv serve`: OpenAI's and llama.cpp's HTTP interfaces over one engine. Needs the extra `server`."""
