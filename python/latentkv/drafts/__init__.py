"""Tokens that may come next, which one step of the model verifies: who guesses them, and how many pay."""
