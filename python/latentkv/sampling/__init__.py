"""Which token comes next: options, grammars, log-probabilities, guesses ahead."""
