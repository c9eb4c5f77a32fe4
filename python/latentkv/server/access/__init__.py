"""Who may call, and whose beginnings a request may go on from."""
