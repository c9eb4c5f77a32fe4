"""From a prompt to an answer: the loop over tokens, and OpenAI's shapes of what it writes."""
