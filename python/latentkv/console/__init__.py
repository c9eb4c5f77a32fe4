"""What the commands share: arguments, what people read, and how far a stage is."""
