"""How a tensor of the file is stored: its type, and its values in that type."""
