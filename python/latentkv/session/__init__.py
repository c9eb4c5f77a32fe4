"""One cache: the tokens in it, what of them a prompt keeps, saved states, and whose turn it is."""
