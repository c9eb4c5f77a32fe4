"""One cache: the tokens in it, what of them a prompt keeps, saved states, and the lock."""
