"""OpenAI's Responses interface."""
