"""Models, texts and questions to measure on."""
