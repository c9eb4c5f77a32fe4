"""What a byte budget buys: row formats by name, allocation, bytes of factors."""
