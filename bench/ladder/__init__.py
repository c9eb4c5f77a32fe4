"""The parts of bench/ladder.py: its rungs, the files they need, and one cell in a process of its own."""
