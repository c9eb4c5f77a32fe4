"""Steps fused into the factors before they are written: rotations inside segments, and the file's RoPE row
order."""
