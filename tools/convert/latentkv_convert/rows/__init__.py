"""What a cache holds for a token: rows before they are compressed, their formats, their bytes."""
