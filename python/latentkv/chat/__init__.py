"""From messages to a prompt: templates, tools, and the formats that are built in."""
