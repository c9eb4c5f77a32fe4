"""What is fused into the factors before they are written: rotations inside segments, and means."""
