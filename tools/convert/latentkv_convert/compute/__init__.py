"""How this machine computes: threads, precision, arrays and their memory."""
