"""The text that a model is calibrated on where none is given."""
