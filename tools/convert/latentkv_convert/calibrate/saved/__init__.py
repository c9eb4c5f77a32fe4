"""What a conversion saves for later ones: finished statistics, and the layers of an interrupted pass."""
