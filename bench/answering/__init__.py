"""What a model says with a given cache: answers of many sequences, and logits while it decodes."""
