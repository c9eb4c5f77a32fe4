"""What mixes tokens in a layer, where it is not usual attention."""
